"""Verdicts → rewards: sums, what a failure does under each policy, who is told, and what stops a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miniverl.config import Config, ConfigError, RolloutConfig, RunError
from miniverl.config_io import config_from_dict
from miniverl.controller.episodes import learnable
from miniverl.controller.scoring import FAILURES, open_rewards
from miniverl.types import Prompt, Rollout
from tests.kit import tiny_tok

HERE = "tests/rewards/functions.py"
TOK = tiny_tok()


def config(reward, **sections) -> Config:
    teacher = {"model": {"teacher": {"path": "somewhere"}}}
    return config_from_dict({**teacher, "reward": {"workers": 2, **reward}, **sections})


def function(name, weight=1.0, **kwargs):
    return {
        "function": name if name in ("overlong", "exact_match") else f"{HERE}:{name}",
        "weight": weight,
        "kwargs": kwargs,
    }


def asked(*responses: str, answer: str | None = "5"):
    """One prompt with all the responses, as a group."""
    rollouts = []
    for k, text in enumerate(responses):
        ids = np.array([*TOK(text, add_special_tokens=False)["input_ids"], TOK.eos_token_id])
        ones = np.ones(len(ids))
        rollouts.append(Rollout("row#0", k, np.array([1]), ids, ones, -ones, (0, 0), "stop"))
    return [Prompt("row#0", (1,), "2+3=", answer)], [rollouts]


def scored(c: Config, *responses: str, run_dir: Path | None = None, answer: str | None = "5"):
    with open_rewards(c, TOK, run_dir) as (train, _):
        return train(*asked(*responses, answer=answer))


def test_the_reward_is_the_weighted_sum_and_every_part_is_logged():
    c = config(
        {
            "functions": {
                "right": function("exact_match", 2.0),
                "long": function("overlong", 0.5, buffer=4, max_length=4),
                "bonus": function("told", -1.0, extra=0.75),
            },
            "accuracy": "right",
        }
    )
    (one, two), metrics = scored(c, "dict", "kwargs", answer="dict")
    tokens = len(one.response_ids)
    assert dict(one.rewards) == {"right": 1.0, "long": -tokens / 4, "bonus": 0.5, "bonus/format": 1.0}
    assert one.reward == 2.0 - 0.5 * tokens / 4 - 0.5
    assert dict(two.rewards) == {
        "right": 0,
        "long": -len(two.response_ids) / 4,
        "bonus": 1,
        "bonus/extra": 0.75,
    }
    assert metrics["reward/right/mean"] == 0.5
    assert metrics["reward/bonus/mean"] == 0.75
    assert metrics["reward/bonus/extra/mean"] == 0.75
    assert metrics["reward/failures"] == 0


def test_a_score_of_zero_is_a_score():
    rollouts, metrics = scored(config({"functions": {"f": function("told")}}), "zero", "zero")
    assert [r.reward for r in rollouts] == [0.0, 0.0]
    assert len(learnable(rollouts, grouped=True)) == 2
    assert (metrics["reward/f/mean"], metrics["reward/failures"]) == (0.0, 0)


@pytest.mark.parametrize("bad", ["nan", "None", "text", "list"])
def test_rew_05_a_failure_is_masked_counted_and_named(bad, tmp_path, capsys):
    c = config({"functions": {"f": function("told"), "g": function("length")}, "accuracy": "f"})
    rollouts, metrics = scored(c, "int", bad, "zero", run_dir=tmp_path)
    assert [r.reward for r in rollouts] == [3 + 3, None, 0 + 4]
    assert dict(rollouts[1].rewards) == {"g": len(bad)}, "what did not fail is kept, for the record"
    assert [r.sample for r in learnable(rollouts, grouped=True)] == [0, 2]
    assert (metrics["reward/failures"], metrics["reward/f/failures"], metrics["reward/g/failures"]) == (
        1,
        1,
        0,
    )
    assert metrics["reward/f/mean"] == 1.5, "over the two that have a score"
    (row,) = [json.loads(line) for line in (tmp_path / FAILURES).read_text().splitlines()]
    assert (row["id"], row["function"], row["response"]) == ("row#0/1", "f", bad)
    assert "f of row#0/1" in capsys.readouterr().out


def test_on_failure_score_goes_on_with_the_declared_score_and_still_counts():
    c = config({"functions": {"f": function("told", 2.0)}, "on_failure": "score", "failure_score": -1.0})
    rollouts, metrics = scored(c, "int", "nan")
    assert [r.reward for r in rollouts] == [6.0, -2.0]
    assert metrics["reward/failures"] == 1
    assert metrics["reward/f/mean"] == 3.0


def test_rew_02_a_hang_costs_one_limit_and_one_response():
    c = config({"functions": {"f": function("obey")}, "timeout_s": 0.5})
    rollouts, metrics = scored(c, "fine", "sleep", "fine")
    assert [r.reward for r in rollouts] == [1.0, None, 1.0]
    assert metrics["reward/failures"] == 1


@pytest.mark.parametrize("policy", ["mask", "score"])
def test_rew_01_a_function_that_always_fails_stops_the_run(policy):
    functions = {"f": function("alarm_in_thread"), "fine": function("length")}
    c = config({"functions": functions, "accuracy": "f", "on_failure": policy})
    with pytest.raises(
        RunError, match=r"reward function f failed on all 2 samples.*row#0/0 .*signal only works"
    ):
        scored(c, "a", "b")


def test_rew_10_failures_of_any_text_are_listed_as_json(tmp_path):
    c = config({"functions": {"f": function("extract")}})
    texts = ["=1", "e\u0301\u200f\u2028", "a\x00b", "世界🙂"]
    with pytest.raises(RunError, match="failed on all"):
        scored(c, *texts, run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / FAILURES).read_text().splitlines()]
    assert [row["response"] for row in rows] == texts


def test_prompts_without_an_answer_are_skipped_only_where_nobody_named_a_function():
    (one,), metrics = scored(config({}), "5", answer=None)
    assert (one.reward, dict(one.rewards)) == (None, {})
    assert metrics == {"reward/failures": 0, "reward/exact_match/failures": 0}
    (two,), _ = scored(config({"functions": {"f": function("length")}}), "5", answer=None)
    assert two.reward == 1.0
    with pytest.raises(RunError, match=r"row#0/0 .*has no answer"):
        scored(config({"functions": {"f": function("exact_match")}}), "5", answer=None)


def test_held_out_responses_are_scored_by_accuracy_alone_or_by_the_scorer():
    functions = {"right": function("exact_match", 3.0), "long": function("length")}
    c = config({"functions": functions, "accuracy": "right"})
    with open_rewards(c, TOK, None) as (_, held_out):
        ((right, wrong), metrics) = held_out(*asked("5", "6"))
    assert (right.reward, wrong.reward) == (1.0, 0.0), "its weight is of no concern"
    assert set(metrics) == {"reward/failures", "reward/right/failures", "reward/right/mean"}
    with open_rewards(replace(c, eval=replace(c.eval, scorer="long")), TOK, None) as (_, held_out):
        ((five,), _) = held_out(*asked("5"))
    assert five.reward == 1.0 and dict(five.rewards) == {"long": 1.0}


def test_a_function_that_cannot_be_loaded_is_a_bad_request():
    c = config({"functions": {"mine": {"function": "no_such_module:f"}}})
    with (
        pytest.raises(ConfigError, match=r"mine .*No module named 'no_such_module'"),
        open_rewards(c, TOK, None),
    ):
        pass


# The section


@pytest.mark.parametrize(
    ("reward", "sections", "words"),
    [
        ({"functions": {"a": {"function": "maths"}}}, {}, ["reward.functions.a.function=maths", "math"]),
        ({"functions": {"a": {"function": ""}}}, {}, ["reward.functions.a.function="]),
        ({"functions": {"a": {"funktion": "math"}}}, {}, ["reward.functions", "function, weight, kwargs"]),
        ({"functions": {"a/b": {"function": "math"}}}, {}, ["a/b"]),
        ({"functions": {"a": {"function": "math"}, "b": {"function": "math"}}}, {}, ["reward.accuracy=NAME"]),
        ({"functions": {"a": {"function": "math"}}, "accuracy": "b"}, {}, ["reward.accuracy=b", "a"]),
        ({"accuracy": "b"}, {}, ["reward.accuracy=b", "empty"]),
        ({}, {"eval": {"scorer": "maths"}}, ["eval.scorer=maths", "exact_match"]),
        ({"timeout_s": 0}, {}, ["reward.timeout_s=0", "above 0"]),
    ],
)
def test_a_section_that_means_nothing_is_refused(reward, sections, words):
    with pytest.raises(ConfigError) as refused:
        config(reward, **sections)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"buffer": 0},
        {"buffer": True},
        {"buffer": 1.5},
        {"buffer": 257},
        {"buffer": 9, "max_length": 8},
        {"buffer": 9, "max_length": None},
    ],
)
def test_adv_15_overlong_lengths_are_checked_only_where_it_is_asked_for(kwargs):
    """ADV-15; rollout.max_response_length is 256."""
    with pytest.raises(ConfigError, match=r"reward.functions.o.kwargs.(buffer|max_length)="):
        config({"functions": {"o": {"function": "overlong", "kwargs": kwargs}}})
    config({"functions": {"o": {"function": f"{HERE}:told", "kwargs": kwargs}}})
    assert RolloutConfig().max_response_length == 256
