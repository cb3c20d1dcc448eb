"""Prompts → scored rollouts: one generation, or (dynamic sampling) as many as it takes to fill the step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from miniverl.config import Config, RunError
from miniverl.controller.group import WorkerGroup
from miniverl.controller.scoring import Scoring
from miniverl.data.prompts import PromptStream
from miniverl.metrics import Timers
from miniverl.types import Prompt, Rollout
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker


@dataclass(frozen=True)
class Experience:
    """What a step learns from."""

    config: Config
    stream: PromptStream
    sampling: Sampling
    rollout: WorkerGroup
    score: Scoring
    accuracy: str
    """Which of a rollout's `rewards` says whether it is right."""
    timers: Timers

    def __call__(self) -> tuple[list[Prompt], list[Rollout], dict[str, float]]:
        """Prompts, their scored rollouts in the prompts' order, and numbers about how they were gathered.

        Raises:
            RunError: dynamic sampling did not fill the step within its bounds.
        """
        wanted = self.config.trainer.prompts_per_step
        if self.config.algo.name != "policy_gradient" or not self.config.algo.policy.filter_groups:
            return self._generate()
        prompts: list[Prompt] = []
        rollouts: list[Rollout] = []
        told: list[Mapping[str, float]] = []
        batches, kept, started = 0, 0, time.monotonic()
        while kept < wanted:
            self._check_bounds(batches, kept, time.monotonic() - started)
            drawn, written, metrics = self._generate()
            told.append(metrics)
            batches += 1
            for prompt, group in zip(drawn, grouped(written), strict=True):
                if kept < wanted and is_mixed(group, self.accuracy):
                    prompts.append(prompt)
                    rollouts += group
                    kept += 1
        return prompts, rollouts, {
            **_joined(told),
            "rollout/gen_batches": float(batches),
            "rollout/mixed_share": kept / (batches * wanted),
        }

    def _generate(self) -> tuple[list[Prompt], list[Rollout], dict[str, float]]:
        c = self.config
        prompts = self.stream.take(c.trainer.prompts_per_step)
        with self.timers("gen"):
            groups = self.rollout.map(
                RolloutWorker.generate, prompts, self.sampling, n=c.rollout.n, lam=c.algo.lam
            )
        with self.timers("reward"):
            rollouts, metrics = self.score(prompts, groups)
        if c.algo.name == "policy_gradient" and c.algo.policy.advantage == "remax":
            greedy, told = self._greedy_rewards(prompts)
            metrics |= {f"greedy/{name}": number for name, number in told.items()}
            # Where the greedy response's call failed there is no baseline, and 0 would be a verdict.
            rollouts = [
                replace(r, greedy_reward=greedy[r.uid], reward=None if greedy[r.uid] is None else r.reward)
                for r in rollouts
            ]
        return prompts, rollouts, metrics

    def _greedy_rewards(
        self, prompts: Sequence[Prompt]
    ) -> tuple[Mapping[str, float | None], dict[str, float]]:
        """The reward of each prompt's most likely response, by uid, and the scoring's numbers."""
        sampling = replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0)
        with self.timers("gen"):
            groups = self.rollout.map(RolloutWorker.generate, prompts, sampling, n=1, lam=1.0)
        with self.timers("reward"):
            rollouts, metrics = self.score(prompts, groups)
        return {r.uid: r.reward for r in rollouts}, metrics

    def _check_bounds(self, batches: int, kept: int, seconds: float) -> None:
        policy, wanted = self.config.algo.policy, self.config.trainer.prompts_per_step
        if policy.max_gen_batches and batches >= policy.max_gen_batches:
            bound = f"algo.policy.max_gen_batches={policy.max_gen_batches}"
        elif policy.max_gen_s is not None and seconds > policy.max_gen_s:
            bound = f"algo.policy.max_gen_s={policy.max_gen_s:g}"
        else:
            return
        raise RunError(
            f"dynamic sampling: {kept} of {batches * wanted} prompts had both right and wrong responses "
            f"({self.accuracy}), and the step wants {wanted}; {bound} was reached after {batches} "
            f"generations, {seconds:.0f} s. Raise that bound or rollout.n, choose prompts of other "
            "difficulty, or use algo.policy.filter_groups=false."
        )


def _joined(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of equally large generations as one: failures add up, the rest are means."""
    names = {name: None for metrics in told for name in metrics}
    found = {name: [metrics[name] for metrics in told if name in metrics] for name in names}
    return {n: sum(v) if n.endswith("failures") else sum(v) / len(v) for n, v in found.items()}


def grouped(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts by prompt occurrence; they lie together."""
    return [list(group) for _, group in groupby(rollouts, key=lambda r: r.uid)]


def is_mixed(group: Sequence[Rollout], accuracy: str) -> bool:
    """Whether some responses are right and some are not by the reward called `accuracy` (never by the
    weighted sum, which shaping moves). A failed verdict counts as neither."""
    verdicts = {r.rewards[accuracy] for r in group if accuracy in r.rewards}
    return len(verdicts) > 1
