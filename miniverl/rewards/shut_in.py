"""Carries out one function of ours, or of a library, in a copy of this process that is shut in (`isolation`).

For libraries that evaluate what a response says: whatever it makes them do, it happens where there is no
network, no file to write and no other process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable

from miniverl.rewards import isolation

_MEMORY = 8 << 30
"""Bytes of address space, most of which loaded libraries only reserve."""
_CPU_S = 600
"""Far above reward.timeout_s, which ends it first."""
_FILE_BYTES = 1 << 20


def shut_in(function: Callable[[], float]) -> float:
    """What `function` returns. Raises RuntimeError, with the text of what it raised, if it fails or dies, and
    where the machine offers no isolation (then it is not run)."""
    with tempfile.TemporaryDirectory(prefix="miniverl-shut-in-") as scratch:
        reads, writes = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _run(function, scratch, parent, writes)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read(1 << 16)
        _, status = os.waitpid(child, 0)
    if not said:
        raise RuntimeError(f"the shut-in process ended with status {os.waitstatus_to_exitcode(status)}")
    score, error = json.loads(said)
    if error is not None:
        raise RuntimeError(error)
    return float(score)


def _run(function: Callable[[], float], scratch: str, parent: int, writes: int) -> None:
    """The copy: never returns."""
    try:
        isolation.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        # Above all the socket to the driver, on which verdicts go out.
        os.dup2(writes, 3)
        os.closerange(4, 1 << 16)
        readable = ["/usr", "/lib", "/lib64", "/dev/null", sys.prefix, sys.base_prefix]
        isolation.isolate(scratch, readable, _MEMORY, _CPU_S, _FILE_BYTES)
        answer = [float(function()), None]
    except BaseException as error:
        answer = [None, f"{type(error).__name__}: {error}"[:1000]]
    try:
        os.write(3, json.dumps(answer).encode())
    finally:
        os._exit(0)
