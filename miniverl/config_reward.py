"""The `reward` section of the config: which functions score a response, and what a failed call means.

Names are Literals' plain text here, because this room lies below `rewards`; a test equates BUILT_IN with the
registry's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

BUILT_IN = ("exact_match", "math", "multiple_choice", "regex", "overlong", "code_tests", "reasoning_gym")

OWN_SCORER = {"addition": "exact_match", "files": "exact_match", "reasoning_gym": "reasoning_gym"}
"""data.source → what scores its responses where nothing else is asked for."""


@dataclass(frozen=True, config=_strict)
class RewardFunctionConfig:
    function: str = ""
    """A built-in (docs/rewards.md), or an import path of your own, `package.module:function` or
    `path/to/file.py:function`."""
    weight: float = 1.0
    """The reward is the sum of weight × score over the functions."""
    kwargs: dict[str, object] = field(default_factory=dict)
    """Passed to every call after the sample."""


@dataclass(frozen=True, config=_strict)
class RewardConfig:
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Your name of a function → the function; empty = `eval.scorer` alone."""
    accuracy: str | None = None
    """Which of `functions` says how good a response is (held-out accuracy, filtering by accuracy); None = the
    only one."""
    workers: PositiveInt = 4
    """Processes that score at the same time."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one call; the process of a call that takes longer is killed."""
    on_failure: Literal["mask", "score"] = "mask"
    """A call that raised, hung, died or gave no finite number: `mask` takes the response out of the batch,
    `score` goes on with failure_score."""
    failure_score: float = 0.0
    """What a failed call scores under on_failure=score."""


@dataclass(frozen=True)
class Scheme:
    """The functions of a run, resolved."""

    functions: Mapping[str, RewardFunctionConfig]
    accuracy: str
    """A key of `functions`."""
    held_out: Mapping[str, RewardFunctionConfig]
    """The one function that held-out responses are scored by."""
    implied: bool
    """Nobody named a function: prompts without an answer are not scored, instead of counted as failures."""


def scheme(reward: RewardConfig, scorer: str | None, source: str, max_response_length: int) -> Scheme:
    """The functions that `reward`, `eval.scorer` and `data.source` ask for together.

    max_response_length: tokens. Raises ValueError, naming key and value, for a name that means nothing or is
    ambiguous, and for lengths that `overlong` cannot use.
    """
    for name, f in reward.functions.items():
        _check_function(f"reward.functions.{name}.function", f.function)
        if not name or "/" in name:
            raise ValueError(f"reward.functions has the name {name!r}; names are text without a slash.")
        if f.function == "overlong":
            _check_overlong(f"reward.functions.{name}.kwargs", f.kwargs, max_response_length)
    accuracy = reward.accuracy
    if accuracy is not None and accuracy not in reward.functions:
        raise ValueError(
            f"reward.accuracy={accuracy} is none of reward.functions "
            f"({', '.join(reward.functions) or 'which is empty'})."
        )
    if accuracy is None and len(reward.functions) > 1:
        raise ValueError(
            f"reward.functions has {', '.join(reward.functions)}: say with reward.accuracy=NAME "
            "which of them is accuracy."
        )
    accuracy = accuracy or next(iter(reward.functions), None)
    measure = scorer or accuracy or OWN_SCORER[source]
    if measure not in reward.functions:
        _check_function("eval.scorer", measure, tuple(reward.functions))
    held_out = {measure: reward.functions.get(measure, RewardFunctionConfig(measure))}
    functions = reward.functions or held_out
    return Scheme(functions, accuracy or measure, held_out, implied=not reward.functions)


def _check_overlong(key: str, kwargs: Mapping[str, object], max_response_length: int) -> None:
    limit, buffer = kwargs.get("max_length", max_response_length), kwargs.get("buffer")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{key}.max_length={limit} must be a whole number of tokens above 0.")
    if isinstance(buffer, bool) or not isinstance(buffer, int) or not 0 < buffer <= limit:
        raise ValueError(
            f"{key}.buffer={buffer} must be a whole number of tokens from 1 to max_length="
            f"{limit} (rollout.max_response_length where max_length is not given)."
        )


def _check_function(key: str, function: str, others: tuple[str, ...] = ()) -> None:
    if function not in BUILT_IN and ":" not in function:
        known = ", ".join((*others, *BUILT_IN))
        raise ValueError(
            f"{key}={function} is not known: it is one of {known}, or an import path of your "
            "own, package.module:function or path/to/file.py:function."
        )
