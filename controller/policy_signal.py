"""Policy gradients: rollouts with rewards → advantages → batches for the actor. Also where a critic and a
process reward model learn, from the same rollouts.

Shape legend: N sequences · T most trained tokens of one · M trained tokens of all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from miniverl.algos import kl
from miniverl.algos.advantages import ESTIMATORS, Advantages, Episode, Settings, opd
from miniverl.algos.covariance import covariance, drawn_between, highest
from miniverl.algos.value import explained_variance
from miniverl.config import Config
from miniverl.config_policy import COVARIANCE, GROUP_BASELINES, PolicyConfig
from miniverl.controller.episodes import episodes, learnable, padded
from miniverl.controller.group import WorkerGroup
from miniverl.controller.off_policy import correct, engine_log_probs, masked, mismatch
from miniverl.controller.update import adapt
from miniverl.pack import mini_batches, pack
from miniverl.types import Batch, OutcomeTargets, PolicyTargets, Rollout, ValueTargets
from miniverl.workers.actor import Actor
from miniverl.workers.critic import Critic
from miniverl.workers.process_reward import ProcessReward
from miniverl.workers.reference import Reference
from miniverl.workers.rollout.sampling import uniforms


@dataclass(frozen=True)
class PolicyGradient:
    """Which roles are there is the config's business: None = the algorithm has no such role."""

    config: Config
    accuracy: str
    """Which of a rollout's `rewards` says whether it is right."""
    actor: WorkerGroup
    reference: WorkerGroup | None = None
    """None = the actor's own base, under its adapter; asked only where something needs it."""
    critic: WorkerGroup | None = None
    process_reward: WorkerGroup | None = None
    teacher: WorkerGroup | None = None

    @property
    def learners(self) -> tuple[WorkerGroup, ...]:
        return tuple(group for group in (self.critic, self.process_reward) if group is not None)

    def __call__(self, rollouts: Sequence[Rollout], step: int) -> tuple[list[Batch], dict[str, float]]:
        policy = self._policy
        if policy.uses_rewards:
            rollouts = learnable(rollouts, grouped=policy.advantage in GROUP_BASELINES)
        scored = self._old(rollouts)
        found, metrics = self._advantages(scored)
        advantages_M = found.advantages_NT[scored.trained_NT]
        updates = self._updates(scored, advantages_M) if step >= policy.actor_warmup_steps else []
        return updates, {**_described(advantages_M), **scored.metrics, **metrics}

    @property
    def _policy(self) -> PolicyConfig:
        return self.config.algo.policy

    def _old(self, rollouts: Sequence[Rollout]) -> _Scored:
        """The log-probs that ratios are taken against, and corrections of an engine that is not the
        trainer."""
        wanted, engine = self._policy.correction, engine_log_probs(rollouts)
        batch = pack(rollouts)
        if wanted.old_log_probs == "engine":
            return _Scored(list(rollouts), batch, engine)
        old = self.actor.rows(Actor.log_probs, batch, self.config.rollout.temperature)
        metrics = mismatch(old, engine)
        if not wanted.active:
            return _Scored(list(rollouts), batch, old, metrics=metrics)
        found = correct(old, engine, wanted)
        weights, metrics = found.weights, {**metrics, **found.metrics}
        if found.kept is not None:
            rollouts = [masked(r, kept) for r, kept in zip(rollouts, found.kept, strict=True)]
            old = [x[kept] for x, kept in zip(old, found.kept, strict=True)]
            weights = weights and [x[kept] for x, kept in zip(weights, found.kept, strict=True)]
            batch = pack(rollouts)
        return _Scored(list(rollouts), batch, old, weights, metrics=metrics)

    def _advantages(self, scored: _Scored) -> tuple[Advantages, dict[str, float]]:
        """What each token gets; the models that learn from the same rollouts learn here."""
        policy, metrics = self._policy, dict[str, float]()
        episode = episodes(scored.rollouts, rewarded=policy.uses_rewards)
        if policy.uses_reference:
            scored.reference = self._reference_log_probs(scored.batch)
        if policy.kl_in_reward is not None:
            episode, told = self._with_kl(episode, scored)
            metrics |= told
        if self.teacher is not None:
            gap_NT = padded(self._teacher_gap(self.teacher, scored), episode.mask_NT)
            episode = replace(episode, teacher_gap_NT=gap_NT * policy.teacher_coef)
        if policy.advantage == "remax":
            greedy = [r.greedy_reward for r in scored.rollouts if r.greedy_reward is not None]
            episode = replace(episode, greedy_scores_N=torch.tensor(greedy))
        if self.process_reward is not None:
            rewards, told = self._process_rewards(scored)
            episode = replace(episode, process_rewards_NT=padded(rewards, episode.mask_NT))
            metrics |= told
        values: list[Tensor] = []
        if self.critic is not None:
            values = self.critic.rows(Critic.values, scored.batch)
            episode = replace(episode, values_NT=padded(values, episode.mask_NT))
        settings = _settings(policy)
        found = ESTIMATORS[policy.advantage](episode, settings)
        if episode.teacher_gap_NT is not None and policy.advantage != "opd":
            extra_NT = opd(episode, settings).advantages_NT
            found = replace(found, advantages_NT=found.advantages_NT + extra_NT)
        if self.critic is not None:
            returns_M = found.returns_NT[scored.trained_NT]
            metrics |= self._learn_values(self.critic, scored.batch, torch.cat(values), returns_M)
        return found, metrics

    def _reference_log_probs(self, batch: Batch) -> list[Tensor]:
        temperature = self.config.rollout.temperature
        if self.reference is None:
            return self.actor.rows(Actor.reference_log_probs, batch, temperature)
        return self.reference.rows(Reference.log_probs, batch, temperature)

    def _teacher_gap(self, teacher: WorkerGroup, scored: _Scored) -> list[Tensor]:
        """log p(teacher) − log q(behaviour) of each rollout's tokens; the behaviour is what drew them, hence
        the engine's own log-probs."""
        theirs = teacher.rows(Reference.log_probs, scored.batch, self.config.rollout.temperature)
        return [p - q for p, q in zip(theirs, engine_log_probs(scored.rollouts), strict=True)]

    def _with_kl(self, episode: Episode, scored: _Scored) -> tuple[Episode, dict[str, float]]:
        """Token rewards less the KL to the reference, and its coefficient's next value."""
        policy = self._policy
        assert policy.kl_in_reward is not None
        kl_M = kl.ESTIMATORS[policy.kl_in_reward](torch.cat(scored.old), torch.cat(scored.reference))
        rewards_NT = episode.token_rewards_NT.clone()
        coefficient = self.actor.first(Actor.current_kl_coef)
        rewards_NT[scored.trained_NT] -= coefficient * kl_M
        metrics = {"actor/reward_kl_penalty": float(kl_M.mean()) if len(kl_M) else 0.0}
        metrics["actor/reward_kl_penalty_coeff"] = coefficient
        if policy.kl_target is not None:
            measured = metrics["actor/reward_kl_penalty"]
            adapt(self.actor, measured, len(scored.rollouts), policy.kl_target, policy.kl_horizon)
        return replace(episode, token_rewards_NT=rewards_NT), metrics

    def _process_rewards(self, scored: _Scored) -> tuple[list[Tensor], dict[str, float]]:
        """Of each rollout's tokens, after the model has learned from the rollouts' outcomes."""
        assert self.process_reward is not None
        targets = OutcomeTargets(torch.cat(scored.reference), self._right(scored))
        pieces = mini_batches(replace(scored.batch, targets=targets), self._policy.mini_batches)
        metrics = self.process_reward.reduce_each(ProcessReward.update, pieces)
        temperature = self.config.rollout.temperature
        own = self.process_reward.rows(ProcessReward.log_probs, scored.batch, temperature)
        beta = self._policy.prime.beta
        return [beta * (a - b) for a, b in zip(own, scored.reference, strict=True)], metrics

    def _right(self, scored: _Scored) -> Tensor:
        """1 at the tokens of responses that the accuracy metric calls right, else 0, `[M]`."""
        verdicts = [r.rewards.get(self.accuracy, 0.0) >= 1.0 for r in scored.rollouts]
        rows = zip(verdicts, scored.old, strict=True)
        return torch.cat([torch.full_like(old, float(right)) for right, old in rows])

    def _learn_values(
        self, critic: WorkerGroup, batch: Batch, values_M: Tensor, returns_M: Tensor
    ) -> dict[str, float]:
        targets = ValueTargets(returns_M, values_M)
        pieces = mini_batches(replace(batch, targets=targets), self._policy.mini_batches)
        metrics = critic.reduce_each(Critic.update, pieces * self._policy.critic.epochs)
        metrics["critic/returns/mean"] = float(returns_M.mean()) if len(returns_M) else 0.0
        explained = explained_variance(values_M, returns_M)
        return metrics if explained is None else {**metrics, "critic/vf_explained_var": explained}

    def _updates(self, scored: _Scored, advantages_M: Tensor) -> list[Batch]:
        """Mini-batches with their targets, once per epoch."""
        policy = self._policy
        asked = policy.positive_nll_coef > 0
        targets = PolicyTargets(
            advantages_M,
            torch.cat(scored.old),
            torch.cat(scored.reference) if policy.kl is not None else None,
            weights_M=None if scored.weights is None else torch.cat(scored.weights),
            nll_weights_M=self._right(scored) if asked else None,
        )
        pieces = mini_batches(replace(scored.batch, targets=targets), policy.mini_batches)
        return [self._whole(piece, scored.rollouts) for piece in pieces] * policy.epochs

    def _whole(self, piece: Batch, rollouts: Sequence[Rollout]) -> Batch:
        """The mini-batch with what depends on all of its tokens."""
        policy, targets = self._policy, piece.targets
        assert isinstance(targets, PolicyTargets)
        if targets.nll_weights_M is not None:
            share_M = targets.nll_weights_M / targets.nll_weights_M.sum().clamp_min(1)
            targets = replace(targets, nll_weights_M=share_M)
        if policy.loss in COVARIANCE:
            found_M = covariance(targets.old_log_probs_M, targets.advantages_M)
            if policy.loss == "kl_cov":
                selected_M = highest(found_M, policy.cov_ratio)
            else:
                draws_M = self._draws([rollouts[row] for row in piece.rows], piece)
                selected_M = drawn_between(
                    found_M, policy.cov_ratio, policy.cov_low, policy.cov_high, draws_M
                )
            targets = replace(targets, selected_M=selected_M)
        return replace(piece, targets=targets)

    def _draws(self, rollouts: Sequence[Rollout], piece: Batch) -> Tensor:
        """A number in [0, 1) per trained token: a function of (seed, prompt, sample, position) alone."""
        counts = piece.trained_per_row()
        keys = [(f"{r.uid}/covariance", r.sample) for r in rollouts]
        drawn_NT = uniforms(self.config.trainer.seed, keys, max(1, *counts))
        return torch.cat([torch.as_tensor(drawn_NT[i, :count]) for i, count in enumerate(counts)])


@dataclass
class _Scored:
    """Rollouts with what was computed of their trained tokens, one tensor each."""

    rollouts: list[Rollout]
    batch: Batch
    old: list[Tensor]
    weights: list[Tensor] | None = None
    reference: list[Tensor] = field(default_factory=list[Tensor])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def trained_NT(self) -> Tensor:
        counts_N1 = torch.tensor([[len(row)] for row in self.old])
        return torch.arange(max(1, int(counts_N1.max())))[None] < counts_N1


def _settings(policy: PolicyConfig) -> Settings:
    return Settings(
        gamma=policy.gamma,
        lam=policy.lam,
        lam_critic=policy.lam_critic,
        length_adaptive=policy.length_adaptive,
        norm_by_std=policy.norm_by_std,
        gpg_count=policy.gpg_count,
        process_coef=policy.prime.process_coef,
        outcome_coef=policy.prime.outcome_coef,
    )


def _described(advantages_M: Tensor) -> dict[str, float]:
    if not len(advantages_M):
        return {}
    return {
        "critic/advantages/mean": float(advantages_M.mean()),
        "critic/advantages/max": float(advantages_M.max()),
        "critic/advantages/min": float(advantages_M.min()),
    }
