"""The page: on-policy training, one step as dataflow. What each sentence does is one room further in.

prompts → rollouts (workers.rollout) → rewards (scoring) → batch with what to learn from (signals)
→ update (workers.actor) → weights back to the engine (sync) → record
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from miniverl.config import Config
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.group import WorkerGroup
from miniverl.controller.record import Record
from miniverl.controller.scoring import Scoring, sample_rows
from miniverl.controller.signals import Signal
from miniverl.controller.summary import describe_rollouts
from miniverl.controller.sync import sync
from miniverl.data.prompts import Data
from miniverl.pack import mini_batches
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trainer:
    """The on-policy loop, whatever the signal is that a rollout is learned from."""

    config: Config
    data: Data
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    actor: WorkerGroup
    rollout: WorkerGroup
    score: Scoring
    signal: Signal
    evaluate: Evaluator
    record: Record

    def step(self) -> None:
        """One global batch, from prompts to new weights in the engine."""
        c, timed = self.config, self.record.timers
        with timed("step"):
            prompts = self.data.train.take(c.trainer.prompts_per_step)
            with timed("gen"):
                groups = self.rollout.map(
                    RolloutWorker.generate, prompts, self.sampling, n=c.rollout.n, lam=c.algo.lam
                )
            with timed("reward"):
                rollouts, rewards = self.score(prompts, groups)
            with timed("score"):
                batch, signals = self.signal(rollouts)
            with timed("update_actor"):
                updates = mini_batches(batch, c.algo.updates_per_epoch) * c.algo.epochs
                metrics = self.actor.reduce_each(Actor.update, updates)
            with timed("update_weights"):
                sync(self.actor, self.rollout, self.record.step + 1)
        self.record.finish_step(
            {**metrics, **signals, **rewards, **describe_rollouts(rollouts, self.sampling)},
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

    def step(self) -> None: ...


def fit(loop: Loop) -> None:
    """Train to `trainer.steps` (or to a stop signal), from wherever the record stands."""
    record = loop.record
    record.restore(loop.actor, loop.data.train)
    sync(loop.actor, loop.rollout, record.step)
    evaluate_if_due(loop)
    while record.running:
        loop.step()
        evaluate_if_due(loop)
        if record.checkpoint_due:
            with record.timers("save_checkpoint"):
                record.save(loop.actor, loop.data.train)


def evaluate_if_due(loop: Loop) -> None:
    if loop.record.evaluation_due:
        with loop.record.timers("testing"):
            metrics, rollouts = loop.evaluate()
        rows = sample_rows(loop.evaluate.prompts, rollouts, loop.tokenizer, len(rollouts), "held-out")
        loop.record.finish_evaluation(metrics, rows)
