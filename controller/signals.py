"""What an update learns from: scored rollouts → the batch with its targets. One class per objective, so
that the page needs no `if`.

Shape legend: N sequences · T most trained tokens of one · M trained tokens of all
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from miniverl.algos.advantages import ESTIMATORS, Episode, Settings
from miniverl.config import Config, RunError
from miniverl.config_algo import GROUP_BASELINES
from miniverl.controller.group import WorkerGroup
from miniverl.pack import pack
from miniverl.types import Batch, PolicyTargets, Rollout
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference


class Signal(Protocol):
    def __call__(self, rollouts: Sequence[Rollout]) -> tuple[Batch, dict[str, float]]:
        """The batch with its targets, and numbers about them."""
        ...


@dataclass(frozen=True)
class Distillation:
    """The teacher's distribution at every trained token."""

    teacher: WorkerGroup

    def __call__(self, rollouts: Sequence[Rollout]) -> tuple[Batch, dict[str, float]]:
        return self.teacher.shard(Reference.score, pack(rollouts)), {}


@dataclass(frozen=True)
class PolicyGradient:
    """Advantages from the rollouts' rewards, with the actor's log-probs before the update."""

    config: Config
    actor: WorkerGroup
    reference: WorkerGroup | None
    """None = the actor's own base, under its adapter; asked only where the loss has a KL term."""

    def __call__(self, rollouts: Sequence[Rollout]) -> tuple[Batch, dict[str, float]]:
        rollouts = learnable(rollouts, grouped=self.config.algo.policy.advantage in GROUP_BASELINES)
        batch = pack(rollouts)
        policy, temperature = self.config.algo.policy, self.config.rollout.temperature
        old = self.actor.rows(Actor.log_probs, batch, temperature)
        found = ESTIMATORS[policy.advantage](
            episodes(rollouts), Settings(gamma=policy.gamma, norm_by_std=policy.norm_by_std)
        )
        trained_NT = episodes(rollouts).mask_NT == 1
        advantages_M, old_M = found.advantages_NT[trained_NT], torch.cat(old)
        targets = PolicyTargets(advantages_M, old_M, self._reference_log_probs(batch))
        return replace(batch, targets=targets), {
            "critic/advantages/mean": float(advantages_M.mean()) if len(advantages_M) else 0.0,
            "critic/advantages/max": float(advantages_M.max()) if len(advantages_M) else 0.0,
            "critic/advantages/min": float(advantages_M.min()) if len(advantages_M) else 0.0,
            **_mismatch(rollouts, old_M),
        }

    def _reference_log_probs(self, batch: Batch) -> Tensor | None:
        if self.config.algo.policy.kl is None:
            return None
        temperature = self.config.rollout.temperature
        if self.reference is None:
            return torch.cat(self.actor.rows(Actor.reference_log_probs, batch, temperature))
        return torch.cat(self.reference.rows(Reference.log_probs, batch, temperature))


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


def episodes(rollouts: Sequence[Rollout]) -> Episode:
    """Rewards on the last trained token of each response; its untrained tokens are left out. Rollouts of one
    prompt occurrence share a group.

    Raises ValueError for a rollout without a reward: 0 would be a verdict.
    """
    groups = {uid: i for i, uid in enumerate(dict.fromkeys(r.uid for r in rollouts))}
    lengths = [int(r.mask.sum()) for r in rollouts]
    shape = (len(rollouts), max(1, *lengths)) if rollouts else (0, 1)
    rewards_NT, mask_NT = torch.zeros(shape), torch.zeros(shape)
    for i, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        if rollout.reward is None:
            raise ValueError(f"rollout {rollout.uid}/{rollout.sample} has no reward")
        mask_NT[i, :length] = 1
        rewards_NT[i, max(0, length - 1)] = rollout.reward
    return Episode(rewards_NT, mask_NT, torch.tensor([groups[r.uid] for r in rollouts]))


def _mismatch(rollouts: Sequence[Rollout], old_M: Tensor) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the trainer's."""
    engine_M = torch.cat([torch.from_numpy(r.log_probs[r.mask == 1]) for r in rollouts])
    if not len(engine_M):
        return {}
    difference_M = (engine_M.exp() - old_M.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": float(difference_M.mean()),
        "training/rollout_probs_diff_max": float(difference_M.max()),
    }
