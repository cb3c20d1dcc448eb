"""Bookkeeping of responses that grow: rows out of requests, and which rows are still being written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miniverl.config import RunError
from miniverl.workers.rollout.base import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """One response to be written."""

    uid: str
    sample: int
    token_ids: tuple[int, ...]


def rows_of(requests: Sequence[Request]) -> list[Row]:
    return [Row(r.uid, sample, r.token_ids) for r in requests for sample in r.samples]


class Responses:
    """Tokens and log-probs of B responses. A row is live until it sampled a stop id or its budget ran out."""

    def __init__(self, rows: int, sampling: Sampling) -> None:
        self._stop = frozenset(sampling.stop_ids)
        self._budget = sampling.max_new_tokens
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._log_probs: list[list[float]] = [[] for _ in range(rows)]
        self.live = list(range(rows)) if sampling.max_new_tokens else []

    def append(self, rows: Sequence[int], tokens: Sequence[int], log_probs: Sequence[float]) -> bool:
        """Add one token to each of `rows` (those no longer live take none); True if some row was finished by
        it."""
        before = len(self.live)
        live = set(self.live)
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if row not in live:
                continue
            if math.isnan(log_prob):
                raise RunError(
                    f"generation: the log-prob of token {len(self._tokens[row]) + 1} of response {row} "
                    "is not a number, so the student's weights or activations are broken. The last "
                    "checkpoint is good; a smaller optim.lr or dtype=float32 usually helps."
                )
            self._tokens[row].append(token)
            self._log_probs[row].append(log_prob)
            if token in self._stop or len(self._tokens[row]) == self._budget:
                live.discard(row)
        self.live = [row for row in self.live if row in live]
        return len(self.live) < before

    def completions(self) -> list[Completion]:
        return [
            Completion(
                tuple(tokens), tuple(log_probs), "stop" if tokens and tokens[-1] in self._stop else "length"
            )
            for tokens, log_probs in zip(self._tokens, self._log_probs, strict=True)
        ]
