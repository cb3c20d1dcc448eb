"""The rule reward of the embedded task: is the answer, character for character, the expected one?"""

from __future__ import annotations

import unicodedata

from miniverl.rewards.sample import Sample


def final_answer(text: str) -> str:
    """What follows the last </think>, or the whole text if there is none, without surrounding white space.

    >>> final_answer("<think>2+3+0=5</think> 5\\n")
    '5'
    """
    return text.rpartition("</think>")[2].strip()


def exact_match(sample: Sample) -> float:
    """1.0 if the response's final answer equals the sample's answer, else 0.0.

    Both sides are brought to Unicode NFC first, so that é as one or two code points is the same answer;
    nothing else is forgiven (case, digits of other scripts, direction marks).
    """
    texts = (final_answer(sample.response), sample.expected.strip())
    given, expected = (unicodedata.normalize("NFC", text) for text in texts)
    return float(given == expected)
