"""Engine and trainer give a token slightly different probabilities: how far apart, and what is done about it.

w = π_trainer / π_engine is always a plain number here, so no gradient can flow through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from miniverl.config_policy import CorrectionConfig
from miniverl.types import Rollout

LOG_WEIGHT_LIMIT = 20.0
"""log w is clamped to ± this: exp of more overflows."""


@dataclass(frozen=True)
class Corrected:
    """Per rollout, over its trained tokens."""

    weights: list[Tensor] | None
    """Factor of each token's loss; None = 1."""
    kept: list[Tensor] | None
    """True where a token is still trained; None = all are."""
    metrics: dict[str, float]


def engine_log_probs(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Of the trained tokens, as the engine that drew them reported them."""
    return [torch.from_numpy(r.log_probs[r.mask == 1].astype(np.float32)) for r in rollouts]


def correct(trainer: Sequence[Tensor], engine: Sequence[Tensor], config: CorrectionConfig) -> Corrected:
    """Truncated importance weights and rejection masks from log-probs of each rollout's trained tokens.

    Sources: token truncation, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); token mask, IcePop (Ring
    team 2025); sequence forms as verl's rollout correction.
    """
    log_w = [
        (a - b.to(a)).clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT) for a, b in zip(trainer, engine, strict=True)
    ]
    weights = kept = None
    metrics: dict[str, float] = {}
    if config.truncate is not None:
        raw = [x.sum().expand_as(x) if config.truncate == "sequence" else x for x in log_w]
        weights = [x.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp().clamp(max=config.cap) for x in raw]
        flat = torch.cat([w.flatten() for w in weights])
        if len(flat):
            metrics["rollout_corr/weight_mean"] = float(flat.mean())
            metrics["rollout_corr/truncated_share"] = float((flat >= config.cap).float().mean())
    if config.mask is not None:
        ratios = [(x.mean().expand_as(x) if config.mask == "sequence" else x).exp() for x in log_w]
        kept = [(w >= config.mask_low) & (w <= config.mask_high) for w in ratios]
        flat = torch.cat(kept)
        if len(flat):
            metrics["rollout_corr/masked_share"] = 1 - float(flat.float().mean())
    return Corrected(weights, kept, metrics)


def masked(rollout: Rollout, kept: Tensor) -> Rollout:
    """The rollout with the trained tokens that are not `kept` trained no longer."""
    mask = rollout.mask.copy()
    mask[np.flatnonzero(mask == 1)[~kept.numpy()]] = 0
    return replace(rollout, mask=mask)


def mismatch(trainer: Sequence[Tensor], engine: Sequence[Tensor]) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the trainer's."""
    trainer_M, engine_M = torch.cat(list(trainer)), torch.cat(list(engine))
    if not len(engine_M):
        return {}
    difference_M = (engine_M.exp() - trainer_M.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": float(difference_M.mean()),
        "training/rollout_probs_diff_max": float(difference_M.max()),
    }
