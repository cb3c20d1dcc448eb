"""What the driver (and Ray) add to a GKD step: its wall time minus the time inside workers' methods.

The same experiment under placement=local and one_gpu, steps in turn, with the sinks that a run has by
default except the console. `python -m benchmarks.overhead [--rounds 5]`.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.experiment import gkd_config, open_loop
from benchmarks.inside import MeteredPool
from benchmarks.measure import Outcome, Target, median, one_thread
from miniverl.config import Config
from miniverl.controller.group import WorkerGroup
from miniverl.controller.pool import LocalPool, Pool, RayPool
from miniverl.workers.rollout.worker import RolloutWorker

CALLS = 200
SHARE, FLOOR_MS = 0.05, 20.0
ROLES = ("actor", "rollout", "teacher")


class Placed:
    """The experiment under one placement."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.pool = MeteredPool(pool)
        self.loop = open_loop(config, self.pool)
        self.rollout = WorkerGroup(self.pool, "rollout")
        self.walls: list[float] = []
        self.overheads: list[float] = []

    def step(self) -> None:
        inside, start = self.pool.inside_s(), time.perf_counter()
        self.loop.step()
        wall = time.perf_counter() - start
        self.walls.append(wall)
        self.overheads.append(wall - (self.pool.inside_s() - inside))

    def dispatch_s(self) -> float:
        """Median wall time of a call that does next to nothing."""
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            self.rollout.first(RolloutWorker.notes)
            times.append(time.perf_counter() - start)
        return median(times)

    def close(self) -> None:
        self.loop.record.sinks.close()
        self.pool.close()


def open_placed(kind: str) -> Placed:
    if kind == "local":
        config = gkd_config("local", ("jsonl", "tensorboard"))
        return Placed(config, LocalPool(config.placement, "cpu"))
    config = gkd_config("one_gpu", ("jsonl", "tensorboard"))
    return Placed(config, RayPool(config.placement, "cpu", "miniverl-bench", ROLES))


def summarise(kind: str, placed: Placed, outcome: Outcome) -> list[str]:
    step, overhead, call = median(placed.walls[1:]), median(placed.overheads[1:]), placed.dispatch_s()
    outcome.numbers[kind] = {
        "step_s": step,
        "overhead_ms": overhead * 1e3,
        "share": overhead / step,
        "dispatch_us": call * 1e6,
        "all_overheads_ms": [round(o * 1e3, 2) for o in placed.overheads[1:]],
    }
    allowed = max(SHARE * step * 1e3, FLOOR_MS)
    who = "driver" if kind == "local" else "driver + Ray"
    outcome.targets.append(Target(f"{kind}: {who} of a step", overhead * 1e3, "≤", round(allowed), "ms"))
    return [
        f"placement={kind}",
        f"{step:.2f}",
        f"{overhead * 1e3:.1f}",
        f"{overhead / step:.2%}",
        f"{call * 1e6:.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="steps that count, after one that does not")
    args = parser.parse_args()
    one_thread()
    outcome = Outcome("overhead")
    running: dict[str, Placed] = {}
    rows: list[list[str]] = []
    try:
        for kind in ("local", "one_gpu"):

            def start(kind: str = kind) -> None:
                running[kind] = open_placed(kind)

            outcome.attempt(kind, start)
        for _ in range(args.rounds + 1):
            for kind, placed in running.items():
                if kind not in outcome.failed:
                    outcome.attempt(kind, placed.step)
        for kind, placed in running.items():
            if kind not in outcome.failed:

                def finish(kind: str = kind, placed: Placed = placed) -> None:
                    rows.append(summarise(kind, placed, outcome))

                outcome.attempt(kind, finish)
    finally:
        for placed in running.values():
            placed.close()
    return outcome.finish(("one GKD step", "wall s", "overhead ms", "share", "one call µs"), rows)


if __name__ == "__main__":
    sys.exit(main())
