"""The critic's loss, and how good its values are.

Shape legend: N sequences · T tokens of the longest · M trained tokens
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values_NT: Tensor, old_values_NT: Tensor, returns_NT: Tensor, mask_NT: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²) per token, and how many trained tokens were clipped (0-dim).

    Source: PPO's reference implementation (Schulman et al. 2017, arXiv 1707.06347).
    """
    clipped_NT = torch.clamp(values_NT, old_values_NT - clip_range, old_values_NT + clip_range)
    free_NT, bound_NT = (values_NT - returns_NT).square(), (clipped_NT - returns_NT).square()
    clipped = torch.where(mask_NT == 1, bound_NT > free_NT, False).sum()
    return 0.5 * torch.maximum(free_NT, bound_NT), clipped


def explained_variance(values_M: Tensor, returns_M: Tensor) -> float | None:
    """1 − Var(R − V) / Var(R): 1 = the values are the returns, 0 = no better than their mean. None where the
    returns do not vary."""
    if len(returns_M) < 2 or float(returns_M.var()) < 1e-12:
        return None
    return 1 - float((returns_M - values_M).var()) / float(returns_M.var())
