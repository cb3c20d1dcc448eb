"""Does a response's Python code pass the tests? It runs in a shut-in process (`candidate`, `isolation`).

The expected outputs stay here and are compared here: code that prints, exits or patches whatever it likes can
only ever give answers, never a verdict.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniverl.rewards.exact_match import final_answer
from miniverl.rewards.sample import Sample

_CANDIDATE = Path(__file__).with_name("candidate.py")
_FENCE = re.compile(r"```[ \t]*(\w*)[ \t]*\r?\n(.*?)```", re.DOTALL)
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
)


class Unsafe(Exception):
    """The code was not run, because it could not be shut in."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run of the code."""

    timeout_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Run:
    finished: bool
    """In time and with exit status 0."""
    stdout: str
    results: str
    """results.jsonl, as far as it got."""


@dataclass(frozen=True, slots=True)
class Tests:
    """
    >>> Tests.of("s", '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}').function
    'add'
    """

    inputs: Sequence[Any]
    """Per case: text for stdin, or a list of arguments."""
    outputs: Sequence[Any]
    """Per case: the text expected on stdout, or the value expected back."""
    function: str | None

    @classmethod
    def of(cls, sample_id: str, text: str) -> Tests:
        """The tests that an answer holds as JSON. Raises ValueError for what is none."""
        form = 'JSON like {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function'
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"sample {sample_id}: its answer must be {form}: {error}") from None
        if not isinstance(data, Mapping) or not isinstance(data.get("inputs"), list):
            raise ValueError(f"sample {sample_id}: its answer must be {form}")
        inputs, outputs, function = data["inputs"], data.get("outputs"), data.get("fn_name")
        if not isinstance(outputs, list) or len(outputs) != len(inputs) or not inputs:
            raise ValueError(
                f"sample {sample_id}: its answer needs as many outputs as inputs, and at least one"
            )
        kind = str if function is None else list
        if not all(isinstance(given, kind) for given in inputs):
            raise ValueError(f"sample {sample_id}: its inputs must each be a {kind.__name__}")
        return cls(inputs, outputs, function)


def code_tests(
    sample: Sample, timeout_s: float = 2.0, memory_mb: int = 512, partial: bool = False
) -> dict[str, float]:
    """1.0 if the code passes every test, else 0.0; with `partial`, the share that it passes.

    The code is the last fenced block of the final answer (the last one marked Python, if any is), or all of
    it. The answer holds the tests, see Tests. timeout_s: wall-clock and CPU seconds per test; memory_mb: MiB
    of address space. Raises Unsafe where the machine offers no isolation, ValueError for unreadable tests.
    """
    tests, limits = Tests.of(sample.id, sample.expected), Limits(timeout_s, memory_mb)
    code = code_of(sample.response)
    if tests.function is not None:
        passed = _passed_calls(code, tests, limits)
    else:
        passed = 0
        for given, expected in zip(tests.inputs, tests.outputs, strict=True):
            run = _run(code, {"stdin": given}, limits, 1)
            right = run.finished and _same_text(run.stdout, str(expected))
            passed += right
            if not right and not partial:
                break
    share = passed / len(tests.inputs)
    return {"score": share if partial else float(share == 1.0), "passed": share}


def code_of(response: str) -> str:
    """
    >>> code_of("First\\n```python\\nprint(1)\\n```\\nso\\n```\\n1\\n```")
    'print(1)\\n'
    """
    text = final_answer(response)
    blocks = _FENCE.findall(text)
    marked = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return (marked or [code for _, code in blocks] or [text])[-1]


def _passed_calls(code: str, tests: Tests, limits: Limits) -> int:
    wanted = json.dumps({"function": tests.function, "arguments": list(tests.inputs)})
    lines = _run(code, {"calls.json": wanted}, limits, len(tests.inputs)).results.splitlines()
    return sum(_same_result(line, expected) for line, expected in zip(lines, tests.outputs, strict=False))


def _run(code: str, files: Mapping[str, str], limits: Limits, cases: int) -> Run:
    """Run the code once with these files beside it. Raises Unsafe."""
    wall = limits.timeout_s * cases
    with tempfile.TemporaryDirectory(prefix="miniverl-code-") as name:
        scratch = Path(name).resolve()
        for file, text in {"stdin": "", **files, "code.py": code}.items():
            (scratch / file).write_bytes(text.encode("utf-8", "surrogatepass"))
        readable = [*_SYSTEM, sys.prefix, sys.base_prefix, str(_CANDIDATE.parent)]
        reads, writes = os.pipe()
        settings = [writes, os.getpid(), str(scratch), readable, limits.memory_mb << 20, math.ceil(wall)]
        with (scratch / "stdin").open("rb") as stdin, (scratch / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_CANDIDATE), json.dumps(settings)],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=(writes,),
                cwd=scratch,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
        os.close(writes)
        try:
            with os.fdopen(reads, "rb") as status:
                said = status.read(1000).decode("utf-8", "replace")  # ends when the code begins, or it ends
            if said != "ready":
                raise Unsafe(
                    f"the code was not run, because it could not be shut in: {said or 'nothing said'}"
                )
            process.wait(wall)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        return Run(process.returncode == 0, _text(scratch / "stdout"), _text(scratch / "results.jsonl"))


def _text(path: Path) -> str:
    # The code may have replaced its files by something that blocks or leads out of its directory.
    if path.is_symlink() or not path.is_file():
        return ""
    return path.read_bytes().decode("utf-8", "replace")


def _same_text(given: str, expected: str) -> bool:
    """Equal but for white space at line ends and around the whole."""
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in (given, expected))
    return one == other


def _same_result(line: str, expected: object) -> bool:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(result, dict) and "value" in result and _equal(result["value"], expected)


def _equal(given: object, expected: object) -> bool:
    """Equal as JSON, floats to a relative 1e-9."""
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    if isinstance(given, float) and isinstance(expected, int | float):
        return math.isclose(given, expected, rel_tol=1e-9)
    return given == expected
