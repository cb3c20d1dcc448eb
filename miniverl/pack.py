"""Rollouts → Batch, and how a batch is cut: into micro-batches by tokens, over workers by tokens.

Cutting never changes a gradient: every piece keeps the global batch's denominator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


def pack_together(rollouts: Sequence[Rollout]) -> Batch:
    """`pack`, with the rollouts of one prompt occurrence as a unit that is never parted."""
    return replace(pack(rollouts), units=_numbered([r.uid for r in rollouts]))


def pack_rows(rollouts: Sequence[Rollout]) -> Batch:
    """`pack_together`, with each unit in one row of the forward pass."""
    return replace(pack_together(rollouts), packed=True)


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
    together, and those of a unit stay together.

    A single unit above the budget is refused: it would not fit the memory that the plan promised.
    """
    lengths = batch.lengths_N.tolist()
    across = sum if batch.packed else max
    units = [(unit, across(lengths[i] for i in unit)) for unit in _units(batch)]
    pieces: list[list[int]] = []
    rows, width = 0, 0
    for unit, longest in sorted(units, key=lambda item: (-item[1], item[0])):
        own = 1 if batch.packed else len(unit)
        if own * longest > budget_tokens:
            what = "a row" if batch.packed else f"{own} sequences that stay together, one"
            what = "a sequence" if len(unit) == 1 else what
            raise ValueError(f"{what} of {longest} tokens exceeds trainer.micro_batch_tokens={budget_tokens}")
        if pieces and (rows + own) * width <= budget_tokens:
            pieces[-1] += unit
            rows += own
        else:
            pieces.append(list(unit))
            rows, width = own, longest
    return [batch.select(piece) for piece in pieces]


def shares(batch: Batch, workers: int) -> list[list[int]]:
    """Which sequences go to which worker, by `balance` over units; shares without any are left out."""
    lengths, units = batch.lengths_N.tolist(), _units(batch)
    chosen = balance([sum(lengths[i] for i in unit) for unit in units], workers)
    return [sorted(i for u in share for i in units[u]) for share in chosen if share]


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


def _units(batch: Batch) -> list[list[int]]:
    """Indices of the sequences of each unit, in the order of the units' first sequences."""
    if batch.units is None:
        return [[i] for i in range(len(batch))]
    members: dict[int, list[int]] = {}
    for i, unit in enumerate(batch.units):
        members.setdefault(unit, []).append(i)
    return list(members.values())


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Equal keys get equal numbers, counting from 0 in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)
