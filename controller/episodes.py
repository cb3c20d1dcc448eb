"""Rollouts → what estimators look at: token rewards, masks and groups as rectangles.

Shape legend: N sequences · T most trained tokens of one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from miniverl.algos.advantages import Episode
from miniverl.config import RunError
from miniverl.types import Rollout


def learnable(rollouts: Sequence[Rollout], *, grouped: bool) -> list[Rollout]:
    """Those with a reward, less (`grouped`) groups in which only one of several is left: a baseline over one
    response would be that response.

    Raises RunError if none is left.
    """
    asked = Counter(r.uid for r in rollouts)
    kept = [r for r in rollouts if r.reward is not None]
    left = Counter(r.uid for r in kept)
    if grouped:
        kept = [r for r in kept if left[r.uid] > 1 or asked[r.uid] == 1]
    if not kept:
        raise RunError(
            f"none of the step's {len(rollouts)} responses has a reward to learn from: their prompts have no "
            "answer (data.answer_key), or every reward call failed."
        )
    return kept


def episodes(rollouts: Sequence[Rollout], *, rewarded: bool = True) -> Episode:
    """Rewards on the last trained token of each response; its untrained tokens are left out. Rollouts of one
    prompt occurrence share a group.

    rewarded: False = the rewards are not looked at, and stay 0.

    Raises ValueError for a rollout without a reward: 0 would be a verdict.
    """
    groups = {uid: i for i, uid in enumerate(dict.fromkeys(r.uid for r in rollouts))}
    lengths = [int(r.mask.sum()) for r in rollouts]
    shape = (len(rollouts), max(1, *lengths)) if rollouts else (0, 1)
    rewards_NT, mask_NT = torch.zeros(shape), torch.zeros(shape)
    for i, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        mask_NT[i, :length] = 1
        if rewarded and rollout.reward is None:
            raise ValueError(f"rollout {rollout.uid}/{rollout.sample} has no reward")
        if rewarded and rollout.reward is not None:
            rewards_NT[i, max(0, length - 1)] = rollout.reward
    return Episode(rewards_NT, mask_NT, torch.tensor([groups[r.uid] for r in rollouts]))


def padded(rows: Sequence[Tensor], like_NT: Tensor) -> Tensor:
    """One tensor per sequence → `[N, T]`, 0 behind each."""
    found_NT = torch.zeros_like(like_NT)
    for i, row in enumerate(rows):
        found_NT[i, : len(row)] = row.to(like_NT)
    return found_NT
