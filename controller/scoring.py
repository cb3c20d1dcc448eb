"""Groups of rollouts → one list of rollouts with their rewards. Decodes each whole response once.

The functions run in processes of their own (`miniverl.rewards.pool`); here their verdicts become a reward,
and a failed call what `reward.on_failure` says: never a silent 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miniverl.config import Config, ConfigError, RunError
from miniverl.config_reward import RewardConfig, RewardFunctionConfig, Scheme, scheme
from miniverl.metrics import Mean, Metric, Sum, finalize
from miniverl.rewards.pool import Call, CannotStart, Function, RewardPool
from miniverl.rewards.sample import Sample, Verdict
from miniverl.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAILURES = "reward_failures.jsonl"
_TOLD = 3  # failures that are spelt out on the console per step, and in an error


@dataclass(frozen=True)
class Scoring:
    """Scores the rollouts of one kind: a step's, or an evaluation's."""

    pool: RewardPool
    functions: Mapping[str, RewardFunctionConfig]
    """The functions that are asked, each a function of the pool by its name."""
    settings: RewardConfig
    unanswered: Literal["skip", "ask"]
    """Rollouts of a prompt without an answer: leave them without a reward, or ask the functions all the
    same."""
    tokenizer: PreTrainedTokenizerBase
    max_response_length: int
    run_dir: Path | None
    """Where failures are listed, as reward_failures.jsonl; None = nowhere."""

    def __call__(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]
    ) -> tuple[list[Rollout], dict[str, float]]:
        """The groups' rollouts in order, each with its `rewards` by function (and `function/part`) and their
        weighted sum `reward`; and `reward/<name>/mean`, `reward/failures`, `reward/<name>/failures`.

        Raises RunError, naming samples, if every call of a function failed.
        """
        rollouts, samples = self._samples(prompts, groups)
        asked = [i for i, s in enumerate(samples) if s.answer is not None or self.unanswered == "ask"]
        calls = [Call(name, samples[i]) for i in asked for name in self.functions]
        try:
            verdicts = self.pool.score(calls)
        except CannotStart as error:
            raise RunError(f"a reward process was lost and cannot be replaced: {error}.") from error
        self._tell_failures(calls, verdicts)
        for place, i in enumerate(asked):
            start = place * len(self.functions)
            said = dict(zip(self.functions, verdicts[start : start + len(self.functions)], strict=True))
            rollouts[i] = self._rewarded(rollouts[i], said)
        return rollouts, self._metrics(calls, verdicts)

    def _samples(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]
    ) -> tuple[list[Rollout], list[Sample]]:
        rollouts: list[Rollout] = []
        samples: list[Sample] = []
        for prompt, group in zip(prompts, groups, strict=True):
            for rollout in group:
                if rollout.uid != prompt.uid:
                    raise ValueError(f"rollout {rollout.uid} was paired with prompt {prompt.uid}")
                rollouts.append(rollout)
                samples.append(
                    Sample(
                        id=f"{rollout.uid}/{rollout.sample}",
                        prompt=prompt.text,
                        response=response_text(rollout, self.tokenizer),
                        answer=prompt.answer,
                        extra=prompt.extra,
                        response_tokens=len(rollout.response_ids),
                        max_response_tokens=self.max_response_length,
                        truncated=rollout.finish == "length",
                    )
                )
        return rollouts, samples

    def _rewarded(self, rollout: Rollout, said: Mapping[str, Verdict]) -> Rollout:
        scores = {name: v.score for name, v in said.items()}
        if self.settings.on_failure == "score":
            substitute = self.settings.failure_score
            scores = {name: substitute if score is None else score for name, score in scores.items()}
        found = {name: score for name, score in scores.items() if score is not None}
        parts = {f"{name}/{part}": x for name, v in said.items() for part, x in v.parts.items()}
        total = None
        if len(found) == len(said):
            total = math.fsum(self.functions[name].weight * score for name, score in found.items())
        return replace(rollout, rewards={**found, **parts}, reward=total)

    def _metrics(self, calls: Sequence[Call], verdicts: Sequence[Verdict]) -> dict[str, float]:
        said = list(zip(calls, verdicts, strict=True))
        metrics: dict[str, Metric] = {"reward/failures": Sum(sum(v.failed for v in verdicts))}
        for name in self.functions:
            own = [v for call, v in said if call.name == name]
            metrics[f"reward/{name}/failures"] = Sum(sum(v.failed for v in own))
            metrics[f"reward/{name}/mean"] = Mean.of(v.score for v in own if v.score is not None)
            for part in sorted({part for v in own for part in v.parts}):
                metrics[f"reward/{name}/{part}/mean"] = Mean.of(v.parts[part] for v in own if part in v.parts)
        return finalize(metrics)

    def _tell_failures(self, calls: Sequence[Call], verdicts: Sequence[Verdict]) -> None:
        failed = [(c, v.failure) for c, v in zip(calls, verdicts, strict=True) if v.failed]
        if not failed:
            return
        if self.run_dir is not None:
            with (self.run_dir / FAILURES).open("a", encoding="utf-8") as lines:
                for call, failure in failed:
                    row = {
                        "id": call.sample.id,
                        "function": call.name,
                        "failure": failure,
                        "response": call.sample.response,
                    }
                    lines.write(json.dumps(row) + "\n")
        named = [f"{call.name} of {call.sample.id}: {failure}" for call, failure in failed]
        for name in self.functions:
            of_it = [f"{c.sample.id} ({failure})" for c, failure in failed if c.name == name]
            if of_it and len(of_it) == sum(call.name == name for call in calls):
                raise RunError(
                    f"reward function {name} failed on all {len(of_it)} samples, among them "
                    f"{'; '.join(of_it[:_TOLD])}."
                )
        more = f" and {len(named) - _TOLD} more" if len(named) > _TOLD else ""
        print(f"reward calls failed: {'; '.join(named[:_TOLD])}{more}", flush=True)


@contextmanager
def open_rewards(
    config: Config, tokenizer: PreTrainedTokenizerBase, run_dir: Path | None
) -> Iterator[tuple[Scoring, Scoring]]:
    """The scoring of training rollouts and that of held-out ones, over one pool of processes that ends with
    the context.

    Raises ConfigError for a function that cannot be loaded.
    """
    wanted = scheme(config.reward, config.eval.scorer, config.data.source, config.rollout.max_response_length)
    known = {**wanted.held_out, **wanted.functions}
    functions = {name: Function(f.function, f.kwargs) for name, f in known.items()}
    try:
        pool = RewardPool(functions, config.reward.workers, config.reward.timeout_s)
    except CannotStart as error:
        raise ConfigError(
            f"a reward function cannot be loaded (reward.functions, eval.scorer): {error}."
        ) from error
    limit = config.rollout.max_response_length
    train = Scoring(
        pool,
        wanted.functions,
        config.reward,
        "skip" if wanted.implied else "ask",
        tokenizer,
        limit,
        run_dir,
    )
    with pool:
        yield train, _held_out(train, wanted, config)


def accuracy_name(config: Config) -> str:
    """Which of a rollout's `rewards` says whether it is right."""
    limit = config.rollout.max_response_length
    return scheme(config.reward, config.eval.scorer, config.data.source, limit).accuracy


def _held_out(train: Scoring, wanted: Scheme, config: Config) -> Scoring:
    (measure,) = wanted.held_out
    return replace(
        train,
        functions={measure: replace(wanted.held_out[measure], weight=1.0)},
        settings=replace(config.reward, on_failure="mask"),
        unanswered="skip",
        max_response_length=config.eval.max_response_length or train.max_response_length,
    )


def response_text(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """The whole response without its stop token; decoded at once, so characters split over tokens stay
    whole."""
    ids = rollout.response_ids[:-1] if rollout.finish == "stop" else rollout.response_ids
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def sample_rows(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    source: str | None = None,
) -> list[dict[str, object]]:
    """The first `count` rollouts as rows for the sample table."""
    by_uid = {p.uid: p for p in prompts}
    return [
        {
            "uid": r.uid,
            "sample": r.sample,
            "source": source or r.source,
            "prompt": by_uid[r.uid].text,
            "response": response_text(r, tokenizer),
            "answer": by_uid[r.uid].answer,
            "score": r.reward,
            "finish": r.finish,
            "response_tokens": len(r.response_ids),
        }
        for r in rollouts[:count]
    ]
