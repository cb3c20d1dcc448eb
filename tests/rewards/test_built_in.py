"""The built-in functions, one by one; expected scores by hand or from a paper."""

import subprocess
import sys
from pathlib import Path

import pytest

from miniverl.rewards.math_answer import math
from miniverl.rewards.multiple_choice import multiple_choice
from miniverl.rewards.overlong import overlong
from miniverl.rewards.pattern import regex
from miniverl.rewards.sample import Sample


def sample(response, answer=None, **fields):
    return Sample("s", "", response, answer, **fields)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("\\boxed{\\frac12}", "0.5", 1),
        ("so x is $\\frac{1}{2}$.", "\\frac{1}{2}", 1),
        ("1/2", "$0.5$", 1),
        ("<think>it is 3</think>The answer is 4", "4", 1),
        ("<think>it is 4</think>The answer is 3", "4", 0),
        ("1,234", "1234", 1),
        ("(1,2)", "(1,2)", 1),
        ("(2,1)", "(1,2)", 0),
        ("\\boxed{x^2-1}", "(x-1)(x+1)", 1),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1),
        ("I get \\boxed{3}. Wait, that is wrong. It is \\boxed{4}.", "4", 1),
        ("I do not know", "4", 0),
        ("", "4", 0),
    ],
)
def test_math(response, answer, score):
    assert math(sample(response, answer)) == score


def test_math_needs_an_answer_that_can_be_read():
    with pytest.raises(ValueError, match="sample s has no answer"):
        math(sample("4"))
    with pytest.raises(ValueError, match="sample s: nothing mathematical"):
        math(sample("4", ""))


@pytest.mark.parametrize(
    "where", ["{}", "\\boxed{{{}}}", "${}$", "The answer is {}", "\\boxed{{\\text{{{}}}}}"]
)
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path('SENTINEL').touch()",
        "(lambda: open('SENTINEL', 'w'))()",
        "1+__import__('os').system('touch SENTINEL')",
        "1*(2).__class__.__base__.__subclasses__()",
        "\\input{|touch SENTINEL}",
    ],
)
def test_rew_08_no_response_is_evaluated_as_python(where, attack, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        assert math(sample(where.format(attack), "7")) == 0
    except Exception as error:  # a parser that gives up is a counted failure
        assert not isinstance(error, NameError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("B", "B", 1),
        ("(B)", "b", 1),
        ("b", "B", 0),
        ("B.", "(B)", 1),
        ("B. because 2 < 3", "1", 1),
        ("The answer is **C**.", "C", 1),
        ("answer: (C)", "2", 1),
        ("\\boxed{\\text{D}}", "D", 1),
        ("\\boxed{D}", "3", 1),
        ("<think>The answer is A</think>The answer is B", "B", 1),
        ("First I said the answer is A. The answer is B", "A", 0),
        ("<answer> A </answer>", "A", 1),
        ("A cat sat there", "A", 0),
        ("The answer is Apple", "A", 0),
        ("A or B", "B", 0),
        ("", "A", 0),
    ],
)
def test_multiple_choice(response, answer, score):
    assert multiple_choice(sample(response, answer)) == score


@pytest.mark.parametrize("answer", ["AB", "", "26", "-1", "maybe"])
def test_an_answer_that_is_no_option_is_no_wrong_response(answer):
    with pytest.raises(ValueError, match="sample s: its answer"):
        multiple_choice(sample("A", answer))


def test_regex():
    form = "<think>.*</think>\\s*<answer>[^<]*</answer>"
    good = "<think>a\nb</think>\n<answer>3</answer>\n"
    assert regex(sample(good), form) == 1.0
    assert regex(sample("so: " + good), form) == 0.0
    assert regex(sample("so: " + good), form, where="anywhere") == 1.0
    assert regex(sample(good), form, flags="") == 0.0, "a dot stops at a line break"
    assert regex(sample("no"), form, score=0.5, otherwise=-0.5) == -0.5
    with pytest.raises(ValueError, match="where='begin'"):
        regex(sample(good), form, where="begin")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("length", "score"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (24576, -2.0)],
)
def test_adv_15_overlong_shaping(length, score):
    """ADV-15: L_max 20480, buffer 4096; above L_max it goes on unless it is floored."""
    response = sample("", response_tokens=length, max_response_tokens=20480)
    assert overlong(response, buffer=4096) == score
    assert overlong(response, buffer=4096, max_length=20480, floor=-1.0) == max(score, -1.0)


@pytest.mark.parametrize(("buffer", "limit"), [(0, 10), (-1, 10), (11, 10), (1, 0)])
def test_adv_15_lengths_that_mean_nothing_are_refused(buffer, limit):
    with pytest.raises(ValueError, match=f"buffer={buffer} must lie between 1 and max_length={limit}"):
        overlong(sample("", response_tokens=3, max_response_tokens=limit), buffer=buffer)


@pytest.mark.parametrize(
    ("library", "module", "call"),
    [
        ("math_verify", "miniverl.rewards.math_answer", "prepare()"),
        ("reasoning_gym", "miniverl.rewards.reasoning", "prepare()"),
        ("reasoning_gym", "miniverl.data.reasoning", "_check_task('countdown', {})"),
    ],
)
def test_a_missing_library_is_told_with_what_to_install(library, module, call):
    script = f"import sys; sys.modules[{library!r}] = None; import {module} as m; m.{call}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert library.replace("_", "-") in last and "pip install -r requirements/rewards.txt" in last
