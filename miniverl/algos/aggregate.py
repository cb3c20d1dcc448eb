"""Token values → one number, and statistics over trained tokens.

Denominators may be those of a larger batch, so that pieces of it add up to the whole. What is masked is
removed from the input (a product with 0 would let NaN and inf through, in the gradient too).

Shape legend: N sequences · T tokens of the longest
"""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def aggregate(
    loss_NT: Tensor,
    mask_NT: Tensor,
    mode: str,
    *,
    tokens: float | None = None,
    sequences: float | None = None,
    horizon: int | None = None,
) -> Tensor:
    """The batch's loss, 0-dim; 0 where nothing is trained.

    Args:
        mode: one of AGGREGATIONS (names as in verl). `seq-mean-token-sum-norm` is Dr.GRPO's: each sequence's
            sum over a constant length (arXiv 2503.20783).
        tokens: trained tokens of the whole batch; None = of this one.
        sequences: sequences of the whole batch with a trained token; None = of this one.
        horizon: the constant length; None = T.

    Raises:
        ValueError: an unknown mode.
    """
    loss_NT = torch.where(mask_NT == 1, loss_NT, 0.0)
    counts_N = mask_NT.sum(-1)
    tokens = float(counts_N.sum()) if tokens is None else tokens
    sequences = float((counts_N > 0).sum()) if sequences is None else sequences
    if mode == "token-sum":
        return loss_NT.sum()
    if mode == "token-mean":
        return loss_NT.sum() / max(tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return loss_NT.sum() / max(sequences, 1.0)
    if mode == "seq-mean-token-sum-norm":
        return loss_NT.sum() / (horizon or loss_NT.shape[-1]) / max(sequences, 1.0)
    if mode == "seq-mean-token-mean":
        return (loss_NT.sum(-1) / counts_N.clamp_min(1)).sum() / max(sequences, 1.0)
    raise ValueError(f"there is no aggregation {mode!r}; there are {', '.join(AGGREGATIONS)}")


def masked_mean(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Mean over trained tokens, 0-dim; 0 where there are none."""
    return torch.where(mask_NT == 1, values_NT, 0.0).sum() / mask_NT.sum().clamp_min(1)


def masked_whiten(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Centred and scaled to variance 1 over trained tokens (unbiased), 0 elsewhere.

    A single trained token has no variance: it becomes 0, its distance from the mean.
    """
    centred_NT = torch.where(mask_NT == 1, values_NT - masked_mean(values_NT, mask_NT), 0.0)
    variance = centred_NT.square().sum() / (mask_NT.sum() - 1).clamp_min(1)
    return centred_NT * torch.rsqrt(variance + 1e-8)
