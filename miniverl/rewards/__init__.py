"""Scorers: (response text, expected answer) → reward. They know neither tokens nor models.

A name in the config (`eval.scorer`) is a key of the dict at the foot.
"""

from __future__ import annotations

from collections.abc import Callable

from miniverl.rewards.exact_match import exact_match

Scorer = Callable[[str, str], float]

SCORERS: dict[str, Scorer] = {
    "exact_match": exact_match,
}
