"""Do teacher and student speak the same language? Token ids, rendered prompts and stop ids, before a run.

It compares tokenizers; the models' own vocabulary widths are the business of `miniverl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from miniverl.config import ConfigError
from miniverl.data.messages import MalformedRow
from miniverl.data.template import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = "What is 436+9? The quick brown fox; def f(x):\n    return x\n\nCafé 世界 🙂"
_PROBES = (
    _TEXT,
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"},
     {"role": "user", "content": _TEXT}],
)
_SHOWN = 3  # differing tokens that a message names


def stop_ids(tokenizer: PreTrainedTokenizerBase,
             generation_config_eos: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """The ids that end a response, ascending: the tokenizer's end of text and the generation config's."""
    more = generation_config_eos if isinstance(generation_config_eos, Sequence) else [generation_config_eos]
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({int(i) for i in (own, *more) if i is not None}))


def check_tokenizers(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    student_stop_ids: Sequence[int],
    teacher_stop_ids: Sequence[int],
    mismatch: Literal["refuse", "allow"] = "refuse",
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[str, ...]:
    """Refuse a teacher that would read the student's ids as something else (ConfigError).

    Always refused: a token that has another id, or an id that means another token (ids or tokens that only
    one of them has are fine: the loss takes the common vocabulary). Refused unless mismatch="allow": prompts
    that render to other ids, other stop ids. Returns the differences that `allow` waived, as sentences for
    the record.
    """
    check_vocabulary("teacher", student, teacher)
    waived = [*_stop_difference(student_stop_ids, teacher_stop_ids),
              *_prompt_difference(student, teacher, template_kwargs)]
    if waived and mismatch == "refuse":
        raise ConfigError(f"model.teacher does not fit model.student: {'; '.join(waived)}. Use a teacher of "
                          "the same family and kind (both base or both chat models; see "
                          "data.chat_template_kwargs and rollout.stop_ids), or accept it with "
                          "model.tokenizer_mismatch=allow.")
    return tuple(waived)


def check_vocabulary(
    role: str, student: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> None:
    """Refuse a `model.<role>` that reads the student's ids as other tokens (ConfigError)."""
    ours, theirs = student.get_vocab(), other.get_vocab()
    by_id = {i: token for token, i in theirs.items()}
    differing = []
    for token, i in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token, i) != i:
            differing.append(f"{token!r} is {i} for the student, {theirs[token]} for the {role}")
        elif by_id.get(i, token) != token:
            differing.append(f"id {i} is {token!r} for the student, {by_id[i]!r} for the {role}")
    if differing:
        raise ConfigError(f"model.{role} has another vocabulary than model.student ({len(differing)} tokens "
                          f"differ; {'; '.join(differing[:_SHOWN])}): it is given the student's token ids, "
                          "and model.tokenizer_mismatch=allow does not waive it. Use a model of the "
                          "student's family.")
    if not ours.keys() & theirs.keys():
        raise ConfigError(f"model.{role} shares no token with model.student. Use a model of the student's "
                          "family.")


def _stop_difference(student: Sequence[int], teacher: Sequence[int]) -> list[str]:
    if set(student) == set(teacher):
        return []
    return [f"the student stops at ids {sorted(set(student))}, the teacher at {sorted(set(teacher))}"]


def _prompt_difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase,
                       template_kwargs: Mapping[str, object] | None) -> list[str]:
    """The first probe that renders differently. A probe that both refuse says nothing."""
    for probe in _PROBES:
        ours, theirs = (_ids(tokenizer, probe, template_kwargs) for tokenizer in (student, teacher))
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            who = "student" if theirs is None else "teacher"
            return [f"only the {who}'s chat template takes a conversation"]
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                  min(len(ours), len(theirs)))
        a, b = (tokenizer.convert_ids_to_tokens(list(ids[at : at + 3]))
                for tokenizer, ids in ((student, ours), (teacher, theirs)))
        return [f"the same prompt renders to {len(ours)} tokens for the student and {len(theirs)} for the "
                f"teacher (from token {at} on {a} and {b})"]
    return []


def _ids(tokenizer: PreTrainedTokenizerBase, probe: object,
         template_kwargs: Mapping[str, object] | None) -> tuple[int, ...] | None:
    try:
        return render_prompt(tokenizer, probe, template_kwargs=template_kwargs)
    except MalformedRow:
        return None
