"""The process that reward functions run in: reads calls, answers verdicts, one JSON line each, over a socket.

It imports neither torch nor any other room, so that it starts in a blink and its death costs little.
Functions run on its main thread (signal.alarm works); what they print goes to stderr, never into the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any, SupportsFloat

from miniverl.rewards.registry import BUILT_INS
from miniverl.rewards.sample import Sample

PARTS_LIMIT = 64
"""Most entries of a returned dict."""
_PR_SET_PDEATHSIG = 1


class NoVerdict(Exception):
    """A return value that is no score; its text is `KIND: why`."""


def load(function: str, kwargs: Mapping[str, Any]) -> Callable[[Sample], object]:
    """The function of a built-in's name or an import path, with its settings bound.

    Raises whatever the import raises, AttributeError or TypeError for a name that is not there or does not
    take (sample, **kwargs).
    """
    if function in BUILT_INS:
        module, name = importlib.import_module(BUILT_INS[function]), function
    else:
        place, _, name = function.rpartition(":")
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found = vars(module).get(name)
    if not callable(found):
        raise AttributeError(f"{module.__file__} has no function {name}")
    inspect.signature(found).bind(Sample("", "", ""), **kwargs)
    prepare = vars(module).get("prepare") if function in BUILT_INS else None
    if callable(prepare):
        prepare()
    return lambda sample: found(sample, **kwargs)


def normalise(value: object) -> tuple[float, dict[str, float]]:
    """A function's return value as (score, parts).

    A number is what float() takes of bool, int, float, Decimal, NumPy scalars and tensors without dimensions;
    text is none. A dict needs the key `score`; its other entries are parts. Raises NoVerdict.
    """
    if not isinstance(value, dict):
        return _number(value, "the result"), {}
    if "score" not in value:
        raise NoVerdict(f"type: the result is a dict without the key score: {_short(list(value))}")
    if len(value) > PARTS_LIMIT:
        raise NoVerdict(f"type: the result is a dict of {len(value)} entries; {PARTS_LIMIT} are the most")
    parts = {str(name): _number(part, f"part {name!r}") for name, part in value.items() if name != "score"}
    return _number(value["score"], "the score"), parts


def _number(value: object, what: str) -> float:
    if value is None:
        raise NoVerdict(f"none: {what} is None")
    if isinstance(value, Sized):
        # Tensors and arrays have a length, except those without dimensions.
        with contextlib.suppress(TypeError):
            raise NoVerdict(f"type: {what} is a {type(value).__name__} of length {len(value)}, no number")
    if not isinstance(value, SupportsFloat):
        raise NoVerdict(f"type: {what} is a {type(value).__name__}, no number")
    number = float(value)
    if not math.isfinite(number):
        raise NoVerdict(f"not finite: {what} is {number}")
    return number


def answer(call: Mapping[str, Any], functions: Mapping[str, Callable[[Sample], object]]) -> dict[str, Any]:
    """Carry out one call: {function, sample} → {score, parts} or {failure}."""
    try:
        score, parts = normalise(functions[call["function"]](Sample(**call["sample"])))
    except NoVerdict as error:
        return {"failure": str(error)}
    except BaseException as error:  # also SystemExit: whatever it is, it is the function's and is told
        return {"failure": f"exception: {type(error).__name__}: {_short(error)}"}
    finally:
        # An alarm that was left running would strike the next, innocent call.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return {"score": score, "parts": parts}


def serve(channel: socket.socket) -> None:
    """Load the functions of the first line, then answer every further line until the driver closes."""
    lines = channel.makefile("rb")
    wanted = json.loads(lines.readline())
    functions: dict[str, Callable[[Sample], object]] = {}
    for name, f in wanted.items():
        try:
            functions[name] = load(f["function"], f["kwargs"])
        except BaseException as error:
            _send(channel, {"refused": f"{name} ({f['function']}): {type(error).__name__}: {_short(error)}"})
            return
    _send(channel, {"ready": True})
    process = os.getpid()
    for line in lines:
        call = json.loads(line)
        verdict = answer(call, functions)
        if os.getpid() != process:  # a function forked, and its child came back here
            os._exit(0)
        _send(channel, {"serial": call["serial"], **verdict})


def main(fd: int, driver: int) -> None:
    """Entry of the process: `fd` is the socket, `driver` the process to die with."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it died before the line above
        return
    os.set_inheritable(fd, False)
    with socket.socket(fileno=fd) as channel:
        serve(channel)


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} does not exist (seen from {Path.cwd()})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _short(value: object) -> str:
    try:
        text = " ".join(str(value).split())
    except Exception as error:
        return f"(its text cannot be had: {type(error).__name__})"
    return text if len(text) <= 300 else text[:299] + "…"
