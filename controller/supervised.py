"""The page for what has no rollout: supervised fine-tuning on the dataset's responses.

prompts → their dataset responses → batch (pack) → update (workers.actor) → record
The rollout engine is there for the held-out evaluation only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniverl.config import Config
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.group import WorkerGroup
from miniverl.controller.record import Record
from miniverl.controller.scoring import sample_rows
from miniverl.controller.summary import describe_rollouts
from miniverl.controller.sync import sync
from miniverl.data.prompts import Data
from miniverl.data.responses import dataset_rollout
from miniverl.pack import pack
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Supervised:
    """Next-token loss on dataset responses."""

    config: Config
    data: Data
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    actor: WorkerGroup
    rollout: WorkerGroup
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
                dataset_rollout(p, 0, self.record.step, self.sampling.max_new_tokens) for p in prompts
            ]
            with timed("update_actor"):
                metrics = self.actor.reduce(Actor.update, pack(rollouts))
            sync(self.actor, self.rollout, self.record.step + 1)
        self.record.finish_step(
            {**metrics, **describe_rollouts(rollouts, self.sampling)},
            sample_rows(prompts, rollouts, self.tokenizer, c.trainer.samples_per_step),
        )
