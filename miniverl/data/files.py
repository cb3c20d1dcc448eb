"""Parquet and JSONL files → prompts: which files, rows and columns, and the one place that limits length.

Rows keep the order of the files. In what order they are trained is `miniverl.data.prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow
import pyarrow.parquet

from miniverl.config import ConfigError, DataConfig
from miniverl.data.messages import MalformedRow, content_text, to_messages
from miniverl.data.template import render_prompt, render_response
from miniverl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "left", "right", "middle", "filter"]
SUFFIXES = (".parquet", ".jsonl")
_NAMED = 10  # bad rows spelt out in one message


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read. `problem` says why it could not even be read (then it has no values)."""

    file: str
    index: int
    """Counts from 0 within the file: a row of parquet, a line of JSONL (blank ones are counted)."""
    values: Mapping[str, object]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    file: str
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The prompts of some files. Their uid is `<part>/<row>`, counting all rows of all files."""

    prompts: tuple[Prompt, ...]
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...]


def expand(key: str, paths: str | Sequence[str]) -> tuple[Path, ...]:
    """The files that `paths` mean: each entry a file, a directory (its *.parquet and *.jsonl) or a glob.

    Entries keep their order; what a directory or glob yields is sorted by path. Raises ConfigError, naming
    `key`, for an entry that matches nothing, a file of another type, or a file that is reached twice.
    """
    files: dict[Path, Path] = {}
    for entry in [paths] if isinstance(paths, str) else paths:
        for file in _expand_one(key, str(entry)):
            real = file.resolve()
            if real in files:
                raise ConfigError(f"{key}: {file} is listed twice (by {entry!r} and before it, as "
                                  f"{files[real]}); remove one, or its rows would count double.")
            files[real] = file
    if not files:
        raise ConfigError(f"{key} is empty; name at least one parquet or jsonl file.")
    return tuple(files.values())


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of one file, in order. A broken line is a Row with a `problem`, a broken file an error."""
    return _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)


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


def fit_length(token_ids: tuple[int, ...], limit: int, mode: Overlong) -> tuple[int, ...] | None:
    """At most `limit` ids, or None where the mode leaves the prompt out.

    `left` drops from the left, `right` from the right, `middle` keeps both ends.

    >>> fit_length((1, 2, 3, 4, 5), 3, "left"), fit_length((1, 2, 3, 4, 5), 3, "middle")
    ((3, 4, 5), (1, 4, 5))
    """
    excess = len(token_ids) - limit
    if excess <= 0:
        return token_ids
    if mode == "left":
        return token_ids[excess:]
    if mode == "right":
        return token_ids[:limit]
    if mode == "middle":
        return token_ids[: limit // 2] + token_ids[limit // 2 + excess :]
    return None


def load(key: str, part: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase,
         stop_ids: Sequence[int]) -> Loaded:
    """All prompts of `key` (data.train_files or data.eval_files), tokenized and within the length limit.

    Raises ConfigError for overlong prompts under `overlong_prompts=error`, for a column that a file does not
    have, and if no prompt is left. Malformed rows are returned, not raised: the caller knows the policy.
    """
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    overlong: list[str] = []
    count = 0
    for file in expand(key, data.train_files if part == "train" else data.eval_files):
        rows = list(read_rows(file))
        _check_columns(file, rows, part, data)
        for row in rows:
            try:
                prompt = _to_prompt(row, f"{part}/{count}", part, data, tokenizer, stop_ids)
            except MalformedRow as e:
                bad.append(BadRow(row.file, row.index, str(e)))
            else:
                fitting = fit_length(prompt.token_ids, data.max_prompt_length, data.overlong_prompts)
                if fitting != prompt.token_ids:
                    overlong.append(f"{row.file} row {row.index} ({len(prompt.token_ids)} tokens)")
                if fitting is not None:
                    prompts.append(replace(prompt, token_ids=fitting))
            count += 1
    if overlong and data.overlong_prompts == "error":
        raise ConfigError(f"data.max_prompt_length={data.max_prompt_length}: {_listed(overlong)} of {key} "
                          "measured after templating, too long. Raise the limit, or set "
                          "data.overlong_prompts to left, right, middle (cut) or filter (leave out).")
    if not prompts and not bad:
        paths = data.train_files if part == "train" else data.eval_files
        raise ConfigError(f"{key}: no prompt is left of {count} rows in {paths}"
                          + (f" ({len(overlong)} are over data.max_prompt_length={data.max_prompt_length})."
                             if overlong else "."))
    return Loaded(tuple(prompts), tuple(bad), _overlong_note(len(overlong), count, key, data))


def settle_bad_rows(bad: Sequence[BadRow], policy: Literal["error", "quarantine"],
                    quarantine: Path | None) -> tuple[str, ...]:
    """Raise for malformed rows, or list them in `quarantine`, one JSON object each, and return a note."""
    if not bad:
        return ()
    if policy == "error" or quarantine is None:
        named = _listed([f"{b.file} row {b.row}: {b.reason}" for b in bad], between="; ")
        raise ConfigError(f"data.malformed_rows={policy}: {len(bad)} rows cannot be used: {named}. Mend "
                          "them, or set data.malformed_rows=quarantine to list them in the run directory and "
                          "go on without them.")
    quarantine.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"file": b.file, "row": b.row, "reason": b.reason}, ensure_ascii=False) for b in bad)
    quarantine.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return (f"{len(bad)} malformed rows were left out; they are listed in {quarantine}",)


def _expand_one(key: str, entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{key}: {entry} is not a .parquet or .jsonl file; convert it to one of them.")
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file() and p.name[0] != ".")
        if not found:
            raise ConfigError(f"{key}: the directory {entry} holds no *.parquet or *.jsonl file.")
        return found
    if has_magic(entry):
        matches = map(Path, glob(str(path), recursive=True))
        found = sorted(p for p in matches if p.suffix in SUFFIXES and p.is_file())
        if not found:
            raise ConfigError(f"{key}: no *.parquet or *.jsonl file matches {entry}.")
        return found
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    hint = f" Did you mean {path.parent / near[0]}?" if near else ""
    raise ConfigError(f"{key}: {entry} does not exist (seen from {Path.cwd()}).{hint}")


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        # The physical Arrow schema only: metadata of other libraries may name types that nobody here knows.
        with pyarrow.parquet.ParquetFile(file) as reader:
            index = 0
            for group in range(reader.num_row_groups):
                for values in reader.read_row_group(group).to_pylist():
                    yield Row(str(file), index, values)
                    index += 1
    except (pyarrow.ArrowException, OSError) as e:
        raise ConfigError(f"{file} cannot be read as parquet: {e}") from e


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:  # bytes, so that the locale's encoding plays no part
        for i, line in enumerate(lines):
            line = line.removeprefix(b"\xef\xbb\xbf") if i == 0 else line
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
                yield Row(str(file), i, {}, f"it is not JSON in UTF-8 ({e})")
                continue
            if isinstance(values, dict):
                yield Row(str(file), i, values)
            else:
                yield Row(str(file), i, {}, f"it is a JSON {type(values).__name__}, not an object")


def _needed_keys(part: str, data: DataConfig) -> dict[str, str]:
    """Setting → column, for the columns that files of this part must have."""
    keys = {"data.prompt_key": data.prompt_key}
    if part == "train" and data.response_key is not None:
        keys["data.response_key"] = data.response_key
    if part != "train" and data.answer_key is not None:
        keys["data.answer_key"] = data.answer_key
    if data.tools_key is not None:
        keys["data.tools_key"] = data.tools_key
    return {**keys, **{f"data.extra_keys[{i}]": key for i, key in enumerate(data.extra_keys)}}


def _check_columns(file: Path, rows: list[Row], part: str, data: DataConfig) -> None:
    """A column that no row has is a wrong setting, not as many malformed rows."""
    readable = [row for row in rows if row.problem is None]
    columns = sorted({column for row in readable for column in row.values})
    for setting, key in _needed_keys(part, data).items():
        if readable and all(_absent(row.values, key) for row in readable):
            near = get_close_matches(key, columns, 1)
            raise ConfigError(f"{setting}={key}: {file} has no such column. It has {', '.join(columns)}."
                              + (f" Did you mean {near[0]}?" if near else ""))


def _absent(values: Mapping[str, object], key: str) -> bool:
    try:
        lookup(values, key)
    except KeyError:
        return True
    return False


def _cell(row: Row, key: str | None) -> object:
    return None if key is None or _absent(row.values, key) else lookup(row.values, key)


def _to_prompt(row: Row, uid: str, part: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase,
               stop_ids: Sequence[int]) -> Prompt:
    if row.problem is not None:
        raise MalformedRow(row.problem)
    prompt, tools = _cell(row, data.prompt_key), _cell(row, data.tools_key)
    with _in_column(data.prompt_key):
        token_ids = render_prompt(tokenizer, prompt, tools, data.chat_template_kwargs)
        messages = to_messages(prompt)
    text = content_text(messages[0])
    if len(messages) > 1:
        text = "\n".join(f"{m['role']}: {content_text(m)}" for m in messages)
    answer, reference_ids, reference_mask = None, None, None
    if data.answer_key is not None:
        with _in_column(data.answer_key):
            answer = _answer(_cell(row, data.answer_key), required=part != "train")
    if part == "train" and data.response_key is not None:
        with _in_column(data.response_key):
            reference_ids, reference_mask = render_response(
                tokenizer, prompt, _cell(row, data.response_key), stop_ids, tools, data.chat_template_kwargs)
    extra = {key: _cell(row, key) for key in data.extra_keys}
    return Prompt(uid, token_ids, text, answer, reference_ids, reference_mask, extra)


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


def _overlong_note(overlong: int, count: int, key: str, data: DataConfig) -> tuple[str, ...]:
    if not overlong:
        return ()
    done = "left out" if data.overlong_prompts == "filter" else f"cut to it ({data.overlong_prompts})"
    return (f"{overlong} of {count} prompts of {key} over {data.max_prompt_length} tokens were {done}",)


def _listed(items: Sequence[str], between: str = ", ") -> str:
    more = len(items) - _NAMED
    return between.join(items[:_NAMED]) + (f"{between}and {more} more" if more > 0 else "")
