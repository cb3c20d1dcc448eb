"""What a reward function is given, and what comes back of it: plain data, because it crosses processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to score. Every call gets a copy of its own, so what a function does to `extra` is seen by
    no other.

    >>> Sample(id="train/7#0/2", prompt="1+2=", response="3", answer="3").expected
    '3'
    """

    id: str
    """`<prompt uid>/<sample>`: what errors and logs call it."""
    prompt: str
    response: str
    """The whole response, decoded at once, without its stop token."""
    answer: str | None = None
    """The data's ground truth; None where it has none."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """The columns of `data.extra_keys`."""
    response_tokens: int = 0
    """The stop token included."""
    max_response_tokens: int = 0
    """The token budget it was written under."""
    truncated: bool = False
    """The budget ran out before a stop token."""

    @property
    def expected(self) -> str:
        """The answer. Raises ValueError where there is none: a missing answer is no wrong response."""
        if self.answer is None:
            raise ValueError(f"sample {self.id} has no answer to compare with (data.answer_key)")
        return self.answer

    def plain(self) -> dict[str, Any]:
        """The fields by name, as Sample takes them."""
        return {
            "id": self.id,
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "extra": dict(self.extra),
            "response_tokens": self.response_tokens,
            "max_response_tokens": self.max_response_tokens,
            "truncated": self.truncated,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one function says of one sample: a finite score, or why there is none.

    >>> Verdict(0.0).failed, Verdict(None, failure="timeout: no verdict within 10 s").failed
    (False, True)
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the function returned beside its score; logged, not learned from."""
    failure: str | None = None
    """`KIND: what happened`; kinds: exception, timeout, died, none, type, not finite, input."""

    @property
    def failed(self) -> bool:
        return self.score is None
