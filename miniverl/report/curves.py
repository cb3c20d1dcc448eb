"""Which curves a report shows, as numbers ready to draw.

`plots.py` draws them; nothing here knows of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from miniverl.report.run import Run, Series

MOST_POINTS = 300
"""Longer curves are averaged in bins, so that a page stays small whatever the run's length."""

TIMINGS = {
    "gen": "generation",
    "score": "teacher scoring",
    "update_actor": "update",
    "update_weights": "weight sync",
    "testing": "evaluation",
    "save_checkpoint": "checkpoint",
}
NOW_AND_THEN = ("evaluation", "checkpoint")


@dataclass(frozen=True)
class Line:
    label: str
    steps: list[float]
    values: list[float]
    colour: int = 0
    """Index into the palette."""
    faint: bool = False


@dataclass(frozen=True)
class Curve:
    key: str
    """File name of the PNG."""
    title: str
    unit: Literal["%", "s", ""]
    lines: tuple[Line, ...]
    empty: str
    """What to say where there is nothing to draw."""
    kind: Literal["line", "marked", "stack"] = "line"
    note: str = ""
    """Something is wrong with the numbers."""
    aside: str = ""
    log: bool = False


def curves(run: Run) -> list[Curve]:
    """The report's curves, in order; one without data has no lines."""
    return [
        _accuracy(run),
        _reward(run) if len(run.series("critic/advantages/mean")) else _loss(run),
        _timing(run),
        _plain(run, "response_length/mean", "Response length (tokens)", 2, "response lengths"),
        _plain(run, "perf/throughput", "Throughput (tokens/s)", 3, "throughput"),
        _plain(run, "actor/grad_norm", "Gradient norm", 5, "gradient norms"),
    ]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred moving average; at the ends over the part of the window that exists.

    >>> smooth([1, 2, 6], 3)
    [1.5, 3.0, 4.0]
    """
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def thin(
    steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points, each the average of neighbours.

    >>> thin([1, 2, 3, 4], [0.0, 2.0, 4.0, 8.0], most=2)
    ([1.5, 3.5], [1.0, 6.0])
    """
    if len(steps) <= most:
        return list(steps), list(values)
    bounds = np.linspace(0, len(steps), most + 1).astype(int)
    width = np.diff(bounds)
    means = (np.add.reduceat(np.asarray(column, float), bounds[:-1]) / width for column in (steps, values))
    first, second = (column.tolist() for column in means)
    return first, second


def _accuracy(run: Run) -> Curve:
    series = run.series("val/accuracy")
    percent = [100 * value for value in series.values]
    lines = (Line("held-out accuracy", *thin(series.steps, percent)),) if len(series) else ()
    empty = "No evaluations recorded."
    return Curve("accuracy", "Held-out accuracy", "%", lines, empty, "marked", note=_broken(series))


def _reward(run: Run) -> Curve:
    """What a policy gradient raises; its loss is about 0 at every step and says nothing."""
    return _noisy("reward", "Mean reward of the rollouts", run.series("critic/score/mean"))


def _loss(run: Run) -> Curve:
    name = next((n for n in ("actor/distillation_loss", "actor/nll_loss") if len(run.series(n))), "")
    title = "Negative log-likelihood" if name == "actor/nll_loss" else "Distillation loss"
    if not name:
        return Curve("loss", "Training loss", "", (), "No training loss recorded.")
    return _noisy("loss", title, run.series(name))


def _noisy(key: str, title: str, series: Series) -> Curve:
    """The values of every step, faint, under their moving average."""
    width = max(1, len(series) // 20) | 1  # odd, so that the window is centred
    positive = [value for value in series.values if value > 0]
    wide_range = bool(positive) and len(positive) == len(series) and max(positive) > 100 * min(positive)
    raw = Line("per step", *thin(series.steps, series.values), colour=1, faint=len(series) > 20)
    if not raw.faint:
        return Curve(key, title, "", (raw,), "", note=_broken(series), log=wide_range)
    mean = Line(f"mean of {width} steps", *thin(series.steps, smooth(series.values, width)), colour=1)
    return Curve(key, title, "", (raw, mean), "", note=_broken(series), log=wide_range)


def _plain(run: Run, metric: str, title: str, colour: int, what: str) -> Curve:
    series = run.series(metric)
    key = metric.removesuffix("/mean").rpartition("/")[2]
    lines = (Line(title, *thin(series.steps, series.values), colour=colour),) if len(series) else ()
    return Curve(key, title, "", lines, f"No {what} recorded.", note=_broken(series))


def _timing(run: Run) -> Curve:
    """Seconds per step, stacked. Shares are of everything timed, also of what is not in every step."""
    parts = {label: run.series(f"timing_s/{name}") for name, label in TIMINGS.items()}
    parts = {label: series for label, series in parts.items() if sum(series.values) > 0}
    whole = sum(sum(series.values) for series in parts.values())
    shares = {label: _percent(sum(series.values) / whole) for label, series in parts.items()}
    drawn = [label for label in parts if label not in NOW_AND_THEN]
    steps = sorted({step for label in drawn for step in parts[label].steps})
    lines = []
    for colour, label in enumerate(drawn):
        seconds = dict(zip(parts[label].steps, parts[label].values, strict=True))
        thinned = thin(steps, [seconds.get(step, 0.0) for step in steps], most=100)
        lines.append(Line(f"{label} {shares[label]}", *thinned, colour=colour))
    rest = [f"{label} {shares[label]}" for label in NOW_AND_THEN if label in parts]
    aside = f"Not drawn: {', '.join(rest)} of the time" if rest else ""
    empty = "No timings recorded."
    return Curve("timing", "Seconds per step", "s", tuple(lines), empty, "stack", aside=aside)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _broken(series: Series) -> str:
    if not series.broken:
        return ""
    shown = ", ".join(map(str, series.broken[:5])) + (", …" if len(series.broken) > 5 else "")
    return f"NaN or infinite at {len(series.broken)} step(s): {shown}"
