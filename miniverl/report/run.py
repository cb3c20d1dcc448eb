"""A finished (or killed) run as its directory tells it; what is missing is empty, never an error.

Files, all optional: config.json, environment.json, result.json, metrics.jsonl, samples/*.parquet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miniverl.config import ConfigError
from miniverl.metrics import read_metrics, read_samples, sample_steps

SAMPLE_STEPS, SAMPLES_PER_STEP = 40, 16
"""At most this many samples enter the page; parquet keeps them all."""


@dataclass(frozen=True)
class Series:
    """One metric over the run, in the order of the steps, finite values only."""

    steps: list[int]
    values: list[float]
    broken: list[int]
    """Steps where it was NaN or infinite."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Run:
    name: str
    config: dict[str, object]
    environment: dict[str, object]
    result: dict[str, object]
    metrics: list[dict[str, float]]
    samples: list[dict[str, object]]
    samples_written: int
    """Steps that have samples on disk; the page may show fewer."""

    def series(self, name: str) -> Series:
        """All values of a metric; of two for the same step the later one counts."""
        found = {int(line["step"]): line[name] for line in self.metrics if name in line}
        finite = [step for step in sorted(found) if math.isfinite(found[step])]
        broken = [step for step in sorted(found) if not math.isfinite(found[step])]
        return Series(finite, [found[step] for step in finite], broken)

    def names(self) -> list[str]:
        return sorted({name for line in self.metrics for name in line} - {"step"})

    def setting(self, path: str) -> object:
        """A configured value by its dotted name; None where the config does not have it."""
        node: object = self.config
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node


def load_run(run_dir: Path) -> Run:
    """Raises ConfigError where a file is there but is not what it should be."""
    steps = sample_steps(run_dir)
    kept: dict[object, int] = {}
    samples = []
    for row in read_samples(run_dir, _spread(steps, SAMPLE_STEPS)):
        kept[row["step"]] = kept.get(row["step"], 0) + 1
        if kept[row["step"]] <= SAMPLES_PER_STEP:
            samples.append(row)
    return Run(
        name=run_dir.resolve().name,
        config=_read_object(run_dir / "config.json"),
        environment=_read_object(run_dir / "environment.json"),
        result=_read_object(run_dir / "result.json"),
        metrics=read_metrics(run_dir / "metrics.jsonl"),
        samples=samples,
        samples_written=len(steps),
    )


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _read_object(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}). Move it away and try again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold one JSON object. Move it away and try again.")
    return value
