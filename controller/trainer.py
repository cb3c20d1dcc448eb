"""The page: on-policy training, one step as dataflow. What each sentence does is one room further in.

prompts → rollouts with rewards (experience) → batches with what to learn from (signals)
→ updates (workers.actor) → weights back to the engine (sync) → record
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from miniverl.config import Config
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.experience import Experience
from miniverl.controller.group import WorkerGroup
from miniverl.controller.record import Record
from miniverl.controller.scoring import sample_rows
from miniverl.controller.signals import Signal
from miniverl.controller.summary import describe_rollouts
from miniverl.controller.sync import sync
from miniverl.controller.update import update
from miniverl.data.prompts import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trainer:
    """The on-policy loop, whatever the signal is that a rollout is learned from."""

    config: Config
    data: Data
    tokenizer: PreTrainedTokenizerBase
    actor: WorkerGroup
    rollout: WorkerGroup
    experience: Experience
    signal: Signal
    evaluate: Evaluator
    record: Record

    @property
    def learners(self) -> tuple[WorkerGroup, ...]:
        return (self.actor, *self.signal.learners)

    def step(self) -> None:
        """One global batch, from prompts to new weights in the engine."""
        c, timed = self.config, self.record.timers
        with timed("step"):
            prompts, rollouts, gathered = self.experience()
            with timed("score"):
                updates, signals = self.signal(rollouts, self.record.step)
            with timed("update_actor"):
                metrics = update(self.actor, updates, c.algo)
            with timed("update_weights"):
                sync(self.actor, self.rollout, self.record.step + 1)
        self.record.finish_step(
            {**metrics, **signals, **gathered, **describe_rollouts(rollouts, self.experience.sampling)},
            sample_rows(prompts, rollouts, self.tokenizer, c.trainer.samples_per_step),
        )


class Loop(Protocol):
    """What `fit` needs of a page: this one, or `supervised`'s."""

    data: Data
    tokenizer: PreTrainedTokenizerBase
    actor: WorkerGroup
    rollout: WorkerGroup
    evaluate: Evaluator
    record: Record

    @property
    def learners(self) -> tuple[WorkerGroup, ...]: ...  # all whose weights change: what a checkpoint holds

    def step(self) -> None: ...


def fit(loop: Loop) -> None:
    """Train to `trainer.steps` (or to a stop signal), from wherever the record stands."""
    record = loop.record
    record.restore(loop.learners, loop.data.train)
    sync(loop.actor, loop.rollout, record.step)
    evaluate_if_due(loop)
    while record.running:
        loop.step()
        evaluate_if_due(loop)
        if record.checkpoint_due:
            with record.timers("save_checkpoint"):
                record.save(loop.learners, loop.data.train)


def evaluate_if_due(loop: Loop) -> None:
    if loop.record.evaluation_due:
        with loop.record.timers("testing"):
            metrics, rollouts = loop.evaluate()
        rows = sample_rows(loop.evaluate.prompts, rollouts, loop.tokenizer, len(rollouts), "held-out")
        loop.record.finish_evaluation(metrics, rows)
