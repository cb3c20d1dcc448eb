"""Batches → optimizer steps of the actor: when to end early, and how a KL's weight follows its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miniverl.config import AlgoConfig
from miniverl.controller.group import WorkerGroup
from miniverl.types import Batch
from miniverl.workers.actor import Actor


def update(actor: WorkerGroup, batches: Sequence[Batch], algo: AlgoConfig) -> dict[str, float]:
    """One optimizer step per batch (fewer, if KL(old ‖ new) exceeds algo.policy.kl_stop); metrics of all."""
    policy, taken = algo.policy, 0

    def too_far(metrics: Mapping[str, float]) -> bool:
        nonlocal taken
        taken += 1
        return policy.kl_stop is not None and metrics.get("actor/ppo_kl", 0.0) > policy.kl_stop

    metrics = actor.reduce_each(Actor.update, batches, until=too_far)
    if policy.kl_stop is not None:
        metrics["actor/updates_left_out"] = float(len(batches) - taken)
    measured = metrics.get("actor/ppo_kl" if policy.loss == "ppo_kl" else "actor/kl_loss")
    if measured is not None and policy.kl_target is not None and policy.kl_in_reward is None:
        sequences = sum(len(batch) for batch in batches) // policy.epochs
        metrics["actor/kl_coef"] = adapt(actor, measured, sequences, policy.kl_target, policy.kl_horizon)
    return metrics


def adapt(actor: WorkerGroup, measured: float, sequences: int, target: float, horizon: int) -> float:
    """Move the actor's KL coefficient towards what brings the measured KL to `target`; returns the new one.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(0.2, max(-0.2, measured / target - 1))
    coefficient = actor.first(Actor.current_kl_coef) * (1 + error * sequences / horizon)
    actor.all(Actor.set_kl_coef, coefficient)
    return coefficient
