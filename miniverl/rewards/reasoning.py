"""The scores that reasoning-gym itself gives to answers to its problems (`requirements/rewards.txt`).

Several of its tasks evaluate an answer as Python, so it scores in a process that is shut in.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from miniverl.extras import missing
from miniverl.rewards.exact_match import final_answer
from miniverl.rewards.sample import Sample
from miniverl.rewards.shut_in import shut_in

if TYPE_CHECKING:
    from types import ModuleType

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def prepare() -> None:
    """Import the task library. Raises ImportError that says what to install."""
    _gym()


def reasoning_gym(sample: Sample) -> float:
    """The task's own score, 0 … 1 (many tasks give partial credit), of the last <answer>…</answer>, or of the
    whole final answer where there is none.

    Raises ValueError for a sample that is no problem of data.source=reasoning_gym.
    """
    match sample.extra:
        case {"task": str(task), "options": dict(options), "seed": int(seed)}:
            dataset: Any = _gym().create_dataset(task, seed=seed, size=1, **options)
        case _:
            raise ValueError(f"sample {sample.id} is no problem of data.source=reasoning_gym")
    text = final_answer(sample.response)
    marked = _ANSWER.findall(text)
    answer = marked[-1].strip() if marked else text
    return shut_in(lambda: dataset.score_answer(answer, entry=dataset[0]))


@cache
def _gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise missing("reasoning_gym", "reasoning-gym") from error
    return reasoning_gym
