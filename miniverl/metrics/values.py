"""Numbers that know how they merge, so that shards and micro-batches give what one batch would have given.

A mean travels as total and count, never as a quotient; division happens once, in `finalize`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count. The count may be any weight (tokens, sequences), and 0 where nothing was counted."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The plain mean of `values`, each counting once.

        >>> Mean.of([1, 2, 6])
        Mean(total=9.0, count=3)
        """
        listed = [float(value) for value in values]
        return cls(_total(listed), len(listed))


@dataclass(frozen=True, slots=True)
class Sum:
    value: float


@dataclass(frozen=True, slots=True)
class Max:
    value: float


@dataclass(frozen=True, slots=True)
class Min:
    value: float


Metric = Mean | Sum | Max | Min


def merge(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One mapping for all parts; a name that only some parts have is merged over those.

    Raises TypeError where the parts disagree on how a name merges: a mean of sums would be a wrong number.

    >>> merge([{"a": Mean(4, 1)}, {"a": Mean(2, 5)}])
    {'a': Mean(total=6.0, count=6.0)}
    """
    gathered: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            gathered.setdefault(name, []).append(metric)
    return {name: _merge_one(name, metrics) for name, metrics in gathered.items()}


def finalize(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers. A mean over nothing is left out: it is unknown, not NaN and not 0.

    >>> finalize({"a": Mean(3, 2), "b": Mean(0, 0), "c": Sum(7)})
    {'a': 1.5, 'c': 7}
    """
    plain: dict[str, float] = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Mean):
            plain[name] = metric.value
        elif metric.count != 0:
            plain[name] = metric.total / metric.count
    return plain


def length_metrics(prefix: str, lengths: Sequence[int], limit: int) -> dict[str, Metric]:
    """Mean, longest, shortest of `lengths` (tokens), and the share that reached `limit`, under verl's names.

    >>> finalize(length_metrics("response_length", [4, 8, 3], limit=8))["response_length/mean"]
    5.0
    """
    described: dict[str, Metric] = {
        f"{prefix}/mean": Mean.of(lengths),
        f"{prefix}/clip_ratio": Mean.of(length >= limit for length in lengths),
    }
    if lengths:
        described[f"{prefix}/max"] = Max(max(lengths))
        described[f"{prefix}/min"] = Min(min(lengths))
    return described


def _merge_one(name: str, metrics: Sequence[Metric]) -> Metric:
    means = [metric for metric in metrics if isinstance(metric, Mean)]
    if len(means) == len(metrics):
        return Mean(_total([m.total for m in means]), _total([m.count for m in means]))
    others = [metric for metric in metrics if not isinstance(metric, Mean)]
    kinds = {type(metric) for metric in metrics}
    if len(kinds) != 1:
        raise TypeError(f"{name} is a {' here and a '.join(sorted(k.__name__ for k in kinds))} there")
    values = [metric.value for metric in others]
    kind = type(others[0])
    if kind is Sum:
        return Sum(_total(values))
    if any(math.isnan(value) for value in values):
        return kind(math.nan)  # max() would keep or lose it, depending on the order
    return Max(max(values)) if kind is Max else Min(min(values))


def _total(values: Sequence[float]) -> float:
    """The sum, correctly rounded, so that it does not depend on how the parts were cut or ordered."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
