"""Policy losses per token: log-probs, the log-probs before the update, advantages → what to minimise.

Denominators are `aggregate`'s business, metrics are *sums* over trained tokens. Masked places may hold
anything: they are removed from the input, never multiplied by 0.

Shape legend: N sequences · T tokens of the longest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""log π − log π_old is clamped to ± this: exp of more overflows half precision."""
SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class ClipSettings:
    low: float = 0.2
    """A ratio is clipped at 1 − low …"""
    high: float = 0.2
    """… and at 1 + high (`geo_mean`: log-ratio in [−low, high]; `dppo_*`: bounds of the divergence)."""
    dual: float = 3.0
    """Bound of the ratio for negative advantages; `dppo_*`: of every ratio."""
    dro_beta: float = 0.1
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    ppo_kl_coef: float = 0.1
    """Weight of KL(old ‖ new) in `ppo_kl`, of |log-ratio| of the selected tokens in `kl_cov`."""
    selected_NT: Tensor | None = None
    """1 = a token that `clip_cov` or `kl_cov` treats apart; see `miniverl.algos.covariance`."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss_NT: Tensor
    """Per token, differentiable in the log-probs; masked places are 0."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Sums over trained tokens, 0-dim, detached."""


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, ClipSettings], PolicyLoss]


def vanilla(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """max(−A r, −A clip(r)), for A < 0 at most −A·dual (Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye
    et al. 2020, arXiv 1912.09729; high > low is DAPO's clip-higher, arXiv 2503.14476)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    return _clipped(x, x.ratio_NT, clip, dual=True)


def gspo(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """PPO's clip of s = exp(mean log-ratio of the sequence), with every token carrying its share of the
    gradient (Zheng et al. 2025, arXiv 2507.18071)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    sequence_N1 = _sequence_mean(x.log_ratio_NT, x.mask_NT)
    log_ratio_NT = x.log_probs_NT - x.log_probs_NT.detach() + sequence_N1.detach()
    return _clipped(x, log_ratio_NT.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp(), clip, dual=False)


def geo_mean(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−A · geometric mean of token ratios, each clipped in log space on the side that its advantage would
    push it to (GMPO, Zhao et al. 2025, arXiv 2507.20673). Every token carries the sequence's loss, so the
    mean over a sequence's tokens is the sequence's."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    sign_NT = x.advantages_NT.sign()
    bound_NT = x.log_ratio_NT.clamp(-clip.low, clip.high)
    pessimistic_NT = sign_NT * torch.minimum(sign_NT * x.log_ratio_NT, sign_NT * bound_NT)
    ratio_N1 = _sequence_mean(pessimistic_NT, x.mask_NT).exp()
    loss_NT = -_sequence_mean(x.advantages_NT, x.mask_NT) * ratio_N1
    hit_NT = x.log_ratio_NT != bound_NT
    return PolicyLoss(
        _where(x.mask_NT, loss_NT.expand_as(x.mask_NT)),
        x.metrics(hit_NT & (x.advantages_NT > 0), hit_NT & (x.advantages_NT < 0)),
    )


def cispo(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−sg(clip(r))·A·log π: the weight is clipped, every token keeps its gradient (MiniMax-M1 2025, arXiv
    2506.13585)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    weight_NT = x.ratio_NT.clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss(
        -weight_NT.detach() * x.advantages_NT * x.log_probs_NT,
        x.metrics(weight_NT != x.ratio_NT, torch.zeros_like(x.trained_NT)),
    )


def sapo(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−A · σ(τ(r − 1))·4/τ, τ by the advantage's sign: a soft gate in place of a clip (Gao et al. 2025, arXiv
    2511.20347)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    tau_NT = torch.where(x.advantages_NT > 0, clip.sapo_tau_positive, clip.sapo_tau_negative)
    gate_NT = torch.sigmoid(tau_NT * (x.ratio_NT - 1)) * (4 / tau_NT)
    never_NT = torch.zeros_like(x.trained_NT)
    return PolicyLoss(-gate_NT * x.advantages_NT, x.metrics(never_NT, never_NT))


def clip_cov(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """PPO's clip without the selected tokens, whose gradient is cut off (Clip-Cov, Cui et al. 2025, arXiv
    2505.22617)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    plain, selected_NT = _clipped(x, x.ratio_NT, clip, dual=False), _selected(x, clip)
    return PolicyLoss(
        torch.where(selected_NT, 0.0, plain.loss_NT), x.metrics(selected_NT, torch.zeros_like(selected_NT))
    )


def kl_cov(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−r A, the selected tokens held back by ppo_kl_coef · |log r| (KL-Cov, Cui et al. 2025, arXiv
    2505.22617)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    held_NT = torch.where(_selected(x, clip), clip.ppo_kl_coef * x.log_ratio_NT.abs(), 0.0)
    return PolicyLoss(held_NT - x.ratio_NT * x.advantages_NT, x.metrics())


def ppo_kl(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−r A + β KL(old ‖ new), the KL as r − 1 − log r: PPO's penalty in place of its clip (Schulman et al.
    2017, arXiv 1707.06347, section 4). β may be adapted from batch to batch."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    kl_NT = x.ratio_NT - 1 - x.log_ratio_NT
    return PolicyLoss(clip.ppo_kl_coef * kl_NT - x.ratio_NT * x.advantages_NT, x.metrics())


def dppo_tv(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """Tokens whose probability moved further than the bound, the way their advantage pushes, are left out;
    the others get −sg(min(r, dual))·A·log π (divergence PPO with total variation of "this token or not",
    as in verl 0.9.1)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    moved_NT = x.log_probs_NT.exp() - x.old_NT.exp()
    return _divergence_bound(x, moved_NT <= clip.high, moved_NT >= -clip.low, clip)


def dppo_kl(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """`dppo_tv` with the bound on KL(π_old ‖ π) of "this token or not"."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    p_NT, old_p_NT = x.log_probs_NT.exp(), x.old_NT.exp()
    rest_NT = (1 - old_p_NT) * torch.log((1 - old_p_NT) / (1 - p_NT))
    kl_NT = old_p_NT * (x.old_NT - x.log_probs_NT) + rest_NT
    # two certain tokens give 0 · log(0/0): not moved, hence the comparison of probabilities beside it
    return _divergence_bound(
        x, (kl_NT <= clip.high) | (p_NT <= old_p_NT), (kl_NT <= clip.low) | (p_NT >= old_p_NT), clip
    )


def dro(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−(A log π − ½β (log π − log π_old)²) (Richemond et al. 2024, arXiv 2405.19107, token by token)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    pull_NT = 0.5 * clip.dro_beta * (x.log_probs_NT - x.old_NT).square()
    return PolicyLoss(pull_NT - x.advantages_NT * x.log_probs_NT, x.metrics())


def gpg(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−A log π: no ratio (Chu et al. 2025, arXiv 2504.02546)."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    return PolicyLoss(-x.advantages_NT * x.log_probs_NT)


def reinforce(
    log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    """−r A, unclipped: the importance-weighted policy gradient."""
    x = _Inputs(log_probs_NT, old_NT, advantages_NT, mask_NT)
    return PolicyLoss(-x.ratio_NT * x.advantages_NT, x.metrics())


class _Inputs:
    """The arguments with masked places set to 0, and what most losses want of them."""

    def __init__(self, log_probs_NT: Tensor, old_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> None:
        self.mask_NT = mask_NT
        self.trained_NT = mask_NT == 1
        self.log_probs_NT, self.old_NT, self.advantages_NT = (
            _where(mask_NT, x_NT) for x_NT in (log_probs_NT, old_NT.detach(), advantages_NT.detach())
        )
        self.log_ratio_NT = (self.log_probs_NT - self.old_NT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        self.ratio_NT = self.log_ratio_NT.exp()

    def metrics(
        self, clipped_NT: Tensor | None = None, clipped_lower_NT: Tensor | None = None
    ) -> dict[str, Tensor]:
        found = {"actor/ppo_kl": -self.log_ratio_NT.detach().sum()}
        if clipped_NT is not None and clipped_lower_NT is not None:
            found["actor/pg_clipfrac"] = (clipped_NT & self.trained_NT).sum()
            found["actor/pg_clipfrac_lower"] = (clipped_lower_NT & self.trained_NT).sum()
        return found


def _selected(x: _Inputs, clip: ClipSettings) -> Tensor:
    if clip.selected_NT is None:
        raise ValueError("clip_cov and kl_cov need the tokens selected in the whole mini-batch")
    return (clip.selected_NT == 1) & x.trained_NT


def _clipped(x: _Inputs, ratio_NT: Tensor, clip: ClipSettings, *, dual: bool) -> PolicyLoss:
    free_NT = -x.advantages_NT * ratio_NT
    bound_NT = -x.advantages_NT * ratio_NT.clamp(1 - clip.low, 1 + clip.high)
    loss_NT, beyond_NT = torch.maximum(free_NT, bound_NT), torch.zeros_like(x.trained_NT)
    if dual:
        most_NT = -x.advantages_NT * clip.dual
        beyond_NT = (loss_NT > most_NT) & (x.advantages_NT < 0)
        loss_NT = torch.where(x.advantages_NT < 0, torch.minimum(loss_NT, most_NT), loss_NT)
    return PolicyLoss(loss_NT, x.metrics(bound_NT > free_NT, beyond_NT))


def _divergence_bound(
    x: _Inputs, may_rise_NT: Tensor, may_fall_NT: Tensor, clip: ClipSettings
) -> PolicyLoss:
    kept_NT = torch.where(x.advantages_NT > 0, may_rise_NT, may_fall_NT)
    weight_NT = (x.ratio_NT.clamp(max=clip.dual) * kept_NT).detach()
    beyond_NT = (x.ratio_NT > clip.dual) & (x.advantages_NT < 0)
    return PolicyLoss(-weight_NT * x.advantages_NT * x.log_probs_NT, x.metrics(~kept_NT, beyond_NT))


def _sequence_mean(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Mean over each sequence's trained tokens `[N, 1]`; masked values must be 0."""
    return values_NT.sum(-1, keepdim=True) / mask_NT.sum(-1, keepdim=True).clamp_min(1)


def _where(mask_NT: Tensor, values_NT: Tensor) -> Tensor:
    return torch.where(mask_NT == 1, values_NT, 0.0)


LOSSES: dict[str, Loss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "gpg": gpg,
    "reinforce": reinforce,
    "importance_sampling": reinforce,
    "ppo_kl": ppo_kl,
}

FIXED_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Losses that define their aggregation themselves."""
