"""What a rollout engine is: token ids in, token ids with log-probs out.

An engine knows nothing of prompts' text, rewards or training; the Rollout worker turns Prompts into Requests
and Completions into Rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from miniverl.types import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw. Every field reaches the draw; there are no hidden defaults of a library behind it."""

    temperature: float
    """0 = greedy."""
    top_k: int
    """0 = no filter."""
    top_p: float
    """1 = no filter."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """Any of them ends the response and is its last token."""
    seed: int

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the indices of the samples wanted of it; noise hangs on (uid, sample index)."""

    uid: str
    token_ids: tuple[int, ...]
    samples: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Under the distribution actually drawn from: temperature applied, filters applied and renormalised.
    Greedy draws from a point mass, so its log-probs are 0."""
    finish: FinishReason


class Engine(Protocol):
    name: str
    seeded: bool
    """Whether a sample is a function of (seed, prompt uid, sample index, position) alone."""
    notes: tuple[str, ...]
    """What a user should know of how it runs here, e.g. a fast path that this model cannot take."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list of completions per request, in the order of the requests and of their samples."""
        ...
