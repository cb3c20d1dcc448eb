"""Which prompt comes when: an infinite training stream, whose whole state is one integer, and held-out ones.

What a prompt looks like is decided in `addition`, `files` and `template`; this module orders them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from miniverl.config import AdditionConfig, Config, ConfigError
from miniverl.data import addition, files, reasoning
from miniverl.data.packing import pack_texts
from miniverl.data.preflight import stop_ids as stop_ids_of
from miniverl.data.template import render_prompt, render_response
from miniverl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_SEED = 0
"""Held-out problems do not depend on trainer.seed, so that all runs are measured on the same ones."""


class PromptSource(Protocol):
    """Prompts by position, as a pure function: the same position gives the same prompt in every process."""

    fingerprint: str
    """Changes whenever any position would give another prompt."""

    def at(self, position: int) -> Prompt: ...

    def among(self, positions: int) -> Iterable[Prompt]:
        """Each prompt that occurs at the first so many positions, in an order without chance where all do."""
        ...


class PromptStream:
    """An infinite sequence of prompts; saving `position` and calling `seek` resumes it exactly.

    Epochs follow one another inside a batch, so no remainder is ever dropped.
    """

    def __init__(self, source: PromptSource, position: int = 0) -> None:
        self._source = source
        self._position = 0
        self.seek(position)

    @property
    def position(self) -> int:
        """Prompts consumed so far."""
        return self._position

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what comes and in which order: under another one a position is meaningless."""
        return self._source.fingerprint

    def seek(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"position {position} of a prompt stream is negative")
        self._position = position

    def among(self, positions: int) -> Iterable[Prompt]:
        """Each prompt that occurs among the first so many, wherever the stream stands."""
        return self._source.among(positions)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        prompts = [self._source.at(self._position + i) for i in range(n)]
        self._position += n
        return prompts


@dataclass(frozen=True, slots=True)
class Data:
    train: PromptStream
    held_out: tuple[Prompt, ...]
    notes: tuple[str, ...]
    """Sentences for the console: what was left out, cut or found odd."""


class FilePrompts:
    """Prompts of files, each epoch in an order of its own: a function of (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        self._prompts = tuple(prompts)
        count = len(self._prompts)
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(count, seed, epoch, shuffle))
        # What only some algorithms read is left out where there is none: checkpoints outlive new fields.
        identity = [[p.uid, p.token_ids, p.text, p.answer, p.reference_ids, p.reference_mask,
                     *(x for x in (p.rejected_ids, p.rejected_mask, p.desirable, p.documents or None)
                       if x is not None)]
                    for p in self._prompts]
        self.fingerprint = _digest(["files/1", seed, shuffle, identity])

    def at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        prompt = self._prompts[self._order(epoch)[offset]]
        return replace(prompt, uid=f"{prompt.uid}#{epoch}")

    def among(self, positions: int) -> Iterable[Prompt]:
        if positions >= len(self._prompts):
            return self._prompts
        return (self.at(position) for position in range(positions))


class AdditionPrompts:
    """Training problems of the embedded task: fresh ones for ever, or `distinct` ones again and again.

    They are drawn at random already, so `data.shuffle` has nothing to do here.
    """

    def __init__(self, task: AdditionConfig, seed: int, renderer: AdditionRenderer) -> None:
        self._task, self._seed, self._renderer = task, seed, renderer
        self._per_row = renderer.documents_per_row
        self._problems = None if task.distinct is None else addition.distinct(
            seed, "train", task.digits, task.distinct, "data.addition.distinct")
        self.fingerprint = _digest(["addition/1", seed, task.digits, task.forget_carry, task.distinct,
                                    renderer.prompt("", addition.Problem(12, 9), forget=False).token_ids,
                                    *renderer.marks])

    def at(self, position: int) -> Prompt:
        if not self._per_row:
            return self._one(position)
        texts = [self._one(position * self._per_row + i) for i in range(self._per_row)]
        documents = tuple(document for text in texts for document in text.documents)
        return Prompt(f"train/row{position}#0", (), "", documents=documents)

    def among(self, positions: int) -> Iterable[Prompt]:
        different = positions if self._problems is None else len(self._problems)
        return (self.at(position) for position in range(min(positions, different)))

    def _one(self, position: int) -> Prompt:
        if self._problems is None:
            epoch, index = 0, position
            problem = addition.draw(self._seed, "train", index, self._task.digits)
        else:
            epoch, index = divmod(position, len(self._problems))
            problem = self._problems[index]
        forget = addition.forgets_carry(self._seed, index, self._task.forget_carry)
        return self._renderer.prompt(f"train/{index}#{epoch}", problem, forget)


@dataclass(frozen=True, slots=True)
class AdditionRenderer:
    """Problems → prompts, with their demonstration as the reference response."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    config: Config

    @property
    def marks(self) -> list[str]:
        """What sets these prompts apart from those of the same problems for other algorithms."""
        rows = self.config.algo.rows
        return [] if rows in ("prompts", "responses") else [rows, str(self.documents_per_row)]

    @property
    def documents_per_row(self) -> int:
        """How many of the longest texts fit a packed row; 0 where no texts are trained on.

        Raises ConfigError if none fits.
        """
        if self.config.algo.rows != "texts":
            return 0
        data = self.config.data
        longest = 10 ** data.addition.digits[1] - 1
        (document,) = self.prompt("", addition.Problem(longest, longest), forget=False).documents
        if len(document) > data.row_tokens:
            raise ConfigError(f"data.row_tokens={data.row_tokens}: the longest text, {longest}+{longest}= "
                              f"with its demonstration, has {len(document)} tokens; set it to that or more.")
        return data.row_tokens // len(document)

    def prompt(self, uid: str, problem: addition.Problem, forget: bool) -> Prompt:
        text, kwargs = addition.prompt_text(problem), self.config.data.chat_template_kwargs
        token_ids = render_prompt(self.tokenizer, text, template_kwargs=kwargs)
        prompt = Prompt(uid, token_ids, text, problem.answer)
        rows = self.config.algo.rows
        if rows == "prompts":
            return prompt  # nobody reads a demonstration
        ids, mask = self._response(text, addition.demonstration(problem, forget))
        if rows == "texts":
            return replace(prompt, documents=(token_ids + ids,))
        if rows == "pairs":
            bad, bad_mask = self._response(text, addition.mistaken(problem))
            return replace(prompt, reference_ids=ids, reference_mask=mask, rejected_ids=bad,
                           rejected_mask=bad_mask)
        if rows == "labels" and addition.is_labelled_bad(problem):
            bad, bad_mask = self._response(text, addition.mistaken(problem))
            return replace(prompt, reference_ids=bad, reference_mask=bad_mask, desirable=False)
        return replace(prompt, reference_ids=ids, reference_mask=mask,
                       desirable=True if rows == "labels" else None)

    def _response(self, text: str, response: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return render_response(self.tokenizer, text, response, self.stop_ids, None,
                               self.config.data.chat_template_kwargs)


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The rows of one epoch in their order, from a counter-based generator keyed by (seed, epoch)."""
    if not shuffle:
        return np.arange(count)
    key = np.random.SeedSequence([abs(seed), int(seed < 0), epoch])
    return np.random.Generator(np.random.Philox(key)).permutation(count)


def open_data(config: Config, tokenizer: PreTrainedTokenizerBase, quarantine_path: Path | None,
              stop_ids: Sequence[int] = ()) -> Data:
    """The training stream and the held-out prompts of a config.

    stop_ids: what ends a reference response; none = the tokenizer's end-of-text id and rollout.stop_ids.
    Raises ConfigError for whatever in the data contradicts the config.
    """
    stop_ids = stop_ids or stop_ids_of(tokenizer, config.rollout.stop_ids)
    if config.data.source == "addition":
        return _open_addition(config, AdditionRenderer(tokenizer, tuple(stop_ids), config))
    if config.data.source == "reasoning_gym":
        source = reasoning.ReasoningPrompts(config, tokenizer)
        return Data(PromptStream(source), source.held_out, ())
    return _open_files(config, tokenizer, stop_ids, quarantine_path)


def _open_addition(config: Config, renderer: AdditionRenderer) -> Data:
    task, limit = config.data.addition, config.data.max_prompt_length
    longest = 10 ** task.digits[1] - 1
    measured = len(renderer.prompt("", addition.Problem(longest, longest), forget=False).token_ids)
    if measured > limit:
        raise ConfigError(f"data.max_prompt_length={limit}: the longest problem, {longest}+{longest}=, "
                          f"measures {measured} tokens after templating; set it to {measured} or more.")
    if config.eval.size > task.test_size:
        raise ConfigError(f"eval.size={config.eval.size} is more than "
                          f"data.addition.test_size={task.test_size}; lower the one or raise the other.")
    problems = addition.distinct(HELD_OUT_SEED, task.held_out, task.digits, task.test_size,
                                 "data.addition.test_size")
    held_out = tuple(renderer.prompt(f"{task.held_out}/{i}#0", problem, forget=False)
                     for i, problem in enumerate(problems[: config.eval.size]))
    return Data(PromptStream(AdditionPrompts(task, config.trainer.seed, renderer)), held_out, ())


def _open_files(config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int],
                quarantine_path: Path | None) -> Data:
    data = config.data
    train = files.load("data.train_files", "train", data, tokenizer, stop_ids, config.algo.rows)
    test = files.Loaded((), (), ())
    if data.eval_files:
        test = files.load("data.eval_files", "test", data, tokenizer, stop_ids)
    notes = [*files.settle_bad_rows([*train.bad, *test.bad], data.malformed_rows, quarantine_path),
             *train.notes, *test.notes]
    for key, loaded, wanted in (("train", train, True), ("eval", test, bool(data.eval_files))):
        if wanted and not loaded.prompts:
            raise ConfigError(f"data.{key}_files: all {len(loaded.bad)} rows are malformed, none is left"
                              + (f"; {quarantine_path} says why." if quarantine_path else "."))
    held_out = tuple(replace(p, uid=f"{p.uid}#0") for p in test.prompts[: config.eval.size])
    if data.eval_files and len(held_out) < config.eval.size:
        notes.append(f"data.eval_files hold {len(held_out)} prompts, fewer than eval.size={config.eval.size}")
    trained = {p.token_ids for p in train.prompts}
    if shared := sum(p.token_ids in trained for p in held_out):
        notes.append(f"{shared} of {len(held_out)} held-out prompts also occur in data.train_files: accuracy "
                     "on them shows memory, not skill")
    rows = train.prompts
    if config.algo.rows == "texts":
        rows = pack_texts(train.prompts, data.row_tokens)
        notes.append(f"{len(train.prompts)} texts were packed into {len(rows)} rows of at most "
                     f"{data.row_tokens} tokens")
    source = FilePrompts(rows, config.trainer.seed, data.shuffle)
    return Data(PromptStream(source), held_out, tuple(notes))


def _digest(identity: object) -> str:
    return sha256(json.dumps(identity, ensure_ascii=True).encode()).hexdigest()
