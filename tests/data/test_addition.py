"""The embedded task: its format, its parts, its determinism."""

import random
from hashlib import sha256

import pytest

from miniverl.config import ConfigError
from miniverl.data.addition import (
    Problem,
    demonstration,
    distinct,
    draw,
    forgets_carry,
    part_of,
    prompt_text,
)


def by_hand(seed, part, index, low, high):
    """The drawing rule as a stranger would write it from the description."""
    rng = random.Random(f"{seed}/{part}/{index}")
    while True:
        pair = []
        for _ in range(2):
            n = rng.randint(low, high)
            pair.append(rng.randint(0 if n == 1 else 10 ** (n - 1), 10**n - 1))
        bucket = int(sha256(f"{min(pair)}+{max(pair)}".encode()).hexdigest(), 16) % 10
        if {0: "test", 1: "validation"}.get(bucket, "train") == part:
            return tuple(pair)


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_draw_is_the_rule_that_the_standalone_example_repeats(part):
    for index in range(50):
        problem = draw(7, part, index, (1, 3))
        assert (problem.a, problem.b) == by_hand(7, part, index, 1, 3)
        assert part_of(problem.a, problem.b) == part_of(problem.b, problem.a) == part


def test_draw_is_pinned():
    """A change of these would silently change every published curve."""
    assert [draw(0, "test", i, (2, 3)) for i in range(3)] == [
        Problem(404, 696),
        Problem(541, 671),
        Problem(421, 21),
    ]


@pytest.mark.parametrize(
    ("a", "b", "right", "carryless"),
    [
        (436, 9, "<think>6+9+0=15;3+0+1=4;4+0+0=4</think>445", "<think>6+9+0=15;3+0+0=3;4+0+0=4</think>435"),
        (0, 0, "<think>0+0+0=0</think>0", "<think>0+0+0=0</think>0"),
        (5, 7, "<think>5+7+0=12</think>12", "<think>5+7+0=12</think>12"),
        (55, 45, "<think>5+5+0=10;5+4+1=10</think>100", "<think>5+5+0=10;5+4+0=9</think>90"),
        (
            9,
            991,
            "<think>9+1+0=10;0+9+1=10;0+9+1=10</think>1000",
            "<think>9+1+0=10;0+9+0=9;0+9+0=9</think>990",
        ),
    ],
)
def test_demonstrations(a, b, right, carryless):
    assert demonstration(Problem(a, b), forget_carry=False) == right
    assert demonstration(Problem(a, b), forget_carry=True) == carryless


def test_correct_demonstrations_end_in_the_answer():
    for i in range(300):
        p = draw(1, "train", i, (1, 9))
        assert demonstration(p, forget_carry=False).rpartition("</think>")[2] == p.answer == str(p.a + p.b)
        assert prompt_text(p) == f"{p.a}+{p.b}="


def test_forgetting_is_a_function_of_seed_and_index_at_the_asked_share():
    flags = [forgets_carry(3, i, 0.9) for i in range(2000)]
    assert flags == [forgets_carry(3, i, 0.9) for i in range(2000)]
    assert 0.87 < sum(flags) / 2000 < 0.93
    assert not any(forgets_carry(3, i, 0.0) for i in range(200))
    assert all(forgets_carry(3, i, 1.0) for i in range(200))


def test_a_part_too_small_is_refused_with_the_number_that_exists():
    exist = sum(part_of(a, b) == "test" for a in range(10) for b in range(a, 10))
    with pytest.raises(ConfigError, match=rf"data\.addition\.test_size=500.* only {exist} different"):
        distinct(0, "test", (1, 1), 500, "data.addition.test_size")
    assert len({p.pair for p in distinct(0, "test", (1, 1), exist, "data.addition.test_size")}) == exist


def test_all_problems_of_a_part_can_be_asked_for():
    """Drawing alone would take for ever to meet the last few; the rest is enumerated."""
    exist = {(a, b) for a in range(100) for b in range(a, 100) if part_of(a, b) == "test"}
    found = distinct(0, "test", (1, 2), len(exist), "k")
    assert {p.pair for p in found} == exist


def test_distinct_problems_come_in_drawing_order():
    drawn = [draw(0, "test", i, (2, 3)) for i in range(40)]
    assert (
        list(distinct(0, "test", (2, 3), 20, "k"))
        == list({p.pair: p for p in reversed(drawn)}.values())[::-1][:20]
    )
