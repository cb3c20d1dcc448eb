"""The procedural tasks of the `data` section: what their problems look like, and how many are held out."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_strict)
class AdditionConfig:
    """The embedded task: column addition with written-out working, generated procedurally."""

    digits: tuple[PositiveInt, PositiveInt] = (2, 3)
    """Fewest and most digits of an operand (drawn per operand, at most 9)."""
    forget_carry: float = 0.0
    """Share of the demonstrations that drop every carry (for making a student that errs)."""
    distinct: PositiveInt | None = None
    """Train on this many different problems, again and again; None = a fresh one each time."""
    held_out: Literal["test", "validation"] = "test"
    """Which tenth of the problems accuracy is measured on: choose settings on `validation`, report on
    `test`."""
    test_size: PositiveInt = 500
    """Held-out problems used for evaluation; operands hashed to the test part never occur in training."""


@dataclass(frozen=True, config=_strict)
class ReasoningConfig:
    """A task of reasoning-gym (`requirements/rewards.txt`), which scores its own problems."""

    task: str = ""
    """A name of reasoning_gym's datasets, e.g. `leg_counting`."""
    options: dict[str, object] = field(default_factory=dict)
    """That dataset's own settings, e.g. {max_animals: 4}."""
    instruction: str = "Give only the answer, after your reasoning, as <answer>…</answer>."
    """Put below each question; empty = the bare question."""
