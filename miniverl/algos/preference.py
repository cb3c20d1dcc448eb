"""Losses over preferred and other responses, from log-probs of whole responses: DPO, IPO, SimPO, ORPO, KTO.

Everything here is per pair (or per response); which model gave the log-probs, and how the mean is taken, is
`workers.preference`'s business.

Shape legend: P pairs · N responses
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class Side:
    """One side of P pairs (or N lone responses): sums over a response's trained tokens."""

    log_probs: Tensor
    """`[P]`, differentiable: Σ log π(y_t), nats."""
    ref_log_probs: Tensor
    """`[P]`, the reference's; zeros where the loss has no reference."""
    lengths: Tensor
    """`[P]`, trained tokens, each above 0."""

    def log_ratio(self, length_normalised: bool) -> Tensor:
        """log π(y) − log π_ref(y), per token if `length_normalised`."""
        ratio = self.log_probs - self.ref_log_probs
        return ratio / self.lengths if length_normalised else ratio


@dataclass(frozen=True, slots=True)
class PairSettings:
    beta: float
    label_smoothing: float = 0.0
    """DPO: the chance that a pair's label is the wrong way round, below 0.5."""
    length_normalised: bool = False
    """DPO, IPO: log-ratios per token instead of per response."""
    margin: float = 0.0
    """SimPO's γ."""


@dataclass(frozen=True, slots=True)
class PairLoss:
    loss: Tensor
    """`[P]`"""
    chosen_rewards: Tensor
    """`[P]`, detached: what the loss takes for the reward of the chosen response …"""
    rejected_rewards: Tensor
    """… and of the rejected one. Their difference is the margin."""


def dpo(chosen: Side, rejected: Side, settings: PairSettings) -> PairLoss:
    """−(1−ε) log σ(h) − ε log σ(−h), h = β (log-ratio of chosen − log-ratio of rejected).

    Rafailov et al. 2023, arXiv 2305.18290, eq. 7; ε: Mitchell 2023, "A note on DPO with noisy preferences";
    per token: Lambert et al. 2024, Tülu 3, arXiv 2411.15124, eq. 6.
    """
    good, bad = (settings.beta * side.log_ratio(settings.length_normalised) for side in (chosen, rejected))
    h, smooth = good - bad, settings.label_smoothing
    return PairLoss(-(1 - smooth) * logsigmoid(h) - smooth * logsigmoid(-h), good.detach(), bad.detach())


def ipo(chosen: Side, rejected: Side, settings: PairSettings) -> PairLoss:
    """(h − 1/(2β))², h = log-ratio of chosen − log-ratio of rejected.

    Azar et al. 2023, arXiv 2310.12036, eq. 17 (its τ is β).
    """
    good, bad = (side.log_ratio(settings.length_normalised) for side in (chosen, rejected))
    loss = (good - bad - 1 / (2 * settings.beta)).square()
    return PairLoss(loss, settings.beta * good.detach(), settings.beta * bad.detach())


def simpo(chosen: Side, rejected: Side, settings: PairSettings) -> PairLoss:
    """−log σ(β (mean log π of chosen − mean log π of rejected) − γ); no reference.

    Meng et al. 2024, arXiv 2405.14734, eq. 6.
    """
    good, bad = (settings.beta * side.log_probs / side.lengths for side in (chosen, rejected))
    return PairLoss(-logsigmoid(good - bad - settings.margin), good.detach(), bad.detach())


def orpo(chosen: Side, rejected: Side, settings: PairSettings) -> PairLoss:
    """−mean log π of chosen − β log σ(log odds of chosen − log odds of rejected); no reference.

    odds = P/(1−P) with P the geometric mean of a response's token probabilities. Hong et al. 2024,
    arXiv 2403.07691, eq. 6 (its λ is β).
    """
    good, bad = (side.log_probs / side.lengths for side in (chosen, rejected))
    loss = -good - settings.beta * logsigmoid(_log_odds(good) - _log_odds(bad))
    return PairLoss(loss, settings.beta * good.detach(), settings.beta * bad.detach())


@dataclass(frozen=True, slots=True)
class LabelSettings:
    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    length_normalised: bool = False


@dataclass(frozen=True, slots=True)
class LabelLoss:
    loss: Tensor
    """`[N]`"""
    rewards: Tensor
    """`[N]`, detached: β × log-ratio."""


def kto(side: Side, desirable: Tensor, kl: float, settings: LabelSettings) -> LabelLoss:
    """λ_D (1 − σ(r − z)) for desirable responses, λ_U (1 − σ(z − r)) for others; r = β log-ratio, z = β KL.

    Args:
        desirable: `[N]` bool.
        kl: the batch's estimate of KL(π ‖ π_ref), at least 0; no gradient goes through it.

    Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8 (λ − v, up to a constant).
    """
    rewards = settings.beta * side.log_ratio(settings.length_normalised)
    distance = rewards - settings.beta * kl
    loss = torch.where(
        desirable,
        settings.desirable_weight * (1 - distance.sigmoid()),
        settings.undesirable_weight * (1 - (-distance).sigmoid()),
    )
    return LabelLoss(loss, rewards.detach())


def reference_kl(log_ratios: Tensor) -> float:
    """KTO's z₀ = max(0, mean log-ratio `[N]` of responses that belong to *other* prompts); 0 for none.

    Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1.
    """
    return max(0.0, float(log_ratios.mean())) if len(log_ratios) else 0.0


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 − p)) for log p ≤ 0. A response of certainty 1 is taken for one that is short of it by the
    number format's precision: its odds are infinite."""
    log_p = log_p.clamp_max(-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


PAIR_LOSSES: dict[str, Callable[[Side, Side, PairSettings], PairLoss]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
