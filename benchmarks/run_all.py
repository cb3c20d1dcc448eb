"""All CPU benchmarks, one after another, within 20 minutes: `make bench`, or `python -m benchmarks.run_all`.

Each is a process with a deadline. Writes benchmarks/out/results.json and prints every target beside what was
measured; a missed target is reported, and only a benchmark that did not run makes the exit status 1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import OUT, ROOT, Target, read_result, show
from miniverl.report import describe_environment

TOTAL_S = 1200.0


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: tuple[str, ...]
    deadline_s: float
    measures: bool = True
    """Whether it prints a RESULT line."""


STAGES = (
    Stage("models", ("benchmarks.models",), 360),
    Stage("TRL's environment", ("benchmarks.gkd_step", "--prepare"), 480, measures=False),
    Stage("overhead", ("benchmarks.overhead",), 150),
    Stage("loss_memory", ("benchmarks.loss_memory",), 240),
    Stage("gkd_step", ("benchmarks.gkd_step",), 420),
    Stage("rollout", ("benchmarks.rollout",), 720),
)
"""Shortest first, so that a slow machine loses as little as possible to the total."""


def run(stage: Stage, left_s: float) -> dict[str, Any]:
    """The stage's RESULT, or `{"failed": …}`; prints what it said."""
    deadline = min(stage.deadline_s, left_s)
    log = OUT / f"{stage.command[0].removeprefix('benchmarks.')}.log"
    print(f"── {stage.name} (up to {deadline / 60:.0f} min; {log.relative_to(ROOT)})", flush=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *stage.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            status = process.wait(deadline)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its peers and workers, too
            process.wait()
            print(f"stopped after {deadline:.0f} s")
            return {"failed": {stage.name: f"did not end within {deadline:.0f} s"}}
    said = log.read_text(encoding="utf-8")
    print("\n".join(line for line in said.splitlines() if not line.startswith("RESULT ")), flush=True)
    if stage.measures and "\nRESULT " in f"\n{said}":
        return read_result(said)
    return {} if status == 0 else {"failed": {stage.name: f"exit status {status}, see {log}"}}


def main() -> int:
    OUT.mkdir(exist_ok=True)
    started = time.monotonic()
    results = {stage.name: run(stage, max(1.0, TOTAL_S - (time.monotonic() - started))) for stage in STAGES}
    seconds = time.monotonic() - started
    file = OUT / "results.json"
    file.write_text(
        json.dumps(
            {"environment": describe_environment(), "seconds": seconds, "benchmarks": results}, indent=1
        ),
        encoding="utf-8",
    )
    targets = [Target(**target) for result in results.values() for target in result.get("targets", [])]
    failed = {cell: why for result in results.values() for cell, why in result.get("failed", {}).items()}
    short = [target for target in targets if not target.met]
    show("all targets", ("what", "target", "measured", ""), [target.row() for target in targets])
    for cell, why in failed.items():
        print(f"FAILED {cell}: {why}")
    print(
        f"{len(targets) - len(short)} of {len(targets)} targets met, {len(failed)} cells failed, "
        f"in {seconds:.0f} s; {file.relative_to(ROOT)}"
    )
    summary = {
        "benchmark": "all",
        "targets": len(targets),
        "met": len(targets) - len(short),
        "failed": failed,
        "short": [target.what for target in short],
        "seconds": round(seconds, 1),
        "results": str(file),
    }
    print("RESULT " + json.dumps(summary), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
