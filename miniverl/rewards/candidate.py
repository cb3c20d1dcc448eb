"""The program in which a response's code runs: shuts itself in (`isolation`), reports so, and runs the code.

Started as a script by `code_tests`, in a scratch directory: `code.py` holds the code; with `calls.json`
it calls a function once per list of arguments and writes each result to `results.jsonl`, else it runs the
code as a program on stdin and stdout. It is told nothing of what is expected, so it cannot cheat.
"""

from __future__ import annotations

import json
import os
import sys
import types


def main(status: int, parent: int, scratch: str, readable: list[str], memory: int, cpu_s: int) -> None:
    """status: the pipe that gets `ready` before the code runs, or why it will not."""
    sys.path.insert(0, os.path.dirname(__file__))
    import isolation  # pyright: ignore[reportMissingImports]  # beside this script, which is no package

    del sys.path[0]
    isolation.die_with_parent()
    if os.getppid() != parent:
        return
    with open("code.py", encoding="utf-8", errors="surrogatepass") as file:
        code = file.read()
    with open("results.jsonl", "w") as results:
        try:
            isolation.isolate(scratch, readable, memory, cpu_s, FILE_BYTES)
        except BaseException as error:
            os.write(status, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.write(status, b"ready")
        os.close(status)
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        if not os.path.exists("calls.json"):
            exec(compile(code, "code.py", "exec"), vars(program))
            return
        with open("calls.json") as file:
            wanted = json.load(file)
        exec(compile(code, "code.py", "exec"), vars(program))
        call_all(vars(program), wanted["function"], wanted["arguments"], results)


FILE_BYTES = 16 << 20
"""Largest file that the code may write, its output among them."""


def call_all(names: dict, function: str, arguments: list[list], results) -> None:
    """Write {"value": …} per call, {} where it raised or the value is no JSON. The function may also be a
    method of a class Solution."""
    found = names.get(function) or getattr(names["Solution"](), function)
    for given in arguments:
        try:
            line = json.dumps({"value": found(*given)})
        except Exception:
            line = "{}"
        results.write(line + "\n")
        results.flush()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
