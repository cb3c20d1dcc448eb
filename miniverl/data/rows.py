"""One row of a data file → one Prompt: which columns it must have, and what their cells mean.

Which files and rows there are, and what becomes of a malformed one, is `miniverl.data.files`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from miniverl.config_data import DataConfig
from miniverl.config_supervised import Rows
from miniverl.data.messages import MalformedRow, content_text, to_messages
from miniverl.data.template import render_prompt, render_response, render_text
from miniverl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Wanted = Rows | Literal["answers"]
"""What is read of a row besides its prompt; `answers` is for held-out rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read. `problem` says why it could not even be read (then it has no values)."""

    file: str
    index: int
    """Counts from 0 within the file: a row of parquet, a line of JSONL (blank ones are counted)."""
    values: Mapping[str, object]
    problem: str | None = None


def lookup(values: Mapping[str, object], key: str) -> object:
    """The column `key`, or, if none has that name, what its dots reach in structs. KeyError if nothing."""
    if key in values:
        return values[key]
    here: object = values
    for step in key.split("."):
        if not isinstance(here, Mapping) or step not in here:
            raise KeyError(key)
        here = here[step]
    return here


def needed_keys(wanted: Wanted, data: DataConfig) -> dict[str, str]:
    """Setting → column, for the columns that files must have."""
    if wanted == "texts":
        return {"data.text_key": data.text_key}
    keys: dict[str, str | None] = {"data.prompt_key": data.prompt_key, "data.tools_key": data.tools_key}
    if wanted == "answers":
        keys["data.answer_key"] = data.answer_key
    elif wanted == "pairs":
        keys |= {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    else:
        keys["data.response_key"] = data.response_key
    if wanted == "labels":
        keys["data.label_key"] = data.label_key
    keys |= {f"data.extra_keys[{i}]": key for i, key in enumerate(data.extra_keys)}
    return {setting: key for setting, key in keys.items() if key is not None}


def to_prompt(row: Row, uid: str, wanted: Wanted, data: DataConfig, tokenizer: PreTrainedTokenizerBase,
              stop_ids: Sequence[int]) -> Prompt:
    """The row as a Prompt, token ids not yet limited in number. Raises MalformedRow, naming the column."""
    if row.problem is not None:
        raise MalformedRow(row.problem)
    if wanted == "texts":
        with _in_column(data.text_key):
            ids = render_text(tokenizer, _cell(row, data.text_key), stop_ids)
        return Prompt(uid, (), "", documents=(ids,))
    shown, tools = _cell(row, data.prompt_key), _cell(row, data.tools_key)
    with _in_column(data.prompt_key):
        token_ids = render_prompt(tokenizer, shown, tools, data.chat_template_kwargs)
        messages = to_messages(shown)
    text = content_text(messages[0])
    if len(messages) > 1:
        text = "\n".join(f"{m['role']}: {content_text(m)}" for m in messages)
    prompt = Prompt(uid, token_ids, text, extra={key: _cell(row, key) for key in data.extra_keys})
    if data.answer_key is not None:
        with _in_column(data.answer_key):
            answer = _answer(_cell(row, data.answer_key), required=wanted == "answers")
            prompt = replace(prompt, answer=answer)

    def response(key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with _in_column(key):
            return render_response(
                tokenizer, shown, _cell(row, key), stop_ids, tools, data.chat_template_kwargs
            )

    if wanted == "pairs":
        (good, good_mask), (bad, bad_mask) = response(data.chosen_key), response(data.rejected_key)
        if good == bad:
            raise MalformedRow(f"columns {data.chosen_key} and {data.rejected_key} hold the same response, "
                               "which prefers nothing")
        return replace(prompt, reference_ids=good, reference_mask=good_mask, rejected_ids=bad,
                       rejected_mask=bad_mask)
    if wanted != "answers" and data.response_key is not None:
        ids, mask = response(data.response_key)
        prompt = replace(prompt, reference_ids=ids, reference_mask=mask)
    if wanted == "labels":
        with _in_column(data.label_key):
            prompt = replace(prompt, desirable=_label(_cell(row, data.label_key)))
    return prompt


def absent(values: Mapping[str, object], key: str) -> bool:
    try:
        lookup(values, key)
    except KeyError:
        return True
    return False


def _cell(row: Row, key: str | None) -> object:
    return None if key is None or absent(row.values, key) else lookup(row.values, key)


@contextmanager
def _in_column(key: str) -> Iterator[None]:
    try:
        yield
    except MalformedRow as e:
        raise MalformedRow(f"column {key}: {e}") from e


def _answer(value: object, required: bool) -> str | None:
    if value is None and not required:
        return None
    if value is None:
        raise MalformedRow("it is empty (null)")
    if not isinstance(value, (str, int, float)):
        raise MalformedRow(f"it is of type {type(value).__name__}, not a string or a number")
    return str(value)


def _label(value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise MalformedRow(f"{value!r} is no label: it must be true or false, or 1 or 0")
