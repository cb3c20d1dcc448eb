"""Which tokens drive the entropy down: those of high covariance between log-probability and advantage.

Chosen once per mini-batch, over all its tokens, from the log-probs before the update: micro-batches and
workers then cannot change the choice. (verl chooses anew in each micro-batch.)

Shape legend: M trained tokens of a mini-batch
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(log_probs_M: Tensor, advantages_M: Tensor) -> Tensor:
    """(A − mean A)(log π − mean log π) per token `[M]` (Cui et al. 2025, arXiv 2505.22617)."""
    return (advantages_M - advantages_M.mean()) * (log_probs_M - log_probs_M.mean())


def drawn_between(covariance_M: Tensor, share: float, low: float, high: float, uniforms_M: Tensor) -> Tensor:
    """Clip-Cov's choice `[M]`, 0/1: share · M tokens (at least one), at random among those with
    low < covariance < high; all of those, if there are fewer.

    uniforms_M: a draw per token; the smallest win.
    """
    candidates_M = (covariance_M > low) & (covariance_M < high)
    wanted = min(max(1, int(share * len(covariance_M))), int(candidates_M.sum()))
    order_M = torch.where(candidates_M, uniforms_M.to(covariance_M), torch.inf).argsort()
    return _marked(order_M[:wanted], covariance_M)


def highest(covariance_M: Tensor, share: float) -> Tensor:
    """KL-Cov's choice `[M]`, 0/1: the share · M tokens (at least one) of highest covariance."""
    wanted = min(max(1, int(share * len(covariance_M))), len(covariance_M))
    return _marked(covariance_M.argsort(descending=True, stable=True)[:wanted], covariance_M)


def _marked(index: Tensor, like_M: Tensor) -> Tensor:
    chosen_M = torch.zeros_like(like_M)
    chosen_M[index] = 1
    return chosen_M
