"""CPU-seconds of one GKD step: ours through the Trainer page, TRL's GKDTrainer, and its products' bound.

The tiny pair, 8 prompts × 4 samples × 64 new tokens; all contenders take turns, step by step. `python -m
benchmarks.gkd_step [--rounds 3]`; `--prepare` only installs TRL's environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bound import LARGE, Gemms, Step, attention_operations, products
from benchmarks.experiment import (
    BETA,
    LR,
    NEW_TOKENS,
    PROMPTS,
    ROWS,
    SAMPLES,
    KeptTimers,
    gkd_config,
    open_loop,
    prompt_file,
)
from benchmarks.measure import Outcome, Target, median, one_thread
from benchmarks.models import tiny_student, tiny_teacher
from benchmarks.peers.trl_process import TrlSteps, trl_python
from miniverl.controller.memory_estimate import Shape
from miniverl.controller.pool import LocalPool
from miniverl.workers.memory import ROUNDS

OURS, TRL_DEFAULT, TRL_PLAIN = "miniverl", "TRL, its defaults", "TRL, no gradient checkpointing"
GIGA = 1e9


class OurSteps:
    """The framework's page under placement=local, with timers that count CPU-seconds."""

    def __init__(self) -> None:
        config = gkd_config("local", ())
        self.loop = open_loop(config, LocalPool(config.placement, "cpu"))
        self.timers = KeptTimers(time.process_time)
        self.loop.record.timers = self.timers
        self.steps: list[dict[str, Any]] = []
        for _ in range(ROUNDS + 1):  # while a host measures its peak memory, its allocator is slower
            self.loop.step()

    def step(self) -> None:
        cpu, wall, tokens = time.process_time(), time.perf_counter(), self.loop.record.state["tokens"]
        self.loop.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        split = self.timers.last
        total = int(self.loop.record.state["tokens"] - tokens)
        self.steps.append(
            {
                "cpu": cpu,
                "wall": wall,
                "generation": split["timing_s/gen"],
                "teacher": split["timing_s/score"],
                "new_tokens": ROWS * NEW_TOKENS,
                "prompt_tokens": total - ROWS * NEW_TOKENS,
            }
        )


def trl(name: str, steps: int, *more: str) -> TrlSteps:
    prompts, _ = prompt_file()
    settings = {
        "student": tiny_student().path,
        "teacher": tiny_teacher().path,
        "prompts": prompts,
        "rows": ROWS,
        "samples": SAMPLES,
        "new-tokens": NEW_TOKENS,
        "beta": BETA,
        "lr": LR,
        "steps": steps,
    }
    return TrlSteps(
        name, [*(part for key, value in settings.items() for part in (f"--{key}", str(value))), *more]
    )


def gemms() -> tuple[Gemms, Step, Shape, Shape]:
    student, teacher = (_shape(made.path) for made in (tiny_student(), tiny_teacher()))
    step = Step(PROMPTS, SAMPLES, prompt_file()[1], NEW_TOKENS)
    return Gemms(products(step, student, teacher)), step, student, teacher


def _shape(path: Path) -> Shape:
    return Shape.of(json.loads((path / "config.json").read_text(encoding="utf-8")))


def bounds(timed: Gemms, step: Step, student: Shape, teacher: Shape, outcome: Outcome) -> list[list[str]]:
    """Rows for the table: what the products take at their own shapes, and at the large one's rate."""
    rate = 2.0 * LARGE**3 / median(timed.large)
    attention = attention_operations(step, student, teacher)
    operations, seconds = dict(attention), {part: ops / rate for part, ops in attention.items()}
    for p in products(step, student, teacher):
        operations[p.part] += p.operations
        seconds[p.part] += median(timed.seconds[(p.m, p.k, p.n, p.kind)]) * p.count
    total, per_shape = sum(operations.values()), sum(seconds.values())
    outcome.numbers["bound"] = {
        "gflop": {part: round(ops / GIGA, 1) for part, ops in operations.items()}
        | {"total": round(total / GIGA, 1)},
        "large_gemm_gflops": rate / GIGA,
        "per_shape_cpu_s": {**seconds, "total": per_shape},
        "large_gemm_cpu_s": total / rate,
        "per_shape_gflops": {part: operations[part] / seconds[part] / GIGA for part in seconds},
    }
    rates = ", ".join(f"{part} {operations[part] / seconds[part] / GIGA:.0f}" for part in seconds)
    outcome.note(
        f"the step's own products: {total / GIGA:.0f} GFLOP; a {LARGE}³ product runs at {rate / GIGA:.0f} "
        f"GFLOP/s here, the step's shapes at {total / per_shape / GIGA:.0f} ({rates})"
    )
    at_large = {part: ops / rate for part, ops in operations.items()}
    return [
        [name, f"{sum(s.values()):.2f}", f"{s['rollout']:.2f}", f"{s['teacher']:.2f}", f"{s['update']:.2f}"]
        for name, s in (
            ("bound: products at their shapes", seconds),
            ("bound: products at the large rate", at_large),
        )
    ]


def contenders(steps: int, outcome: Outcome) -> dict[str, OurSteps | TrlSteps]:
    """Those that could be set up; the others are failed cells."""
    makers: dict[str, Callable[[], OurSteps | TrlSteps]] = {
        OURS: OurSteps,
        TRL_DEFAULT: lambda: trl("default", steps),
        TRL_PLAIN: lambda: trl("plain", steps, "--no-checkpointing"),
    }
    found: dict[str, OurSteps | TrlSteps] = {}
    for name, make in makers.items():

        def cell(name: str = name, make: Callable[[], OurSteps | TrlSteps] = make) -> None:
            found[name] = make()

        outcome.attempt(name, cell)
    return found


def summarise(name: str, steps: list[dict[str, Any]], outcome: Outcome) -> list[str]:
    counted = [{**s, "update": s["cpu"] - s["generation"] - s["teacher"]} for s in steps]
    middle = {
        key: median([s[key] for s in counted]) for key in ("cpu", "wall", "generation", "teacher", "update")
    }
    outcome.numbers[name] = {
        **middle,
        "prompt_tokens": counted[-1]["prompt_tokens"],
        "new_tokens": counted[-1]["new_tokens"],
        "all_cpu": [round(s["cpu"], 3) for s in counted],
    }
    return [name, *(f"{middle[key]:.2f}" for key in ("cpu", "generation", "teacher", "update"))]


def compare(outcome: Outcome) -> None:
    """Targets, and a failed cell where a peer did not do the same work."""
    ours, bound = outcome.numbers[OURS], outcome.numbers.get("bound")

    def ratio(name: str) -> float | None:
        return outcome.numbers[name]["cpu"] / ours["cpu"] if name in outcome.numbers else None

    plain = ratio(TRL_PLAIN)
    outcome.targets += [
        Target("TRL with its defaults / miniverl, CPU-s of a step", ratio(TRL_DEFAULT), "≥", 3),
        Target("miniverl / TRL without gradient checkpointing", plain and 1 / plain, "≤", 1.0),
        Target(
            "miniverl / bound (products at their shapes)",
            ours["cpu"] / bound["per_shape_cpu_s"]["total"] if bound else None,
            "≤",
            1.3,
        ),
        Target(
            "miniverl / bound (all products at the large rate)",
            ours["cpu"] / bound["large_gemm_cpu_s"] if bound else None,
            "≤",
            1.3,
        ),
    ]
    for name in (TRL_DEFAULT, TRL_PLAIN):
        theirs = outcome.numbers.get(name)
        for key in ("prompt_tokens", "new_tokens"):
            if theirs and theirs[key] != ours[key]:
                outcome.failed[name] = f"{key}: {theirs[key]} there, {ours[key]} here: not the same work"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="steps that count, after one that does not")
    parser.add_argument("--prepare", action="store_true", help="install TRL's environment, measure nothing")
    args = parser.parse_args()
    one_thread()
    outcome = Outcome("gkd_step")
    if args.prepare:
        outcome.attempt("TRL's environment", lambda: print(trl_python()))
        return 1 if outcome.failed else 0
    running = contenders(args.rounds + 1, outcome)
    timed, step, student, teacher = gemms()
    for _ in range(args.rounds + 1):
        for name, contender in running.items():
            if name not in outcome.failed:
                outcome.attempt(name, contender.step)
        timed.measure()
    rows = []
    for name, contender in running.items():
        if isinstance(contender, TrlSteps):
            contender.close()
        if name not in outcome.failed:
            rows.append(summarise(name, contender.steps[1:], outcome))
    outcome.attempt("bound", lambda: rows.extend(bounds(timed, step, student, teacher, outcome)))
    if OURS in outcome.numbers:
        compare(outcome)
    columns = ("CPU-seconds of a step", "step", "generation", "teacher", "update")
    return outcome.finish(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
