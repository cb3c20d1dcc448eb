"""N processes that score (`worker`), each call under a wall-clock limit: what hangs is killed and replaced.

One thread drives them all: the children ask to die with the thread that started them (Linux ties that wish to
the thread), and scoring needs no more than one poll. What a failure means for training is `scoring`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from miniverl.rewards.sample import Sample, Verdict

START_S = 120.0
"""Longest wait for a process to load its functions."""
ANSWER_LIMIT = 1 << 20
"""Most bytes of one answer."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from miniverl.rewards import worker; "
    "worker.main(int(sys.argv[2]), int(sys.argv[3]))"
)


class CannotStart(Exception):
    """A reward function that cannot be loaded; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Function:
    """A built-in's name or an import path, and its settings."""

    function: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    """Of the function, as the pool knows it."""
    sample: Sample


class Child:
    """One process and the socket to it. It is starting, idle, or busy with the call of number `index`."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a function's prints must not mix with what the driver prints for programs
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.ready = False
        self.index: int | None = None
        self.serial = 0
        self.deadline = time.monotonic() + START_S
        self._unread = b""
        wanted = {name: {"function": f.function, "kwargs": f.kwargs} for name, f in functions.items()}
        self.send(wanted, START_S)

    def send(self, message: object, timeout_s: float) -> None:
        """Raises OSError (TimeoutError among them) if it does not take the message within the limit."""
        self.socket.settimeout(timeout_s)
        self.socket.sendall(json.dumps(message, default=_plain).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come in since; None if it is dead or talks no sense."""
        self.socket.settimeout(0)
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > ANSWER_LIMIT:
            return None
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def kill(self) -> int:
        """End it with all that it started in its process group; its exit status. To be called once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        return self.process.wait(START_S)


class RewardPool:
    """Scores calls in `workers` processes at a time. Functions are loaded at once, so that one that cannot be
    is known before anything else starts.

    Raises CannotStart from the constructor, and where a replacement process cannot load what the first ones
    could.
    """

    def __init__(self, functions: Mapping[str, Function], workers: int, timeout_s: float) -> None:
        self._functions, self._timeout_s = dict(functions), timeout_s
        self._children: list[Child] = []
        self._lock = threading.Lock()
        try:
            self._children += [Child(self._functions) for _ in range(workers)]
            while not all(child.ready for child in self._children):
                self._poll({})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self._children:
            self._children.pop().kill()

    def score(self, calls: Sequence[Call]) -> list[Verdict]:
        """A verdict for each call, in their order. Whatever a call does, it gets one: a failure has no score.

        Raises CannotStart if a killed process cannot be replaced.
        """
        with self._lock:
            verdicts: dict[int, Verdict] = {}
            waiting = deque(range(len(calls)))
            while len(verdicts) < len(calls):
                for place, child in enumerate(self._children):
                    if not waiting or not child.ready or child.index is not None:
                        continue
                    if child.process.poll() is not None:  # it died while idle: no call's fault
                        self._replace(place)
                        continue
                    index = waiting.popleft()
                    if failure := self._give(place, index, calls[index]):
                        verdicts[index] = failure
                self._poll(verdicts)
            return [verdicts[i] for i in range(len(calls))]

    def _give(self, place: int, index: int, call: Call) -> Verdict | None:
        """Send a call to an idle child; a verdict only if it cannot be sent."""
        child = self._children[place]
        child.serial += 1
        message = {"serial": child.serial, "function": call.name, "sample": call.sample.plain()}
        try:
            child.send(message, self._timeout_s)
        except (TypeError, ValueError) as error:
            return Verdict(None, failure=f"input: the sample cannot be sent: {error}")
        except OSError as error:
            self._replace(place)
            return Verdict(None, failure=f"died: its process did not take the call ({error})")
        child.index, child.deadline = index, time.monotonic() + self._timeout_s
        return None

    def _poll(self, verdicts: dict[int, Verdict]) -> None:
        """Wait until something comes or is due; take in answers, replace the dead and those over time."""
        active = [i for i, c in enumerate(self._children) if not c.ready or c.index is not None]
        if not active:
            return
        with selectors.DefaultSelector() as selector:
            for place in active:
                selector.register(self._children[place].socket, selectors.EVENT_READ, place)
            due = min(self._children[place].deadline for place in active)
            came = {key.data for key, _ in selector.select(max(0.0, due - time.monotonic()))}
        for place in active:
            child = self._children[place]
            messages = child.receive() if place in came else []
            if messages is None:
                self._bury(place, verdicts)
            elif any(self._take(child, message, verdicts) for message in messages):
                continue
            elif time.monotonic() >= child.deadline:
                self._overdue(place, verdicts)

    def _take(self, child: Child, message: Mapping[str, Any], verdicts: dict[int, Verdict]) -> bool:
        """Whether the message ends what the child was doing."""
        if refusal := message.get("refused"):
            raise CannotStart(refusal)
        if message.get("ready") and not child.ready:
            child.ready = True
            return True
        if child.index is None or message.get("serial") != child.serial:
            return False
        score, parts, failure = message.get("score"), message.get("parts", {}), message.get("failure")
        verdicts[child.index] = Verdict(score, parts, failure)
        child.index = None
        return True

    def _bury(self, place: int, verdicts: dict[int, Verdict]) -> None:
        """Replace a child that is dead, or that closed its end or talked nonsense."""
        child = self._children[place]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(1.0)  # its own exit status, if it is on its way out
        status = self._replace(place) if child.ready else child.process.poll()
        how = "nothing said" if status is None else _ending(status)
        if not child.ready:
            raise CannotStart(f"the process that loads the reward functions ended with {how}")
        if child.index is not None:
            verdicts[child.index] = Verdict(None, failure=f"died: its process ended with {how}")

    def _overdue(self, place: int, verdicts: dict[int, Verdict]) -> None:
        child = self._children[place]
        if not child.ready or child.index is None:
            raise CannotStart(f"loading the reward functions took longer than {START_S:g} s")
        failure = f"timeout: no verdict within {self._timeout_s:g} s (reward.timeout_s)"
        verdicts[child.index] = Verdict(None, failure=failure)
        self._replace(place)

    def _replace(self, place: int) -> int:
        """Kill a child and start another in its place; the exit status of the old one."""
        status = self._children[place].kill()
        self._children[place] = Child(self._functions)
        return status


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _plain(value: Any) -> object:
    """NumPy scalars and arrays as Python's; TypeError for what JSON has no word for."""
    import numpy as np

    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")
