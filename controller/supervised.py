"""The page for what has no rollout: fine-tuning, preferences, pre-training, offline KD.

prompts → their dataset responses (or texts) → batch with what to learn from (supervised_signals)
→ update (workers.actor) → record
The rollout engine is there for the held-out evaluation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from miniverl.config import Config
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.group import WorkerGroup
from miniverl.controller.record import Record
from miniverl.controller.scoring import sample_rows
from miniverl.controller.summary import describe_rollouts
from miniverl.controller.sync import sync
from miniverl.data.prompts import Data
from miniverl.data.responses import dataset_rollouts
from miniverl.types import Batch, Prompt, Rollout
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Lesson(Protocol):
    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> tuple[Batch, dict[str, float]]:
        """The batch of the prompts' dataset responses with its targets, and numbers about them."""
        ...


@dataclass
class Supervised:
    """Learning from dataset responses, whatever it is that is learned from them."""

    config: Config
    data: Data
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    actor: WorkerGroup
    rollout: WorkerGroup
    lesson: Lesson
    evaluate: Evaluator
    record: Record

    @property
    def learners(self) -> tuple[WorkerGroup, ...]:
        return (self.actor,)

    def step(self) -> None:
        c, timed = self.config, self.record.timers
        with timed("step"):
            prompts = self.data.train.take(c.trainer.prompts_per_step)
            rollouts = [
                rollout
                for prompt in prompts
                for rollout in dataset_rollouts(prompt, self.record.step, self.sampling.max_new_tokens)
            ]
            with timed("score"):
                batch, facts = self.lesson(prompts, rollouts)
            with timed("update_actor"):
                metrics = self.actor.reduce(Actor.update, batch)
            sync(self.actor, self.rollout, self.record.step + 1)
        self.record.finish_step(
            {**metrics, **facts, **describe_rollouts(rollouts, self.sampling)},
            sample_rows(prompts, rollouts, self.tokenizer, c.trainer.samples_per_step),
        )
