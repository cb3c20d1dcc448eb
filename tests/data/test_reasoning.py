"""Problems of reasoning-gym: reproducible, held out, within the limit, and scored by their own task."""

import contextlib

import pytest

from miniverl.config import ConfigError, RunError
from miniverl.config_io import config_from_dict
from miniverl.controller.scoring import open_rewards
from miniverl.data.prompts import open_data
from miniverl.data.reasoning import HELD_OUT
from miniverl.rewards.pool import Call
from miniverl.rewards.reasoning import reasoning_gym
from miniverl.rewards.sample import Sample
from tests.kit import tiny_tok

TOK = tiny_tok()


def config(task="leg_counting", size=4, algo=None, seed=0, **data):
    options = data.pop("options", {})
    return config_from_dict(
        {
            "model": {"teacher": {"path": "somewhere"}},
            "data": {"source": "reasoning_gym", "max_prompt_length": 2048,
                     "reasoning_gym": {"task": task, "options": options}, **data},
            "trainer": {"seed": seed},
            "eval": {"size": size},
            "algo": algo or {},
        }
    )  # fmt: skip


def test_the_same_position_gives_the_same_problem_and_another_seed_other_ones():
    one, two = (open_data(config(), TOK, None).train for _ in range(2))
    first = one.take(6)
    two.seek(3)
    assert two.take(3) == first[3:]
    assert one.fingerprint == two.fingerprint
    other = open_data(config(seed=1), TOK, None).train
    assert other.fingerprint != one.fingerprint
    assert not {p.text for p in other.take(6)} & {p.text for p in first}
    assert len({p.uid for p in first}) == 6
    assert TOK.decode(list(first[0].token_ids)).count(first[0].text) == 1


def test_held_out_problems_are_the_same_for_every_seed_and_never_trained():
    small = {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 3}
    one, two = (open_data(config(size=20, seed=s, options=small), TOK, None) for s in (0, 1))
    assert one.held_out == two.held_out
    texts = {p.text for p in one.held_out}
    trained = one.train.take(40)
    assert not texts & {p.text for p in trained}, "there are about 60 such problems, so 20 would recur"
    seeds = [p.extra["seed"] for p in trained]
    assert all(isinstance(seed, int) and seed < HELD_OUT for seed in seeds)


@pytest.mark.parametrize(
    "task", ["leg_counting", "countdown", "basic_arithmetic", "spell_backward", "sudoku"]
)
def test_its_own_answer_is_right_and_another_is_not(task):
    (prompt, *_) = open_data(config(task, size=1), TOK, None).train.take(1)

    def score(response):
        return reasoning_gym(Sample("s", prompt.text, response, prompt.answer, prompt.extra))

    assert prompt.answer is not None
    assert score(f"<think>hm</think>I say <answer>{prompt.answer}</answer>") == 1.0
    assert score(f"<think>hm</think>{prompt.answer}") == 1.0
    assert score(f"<answer>{prompt.answer}</answer> no, <answer>-</answer>") < 0.1


def test_a_countdown_answer_is_judged_by_its_value_not_its_text():
    """Countdown has many right answers; the task's scorer evaluates the expression."""
    (prompt,) = open_data(config("countdown", size=1), TOK, None).train.take(1)
    assert prompt.answer is not None
    again = Sample("s", "", f"<answer>({prompt.answer})</answer>", None, prompt.extra)
    assert reasoning_gym(again) == 1.0


def test_the_run_scores_them_by_default_in_its_processes():
    c = config(size=2)
    data = open_data(c, TOK, None)
    with open_rewards(c, TOK, None) as (train, held_out):
        assert list(train.functions) == list(held_out.functions) == ["reasoning_gym"]
        right, wrong = data.held_out
        samples = [
            Sample("a", "", right.answer or "", None, right.extra),
            Sample("b", "", "x", None, wrong.extra),
        ]
        found = train.pool.score([Call("reasoning_gym", sample) for sample in samples])
    assert [v.score for v in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": ""}, ["data.reasoning_gym.task=null", "leg_counting"]),
        ({"task": "leg_count"}, ["data.reasoning_gym.task=leg_count", "leg_counting"]),
        ({"options": {"legs": 3}}, ["data.reasoning_gym.options", "legs"]),
        ({"options": {"min_animals": 9, "max_animals": 2}}, ["data.reasoning_gym.options"]),
        ({"algo": {"name": "sft"}}, ["algo.name=sft"]),
        ({"algo": {"lam": 0.5}}, ["algo.lam=0.5"]),
        ({"max_prompt_length": 20}, ["data.max_prompt_length=20", "test/0"]),
        ({"max_prompt_length": 20, "overlong_prompts": "filter"}, ["data.max_prompt_length=20"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes, words):
    with pytest.raises(ConfigError) as refused:
        open_data(config(**changes), TOK, None)
    assert all(word in str(refused.value) for word in words), refused.value


def test_overlong_prompts_are_cut_redrawn_or_told():
    cut = open_data(config(max_prompt_length=20, overlong_prompts="left"), TOK, None)
    assert {len(p.token_ids) for p in (*cut.held_out, *cut.train.take(3))} == {20}
    whole = [len(p.token_ids) for p in open_data(config(size=1), TOK, None).train.take(30)]
    held_out = len(open_data(config(size=1), TOK, None).held_out[0].token_ids)
    limit = max(held_out, sorted(whole)[15])
    redrawn = open_data(config(size=1, max_prompt_length=limit, overlong_prompts="filter"), TOK, None)
    assert max(len(p.token_ids) for p in redrawn.train.take(30)) <= limit
    with pytest.raises(RunError, match=f"data.max_prompt_length={limit}: problem train/"):
        open_data(config(size=1, max_prompt_length=limit), TOK, None).train.take(200)


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "polynomial_multiplication", "n_queens"])
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch SENTINEL')",
        "open('SENTINEL', 'w')",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "[__import__('os').write(n, b'[1.0, null]') for n in range(4, 64)]",
    ],
)
def test_rew_08_what_an_answer_makes_the_library_evaluate_is_shut_in(task, attack, tmp_path, monkeypatch):
    (prompt,) = open_data(config(task, size=1), TOK, None).train.take(1)
    attack = attack.replace("SENTINEL", str(tmp_path / "sentinel"))
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(RuntimeError):  # where the library gives up: a counted failure
        assert reasoning_gym(Sample("s", "", f"<answer>{attack}</answer>", None, prompt.extra)) < 0.1
    assert list(tmp_path.iterdir()) == []


def test_a_sample_of_other_data_is_named():
    with pytest.raises(ValueError, match="sample s is no problem"):
        reasoning_gym(Sample("s", "", "4", "4"))
