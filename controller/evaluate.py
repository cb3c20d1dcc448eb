"""Held-out accuracy: the same prompts each time, with the evaluation's own sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniverl.controller.group import WorkerGroup
from miniverl.controller.scoring import score
from miniverl.metrics import finalize, length_metrics
from miniverl.rewards import SCORERS
from miniverl.types import Prompt, Rollout
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Evaluator:
    rollout: WorkerGroup
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    scorer: str

    def __call__(self) -> tuple[dict[str, float], list[Rollout]]:
        """Metrics and the scored rollouts; both empty where there is nothing held out."""
        if not self.prompts:
            return {}, []
        groups = self.rollout.map(RolloutWorker.generate, self.prompts, self.sampling, n=1, lam=1.0)
        rollouts = score(self.prompts, groups, self.tokenizer, self.scorer, SCORERS[self.scorer])
        lengths = length_metrics(
            "val/response_length", [len(r.response_ids) for r in rollouts], self.sampling.max_new_tokens
        )
        accuracy = sum(r.rewards[self.scorer] for r in rollouts) / len(rollouts)
        return {"val/accuracy": accuracy, **finalize(lengths)}, rollouts
