"""The bound of a GKD step: the matrix products that it cannot do without, and how long they alone take here.

Each product of the step is listed with its shape and count, and timed at that shape; a second, stricter
bound divides all operations by the rate of one large product, which is also what attention's are counted at.

Shape legend: m rows · k inner · n columns
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from miniverl.controller.memory_estimate import Shape

LARGE = 2048
REPEAT_BELOW = 2e9
"""Operations: a smaller product is repeated up to this, because one alone is too short for the clock."""


@dataclass(frozen=True, slots=True)
class Product:
    """y[m, n] = x[m, k] · w[n, k]ᵀ, or one of the two products of its backward pass."""

    part: str
    m: int
    k: int
    n: int
    count: int
    kind: str = "forward"
    """`forward`, `input gradient` or `weight gradient`; all take the same operations."""

    @property
    def operations(self) -> float:
        """Of all `count`; a multiply-add is two."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True, slots=True)
class Step:
    """The sizes of one step; every prompt and every response has the same length."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt_tokens + self.new_tokens)

    @property
    def trained(self) -> int:
        return self.rows * self.new_tokens


def products(step: Step, student: Shape, teacher: Shape) -> list[Product]:
    """Rollout with a cache and one prefill per prompt, teacher forward, student forward and backward."""
    found: list[Product] = []
    for k, n in student.linear:
        found.append(Product("rollout", step.prompts * step.prompt_tokens, k, n, student.layers))
        # The last token drawn is never fed back.
        found.append(Product("rollout", step.rows, k, n, student.layers * (step.new_tokens - 1)))
    found.append(Product("rollout", step.rows, student.hidden, student.vocabulary, step.new_tokens))
    found += [Product("teacher", step.tokens, k, n, teacher.layers) for k, n in teacher.linear]
    found.append(Product("teacher", step.trained, teacher.hidden, teacher.vocabulary, 1))
    for kind in ("forward", "input gradient", "weight gradient"):
        found += [Product("update", step.tokens, k, n, student.layers, kind) for k, n in student.linear]
        found.append(Product("update", step.trained, student.hidden, student.vocabulary, 1, kind))
    return found


def attention_operations(step: Step, student: Shape, teacher: Shape) -> dict[str, float]:
    """Scores and mixing of values, the causal half only; a backward pass takes twice a forward pass."""
    whole = step.prompt_tokens + step.new_tokens

    def per_pair(shape: Shape) -> float:
        return 4.0 * shape.layers * shape.heads * shape.head_dim

    prefill = step.prompts * step.prompt_tokens * (step.prompt_tokens + 1) / 2
    decode = step.rows * sum(range(step.prompt_tokens + 1, whole))
    causal = step.rows * whole * (whole + 1) / 2
    return {
        "rollout": per_pair(student) * (prefill + decode),
        "teacher": per_pair(teacher) * causal,
        "update": per_pair(student) * causal * 3,
    }


class Gemms:
    """Times every distinct product once per `measure`; `seconds` are CPU-seconds per product."""

    def __init__(self, wanted: list[Product]) -> None:
        self.seconds: dict[tuple[int, int, int, str], list[float]] = {
            (p.m, p.k, p.n, p.kind): [] for p in wanted
        }
        # As many weights as there are layers, so that they come from memory as they do in a model.
        self.copies = {(p.m, p.k, p.n, p.kind): min(p.count, 8) for p in wanted}
        self.large: list[float] = []

    def measure(self) -> None:
        x = torch.randn(LARGE, LARGE)
        start = time.process_time()
        torch.mm(x, x)
        self.large.append(time.process_time() - start)
        for (m, k, n, kind), seconds in self.seconds.items():
            seconds.append(_time_one(m, k, n, kind, self.copies[(m, k, n, kind)]))


def _time_one(m: int, k: int, n: int, kind: str, copies: int) -> float:
    repeats = max(copies, int(REPEAT_BELOW / (2.0 * m * k * n)))
    weights = [torch.randn(n, k) for _ in range(copies)]
    x, y = torch.randn(m, k), torch.randn(m, n)
    start = time.process_time()
    for i in range(repeats):
        w = weights[i % copies]
        if kind == "forward":
            F.linear(x, w)
        elif kind == "input gradient":
            torch.mm(y, w)
        else:
            torch.mm(y.T, x)
    return (time.process_time() - start) / repeats
