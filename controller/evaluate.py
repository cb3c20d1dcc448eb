"""Held-out accuracy: the same prompts each time, with the evaluation's own sampling."""

from __future__ import annotations

from dataclasses import dataclass

from miniverl.controller.group import WorkerGroup
from miniverl.controller.scoring import Scoring
from miniverl.metrics import Mean, finalize, length_metrics
from miniverl.types import Prompt, Rollout
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker


@dataclass(frozen=True)
class Evaluator:
    rollout: WorkerGroup
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    score: Scoring

    def __call__(self) -> tuple[dict[str, float], list[Rollout]]:
        """Metrics and the scored rollouts; both empty where there is nothing held out."""
        if not self.prompts:
            return {}, []
        groups = self.rollout.map(RolloutWorker.generate, self.prompts, self.sampling, n=1, lam=1.0)
        rollouts, rewards = self.score(self.prompts, groups)
        lengths = length_metrics(
            "val/response_length", [len(r.response_ids) for r in rollouts], self.sampling.max_new_tokens
        )
        accuracy = Mean.of(r.reward for r in rollouts if r.reward is not None)
        told = {f"val/{name}": number for name, number in rewards.items()}
        return {**told, **finalize({"val/accuracy": accuracy, **lengths})}, rollouts
