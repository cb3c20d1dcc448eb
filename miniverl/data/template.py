"""Conversations → token ids and masks: the only place that applies a chat template.

The template alone decides about BOS. Which rows are read, and how long they may be, is `miniverl.data.files`.
A *turn* is what the model writes in one assistant message, from the first token it must produce up to and
including the stop id; headers, and boilerplate that the template puts between header and content, are not
part of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from miniverl.config import ConfigError
from miniverl.data.messages import MalformedRow, Message, content_text, to_messages, to_plain, to_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Start and end of a piece of text, in characters."""

_PROBE = "probe7f3a"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_PREFIX = (
    "the chat template renders its response in a way that does not begin with the prompt as the model sees "
    "it (thinking switched off for a response that has some?); other data.chat_template_kwargs may help"
)
_RESERVED = frozenset((
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
))


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: object,
    tools: object = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[int, ...]:
    """The ids a model is given: the conversation (see `to_messages`) and the header of its own turn.

    A tokenizer without a chat template takes one user message only, as plain text, with the BOS that the
    tokenizer itself would add. Raises MalformedRow for a conversation that cannot be rendered.
    """
    messages = to_messages(prompt)
    if messages[-1]["role"] == "assistant":
        raise MalformedRow("its conversation ends with an assistant message, which leaves nothing to write; "
                           "put that message in the column of data.response_key")
    if tokenizer.chat_template is None:
        ids = _plain_ids(tokenizer, messages, tools)
    else:
        ids = _encode(tokenizer, _render(tokenizer, messages, tools, template_kwargs, True))
    if not ids:
        raise MalformedRow("it renders to no tokens")
    return tuple(ids)


def render_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: object,
    response: object,
    stop_ids: Sequence[int],
    tools: object = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids, mask) of a reference response: what follows `render_prompt`'s ids, stop id included.

    mask is 1 on what the model must write, 0 on the template's boilerplate and on other roles' messages.
    `response` is a string, or a list of messages that ends with the assistant's. Raises MalformedRow.
    """
    messages, answer = to_messages(prompt), to_messages(response, role="assistant")
    if answer[-1]["role"] != "assistant":
        raise MalformedRow("its response does not end with an assistant message")
    if tokenizer.chat_template is None:
        return _plain_response(tokenizer, answer, stop_ids)
    before = _render(tokenizer, messages, tools, template_kwargs, add_generation_prompt=True)
    text, turns = _turns(tokenizer, messages + answer, stop_ids, tools, template_kwargs, first=len(messages))
    if not text.startswith(before):
        raise MalformedRow(_NO_PREFIX)
    text, start = text[: turns[-1][1]], len(before)
    turns = [(max(start, a), b) for a, b in turns]  # the header may open the turn itself, e.g. with <think>
    pieces = _cut(tokenizer, text, start, turns)
    if pieces[0][0] != _encode(tokenizer, before):  # its last token differs in context: encode it alone
        pieces = _cut(tokenizer, text, start, turns, separately=True)
    ids, mask = _join(pieces[1:])
    return tuple(ids), tuple(mask)


def render_text(
    tokenizer: PreTrainedTokenizerBase, text: object, stop_ids: Sequence[int]
) -> tuple[int, ...]:
    """The ids of a raw text: the BOS that the tokenizer itself would add, the text, an end-of-text id.

    Raises MalformedRow for what is no string or leaves nothing to predict.
    """
    if text is None:
        raise MalformedRow("it is empty (null)")
    if not isinstance(text, str):
        raise MalformedRow(f"it is of type {type(text).__name__}, not a string")
    ids = (*_with_bos(tokenizer, _encode(tokenizer, text)), _end(tokenizer, stop_ids, "text"))
    if not text:
        raise MalformedRow("it is an empty text")
    return ids


def assistant_mask(
    tokenizer: PreTrainedTokenizerBase,
    messages: object,
    stop_ids: Sequence[int],
    tools: object = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids, mask) of a whole conversation; mask is 1 on every assistant turn, stop id included.

    Turns are found by rendering the same conversation with a probe in place of each assistant message. Where
    the template has generation markers, only what they enclose is trained (and the stop id that ends it).
    Raises MalformedRow if nothing or everything would be trained, or if the template alters a message.
    """
    text, turns = _turns(tokenizer, to_messages(messages), stop_ids, tools, template_kwargs, first=0)
    ids, mask = _join(_cut(tokenizer, text, None, turns))
    if sum(mask) in (0, len(mask)):
        raise MalformedRow(f"{sum(mask)} of its {len(mask)} tokens would be trained: the chat template "
                           "leaves no way to tell the assistant's words from the others'")
    return tuple(ids), tuple(mask)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: object,
            template_kwargs: Mapping[str, object] | None, add_generation_prompt: bool) -> str:
    kwargs, schemas = _variables(template_kwargs), to_tools(tools)
    with _refusals():
        return str(tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False,
                                                 add_generation_prompt=add_generation_prompt, **kwargs))


def _render_marked(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: object,
                   template_kwargs: Mapping[str, object] | None) -> tuple[str, list[Span] | None]:
    """The rendered text and what the template's generation markers enclose (None if it has no markers)."""
    schemas = to_tools(tools)
    template = tokenizer.get_chat_template(None, schemas)
    if not _MARKER.search(template):
        return _render(tokenizer, messages, tools, template_kwargs, False), None
    from transformers.utils.chat_template_utils import render_jinja_template  # heavy: only where needed

    kwargs = {**tokenizer.special_tokens_map, **_variables(template_kwargs)}
    with _refusals():
        texts, spans = render_jinja_template([messages], tools=schemas, chat_template=template,
                                             return_assistant_tokens_mask=True, **kwargs)
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _variables(template_kwargs: Mapping[str, object] | None) -> dict[str, Any]:
    kwargs = {k: to_plain(v) for k, v in (template_kwargs or {}).items()}
    if clash := sorted(_RESERVED & kwargs.keys()):
        raise ConfigError(f"data.chat_template_kwargs.{clash[0]} is set by miniverl itself; name only "
                          "variables that the chat template reads, such as enable_thinking.")
    return kwargs


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as e:  # TypeError: a template that joins a string and a list
        raise MalformedRow(f"the chat template refuses it: {e}") from e


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: object) -> list[int]:
    if len(messages) != 1 or messages[0]["role"] != "user" or to_tools(tools):
        raise MalformedRow("the tokenizer has no chat template, so a prompt must be one string (or one user "
                           "message) without tools")
    return _with_bos(tokenizer, _encode(tokenizer, content_text(messages[0])))


def _with_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    own = list(tokenizer("")["input_ids"][:1])  # the BOS that the tokenizer puts before any text, if it does
    return [*own, *ids] if own == [tokenizer.bos_token_id] and ids[:1] != own else ids


def _end(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], what: str) -> int:
    """The id that ends a plain text."""
    if not stop_ids:
        raise MalformedRow(f"the tokenizer has no end-of-text token to end its {what} with; set "
                           "rollout.stop_ids")
    eos: Any = tokenizer.eos_token_id
    return eos if eos in stop_ids else stop_ids[0]


def _plain_response(tokenizer: PreTrainedTokenizerBase, answer: list[Message],
                    stop_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(answer) != 1:
        raise MalformedRow("the tokenizer has no chat template, so a response must be one string")
    ids = (*_encode(tokenizer, content_text(answer[0])), _end(tokenizer, stop_ids, "response"))
    return ids, (1,) * len(ids)


def _turns(tokenizer: PreTrainedTokenizerBase, messages: list[Message], stop_ids: Sequence[int],
           tools: object, template_kwargs: Mapping[str, object] | None,
           first: int) -> tuple[str, list[Span]]:
    """The rendered text and the turns from message `first` on."""
    if tokenizer.chat_template is None:
        raise MalformedRow("the tokenizer has no chat template, so a conversation has no assistant turns")
    text, marked = _render_marked(tokenizer, messages, tools, template_kwargs)
    stops = [stop for i in stop_ids if (stop := str(tokenizer.decode([i], skip_special_tokens=False)))]
    turns = []
    for k in range(first, len(messages)):
        if messages[k]["role"] != "assistant":
            continue
        start, end = _turn(tokenizer, text, messages, k, stops, tools, template_kwargs)
        if marked is not None:
            inside = [s for s in marked if s[0] < end and start < s[1]]
            if not inside:
                continue
            start = max(start, inside[0][0])
        turns.append((start, end))
    if not turns:
        raise MalformedRow("none of its tokens would be trained: no assistant message, or none inside the "
                           "chat template's generation markers")
    return text, turns


def _turn(tokenizer: PreTrainedTokenizerBase, text: str, messages: list[Message], k: int, stops: list[str],
          tools: object, template_kwargs: Mapping[str, object] | None) -> Span:
    """Where message k's turn lies in `text`: after what the template puts before a probe in its place, or, if
    the message brings that boilerplate itself, right after the assistant's header."""
    probe = {key: value for key, value in messages[k].items() if key in ("role", "tool_calls")}
    probed = [*messages[:k], {**probe, "content": _PROBE}, *messages[k + 1 :]]
    head, found, _ = _render(tokenizer, probed, tools, template_kwargs, False).partition(_PROBE)
    span = _written_after(head, text, messages[k], stops) if found and text.startswith(head) else None
    if span is not None or k == 0:
        header = head
    else:
        header = _render(tokenizer, messages[:k], tools, template_kwargs, True)
        span = _written_after(header, text, messages[k], stops) if text.startswith(header) else None
    if span is None and not text.startswith((head, header)):
        raise MalformedRow(_NO_PREFIX)
    if span is None:
        raise MalformedRow(f"the chat template does not show the content of its message {k} (assistant) as "
                           "it is, so what the model should write is unclear")
    return span


def _written_after(head: str, text: str, message: Message, stops: list[str]) -> Span | None:
    """From the end of `head` through the first stop token, if that is the message's content."""
    start = len(head)
    ends = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not ends:
        raise MalformedRow("the chat template ends its assistant message with none of the stop tokens "
                           f"{stops}; name the token that does in rollout.stop_ids")
    written, end = min(ends)
    return (start, end) if _is_written(message, text[start:written]) else None


def _is_written(message: Message, shown: str) -> bool:
    """Whether the shown text is the message's content (white space aside: templates strip it)."""
    content, shown = "".join(content_text(message).split()), "".join(shown.split())
    return content in shown if message.keys() - {"role", "content"} else content == shown


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, prompt_end: int | None, turns: list[Span],
         separately: bool = False) -> list[tuple[list[int], int]]:
    """The text's tokens in pieces, (ids, trained): the prompt if there is one, turns, and what is between.

    The text is tokenized as a whole if its tokens keep to the pieces' borders, otherwise piece by piece: what
    is trained is then still exactly the turns' text.
    """
    borders = sorted({0, len(text), prompt_end or 0, *(border for turn in turns for border in turn)})
    starts = {start for start, _ in turns}
    trained = [int(start in starts) for start in borders[:-1]]
    if not separately and tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        piece_of = [bisect_right(borders, start) - 1 for start, _ in offsets]
        if all(end <= borders[p + 1] for p, (_, end) in zip(piece_of, offsets, strict=True)):
            pieces: list[list[int]] = [[] for _ in trained]
            for p, token in zip(piece_of, encoded["input_ids"], strict=True):
                pieces[p].append(token)
            return list(zip(pieces, trained, strict=True))
    texts = (text[start:end] for start, end in pairwise(borders))
    return [(_encode(tokenizer, piece), t) for piece, t in zip(texts, trained, strict=True)]


def _join(pieces: list[tuple[list[int], int]]) -> tuple[list[int], list[int]]:
    ids = [i for piece, _ in pieces for i in piece]
    return ids, [trained for piece, trained in pieces for _ in piece]
