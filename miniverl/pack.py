"""Rollouts → Batch, and how a batch is cut: into micro-batches by tokens, over workers by tokens.

Cutting never changes a gradient: every piece keeps the global batch's denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from miniverl.types import Batch, Rollout


def pack(rollouts: Sequence[Rollout]) -> Batch:
    """Lay rollouts end to end, prompt then response; the mask trains response tokens only."""
    if not rollouts:
        raise ValueError("a batch needs at least one rollout")
    ids = [np.concatenate([r.prompt_ids, r.response_ids]).astype(np.int64) for r in rollouts]
    masks = [
        np.concatenate([np.zeros(len(r.prompt_ids), np.int64), r.mask.astype(np.int64)]) for r in rollouts
    ]
    mask_S = torch.from_numpy(np.concatenate(masks))
    return Batch(
        token_ids_S=torch.from_numpy(np.concatenate(ids)),
        lengths_N=torch.tensor([len(r) for r in rollouts]),
        mask_S=mask_S,
        rows=tuple(range(len(rollouts))),
        trained_tokens=int(mask_S.sum()),
        trained_sequences=sum(bool(mask.any()) for mask in masks),
    )


def mini_batches(batch: Batch, count: int) -> list[Batch]:
    """`count` global batches of their own, of like many sequences, in order: one optimizer step each."""
    if count == 1:
        return [batch]
    pieces = [batch.select(part.tolist()) for part in np.array_split(np.arange(len(batch)), count)]
    return [
        replace(
            piece,
            trained_tokens=sum(piece.trained_per_row()),
            trained_sequences=sum(tokens > 0 for tokens in piece.trained_per_row()),
        )
        for piece in pieces
    ]


def micro_batches(batch: Batch, budget_tokens: int) -> list[Batch]:
    """Pieces whose *padded* size stays within the budget, longest first; sequences of like length lie
    together.

    A single sequence above the budget is refused: it would not fit the memory that the plan promised.
    """
    lengths = batch.lengths_N.tolist()
    longest = max(lengths, default=0)
    if longest > budget_tokens:
        raise ValueError(f"a sequence of {longest} tokens exceeds trainer.micro_batch_tokens={budget_tokens}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    pieces: list[list[int]] = []
    for i in order:
        if pieces and (len(pieces[-1]) + 1) * lengths[pieces[-1][0]] <= budget_tokens:
            pieces[-1].append(i)
        else:
            pieces.append([i])
    return [batch.select(piece) for piece in pieces]


def balance(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """Which items go to which worker, so that each gets about as many tokens: longest first to the emptiest.

    Every worker gets at least one item if there are enough; within a worker the original order is kept.
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(workers), key=lambda w: (loads[w], len(shares[w]), w))
        shares[emptiest].append(i)
        loads[emptiest] += lengths[i]
    return [sorted(share) for share in shares]
