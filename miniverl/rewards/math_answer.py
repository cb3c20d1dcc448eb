"""Is a mathematical answer equal to the expected one? The judge is math-verify (`requirements/rewards.txt`).

Its own time limits are off: it would call what it gave up on wrong. Here the pool kills it and says so.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from miniverl.extras import missing
from miniverl.rewards.exact_match import final_answer
from miniverl.rewards.sample import Sample

if TYPE_CHECKING:
    from types import ModuleType


def prepare() -> None:
    """Import the judge. Raises ImportError that says what to install."""
    _judge()


def math(sample: Sample, digits: int = 6) -> float:
    """1.0 if the response's final answer equals the sample's answer, else 0.0.

    digits: decimals that numbers are rounded to before they are compared. The answer may be LaTeX, with or
    without $…$ or \\boxed{…}, or plain (`3/4`). A response in which nothing can be read is wrong; an answer
    in which nothing can be read raises ValueError.
    """
    judge = _judge()
    answer = sample.expected.strip()
    gold = _read(judge, answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"sample {sample.id}: nothing mathematical can be read in its answer {answer!r}")
    text = final_answer(sample.response)
    readings = [text]
    if text.count("\\boxed") > 1:
        readings.append(text[text.rindex("\\boxed") :])  # the judge takes several boxes for one set
    if "\n" not in text and not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")):
        readings.append(f"${text}$")  # such as (1,2), which only counts as mathematics between dollars
    return float(
        any(
            judge.verify(
                gold, _read(judge, r), float_rounding=digits, timeout_seconds=None, raise_on_error=True
            )
            for r in readings
        )
    )


def _read(judge: ModuleType, text: str) -> list[Any]:
    return judge.parse(text, parsing_timeout=None, raise_on_error=True)


@cache
def _judge() -> ModuleType:
    try:
        import math_verify
    except ImportError as error:
        raise missing("math", "math-verify") from error
    for part in ("math_verify.parser", "math_verify.grader"):  # they warn of the limits that are off
        logging.getLogger(part).setLevel(logging.ERROR)
    return math_verify
