"""The embedded task: column addition with written-out working, generated procedurally.

It knows numbers and strings only: tokens, templates and the order of training belong to its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations_with_replacement, islice
from typing import Literal

from miniverl.config import ConfigError

Part = Literal["train", "validation", "test"]
Digits = tuple[int, int]

_TRIES = 10_000  # a part of one problem in 55 is missed by all of them with probability 1e-80


@dataclass(frozen=True, slots=True)
class Problem:
    """
    >>> Problem(436, 9).answer
    '445'
    """

    a: int
    b: int

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def pair(self) -> tuple[int, int]:
        """The operands in ascending order: 9+436 is the same problem as 436+9."""
        return min(self.a, self.b), max(self.a, self.b)


def part_of(a: int, b: int) -> Part:
    """The part a problem belongs to: a tenth each for test and validation, decided by its operands alone.

    It hashes the unordered pair, so that a commuted problem cannot leak into another part.
    """
    bucket = int(sha256(f"{min(a, b)}+{max(a, b)}".encode()).hexdigest(), 16) % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw(seed: int, part: Part, index: int, digits: Digits) -> Problem:
    """Problem number `index` of a part: a pure function of its arguments.

    Each operand has a number of digits uniform in `digits` (both ends included) and is then uniform among the
    numbers with exactly that many digits (0 has one digit). Pairs of another part are drawn again.
    Raises ConfigError where the part has no problem of these digits.
    """
    rng = random.Random(f"{seed}/{part}/{index}")
    for _ in range(_TRIES):
        a, b = _operand(rng, digits), _operand(rng, digits)
        if part_of(a, b) == part:
            return Problem(a, b)
    raise ConfigError(f"data.addition.digits={list(digits)}: the {part} part has no problem with operands of "
                      f"{digits[0]} to {digits[1]} digits; allow more digits, e.g. [1, 2].")


def distinct(seed: int, part: Part, digits: Digits, count: int, key: str) -> tuple[Problem, ...]:
    """The first `count` different problems of a part, in drawing order (a commuted pair is not different).

    Raises ConfigError, naming the setting `key` that asked for them, if fewer exist.
    """
    found = len(tuple(islice(_enumerate(part, digits), count)))
    if found < count:
        raise ConfigError(f"{key}={count}: the {part} part has only {found} different problems with operands "
                          f"of {digits[0]} to {digits[1]} digits (data.addition.digits={list(digits)}). Set "
                          f"{key}={found} or less, or allow more digits.")
    problems: dict[tuple[int, int], Problem] = {}
    for index in range(100 * count + 1000):
        if len(problems) == count:
            break
        problem = draw(seed, part, index, digits)
        problems.setdefault(problem.pair, problem)
    rest = _enumerate(part, digits)  # reached only if nearly all that exist are asked for
    while len(problems) < count:
        problem = next(rest)
        problems.setdefault(problem.pair, problem)
    return tuple(problems.values())


def prompt_text(problem: Problem) -> str:
    """
    >>> prompt_text(Problem(436, 9))
    '436+9='
    """
    return f"{problem.a}+{problem.b}="


def demonstration(problem: Problem, forget_carry: bool) -> str:
    """The working, units column first, each column as x+y+carry=sum, then the answer.

    With `forget_carry` every written carry is 0 and the answer is what that wrong working gives (the last
    column's sum still stands in full).

    >>> demonstration(Problem(436, 9), forget_carry=False)
    '<think>6+9+0=15;3+0+1=4;4+0+0=4</think>445'
    >>> demonstration(Problem(436, 9), forget_carry=True)
    '<think>6+9+0=15;3+0+0=3;4+0+0=4</think>435'
    """
    width = max(len(str(problem.a)), len(str(problem.b)))
    columns, result, carry = [], "", 0
    for x, y in zip(reversed(f"{problem.a:0{width}}"), reversed(f"{problem.b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total}")
        last = len(columns) == width
        result = (str(total) if last else str(total % 10)) + result
        carry = 0 if forget_carry else total // 10
    return f"<think>{';'.join(columns)}</think>{result}"


def mistaken(problem: Problem) -> str:
    """A demonstration with a wrong answer: carries forgotten or, where there are none, the second operand
    read as one more than it is.

    >>> mistaken(Problem(436, 9)), mistaken(Problem(12, 3))
    ('<think>6+9+0=15;3+0+0=3;4+0+0=4</think>435', '<think>2+4+0=6;1+0+0=1</think>16')
    """
    forgotten = demonstration(problem, forget_carry=True)
    if forgotten != demonstration(problem, forget_carry=False):
        return forgotten
    return demonstration(Problem(problem.a, problem.b + 1), forget_carry=False)


def is_labelled_bad(problem: Problem) -> bool:
    """Whether the labelled response of a problem is a mistaken one: for about half of them."""
    return int(sha256(f"label/{problem.a}+{problem.b}".encode()).hexdigest(), 16) % 2 == 1


def forgets_carry(seed: int, index: int, share: float) -> bool:
    """Whether demonstration number `index` drops its carries: true for about `share` of them."""
    return random.Random(f"{seed}/forget/{index}").random() < share


def _operand(rng: random.Random, digits: Digits) -> int:
    length = rng.randint(*digits)
    return rng.randint(_smallest(length), 10**length - 1)


def _smallest(length: int) -> int:
    return 0 if length == 1 else 10 ** (length - 1)


def _enumerate(part: Part, digits: Digits) -> Iterator[Problem]:
    numbers = range(_smallest(digits[0]), 10 ** digits[1])
    for a, b in _pairs(numbers):
        if part_of(a, b) == part:
            yield Problem(a, b)


def _pairs(numbers: range) -> Iterator[tuple[int, int]]:
    if len(numbers) <= 10_000:
        yield from combinations_with_replacement(numbers, 2)
        return
    for b in numbers:  # the same pairs without holding all numbers in memory
        for a in range(numbers.start, b + 1):
            yield a, b
