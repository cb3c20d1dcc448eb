"""Which option did the response choose?"""

from __future__ import annotations

import re

from miniverl.rewards.exact_match import final_answer
from miniverl.rewards.sample import Sample

_SAID = re.compile(
    r"\\boxed\{\s*(?:\\text\s*\{)?\s*\(?([A-Z])\)?\s*\}?\s*\}"
    r"|<answer>\s*\(?([A-Z])\)?[\s.:)]*</answer>"
    r"|(?i:\banswer|\boption|\bchoice)(?i:\s+is)?\s*[:=]?\s*\**\s*\(?([A-Z])\)?(?![A-Za-z'])"
)
_ALONE = re.compile(r"\s*\**\(?([A-Z])\)?(?:[.:)]\s.*|[.:)]?)\**\s*", re.DOTALL)


def chosen(text: str) -> str | None:
    """The letter of the last choice that the final answer states, or None.

    It reads \\boxed{B}, <answer>B</answer>, "the answer is (B)", and a response that is nothing but a letter
    (or begins with one and a mark: `B. because …`).

    >>> chosen("<think>A or B?</think>The answer is **B**."), chosen("C) 12"), chosen("A cat")
    ('B', 'C', None)
    """
    text = final_answer(text)
    said = [next(letter for letter in found.groups() if letter) for found in _SAID.finditer(text)]
    if said:
        return said[-1]
    alone = _ALONE.fullmatch(text)
    return alone[1] if alone else None


def multiple_choice(sample: Sample) -> float:
    """1.0 if the chosen letter is the answer's, else 0.0.

    The answer is a letter A … Z, or a number that counts options from 0 (as data sets with a list of choices
    store it). Raises ValueError for any other answer.
    """
    answer = sample.expected.strip().strip("().").upper()
    if answer.isdecimal() and int(answer) < 26:
        answer = chr(ord("A") + int(answer))
    if not re.fullmatch("[A-Z]", answer):
        raise ValueError(
            f"sample {sample.id}: its answer {sample.answer!r} is no option; use a letter or a number from 0"
        )
    return float(chosen(sample.response) == answer)
