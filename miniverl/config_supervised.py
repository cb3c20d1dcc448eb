"""The parts of the `algo` section that belong to training without rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo", "kto"]
Rows = Literal["prompts", "responses", "pairs", "labels", "texts"]
"""What a training row holds: a prompt alone, with one response, with a preferred and a rejected one, or with
one response and a verdict; or a raw text."""

WITH_REFERENCE = ("dpo", "ipo", "kto")
"""Losses over log-ratios to a frozen copy of the starting student."""


@dataclass(frozen=True, config=_strict)
class PreferenceConfig:
    """A preference loss. Definitions and sources: miniverl/algos/preference.py."""

    loss: PreferenceLoss = "dpo"
    """`kto` reads responses with a label, the others pairs."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference (`dpo`, `kto`), half the inverse of the wanted margin (`ipo`),
    scale of the reward (`simpo`), or weight of the odds-ratio term (`orpo`)."""
    label_smoothing: NonNegativeFloat = 0.0
    """`dpo`: the share of pairs whose label is taken to be the wrong way round, below 0.5."""
    length_normalised: bool = False
    """`dpo`, `ipo`, `kto`: log-ratios per token instead of per response. (`simpo` and `orpo` always are per
    token.)"""
    margin: NonNegativeFloat = 0.0
    """`simpo`: the reward of the chosen response should lead by this much (γ)."""
    desirable_weight: PositiveFloat = 1.0
    """`kto`: weight of responses labelled true …"""
    undesirable_weight: PositiveFloat = 1.0
    """… and false. With unequal shares, choose them so that the weighted counts are alike."""
