"""What a cell of a data file means as a conversation, in plain Python types that templates take.

It knows no tokenizer: rendering is `miniverl.data.template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miniverl.config import ConfigError

Message = dict[str, Any]


class MalformedRow(ConfigError):
    """A row that cannot be made into a prompt. It says why; the reader of the file adds where."""


def to_plain(value: object) -> object:
    """The same value in dicts, lists and scalars of Python: an array has no truth value in a template."""
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [to_plain(v) for v in value]
    return value


def to_messages(value: object, role: str = "user") -> list[Message]:
    """A prompt (or a response, with role="assistant") as a list of messages.

    - A list, tuple or array of {role, content} is that conversation.
    - A string that is JSON for a non-empty list of objects that all have a `role` is the conversation it
      spells (files often store one that way); every other string, other JSON included, is the text of one
      message of `role`.

    Keys that hold None are left out: a column of structs invents them where rows differ. Raises MalformedRow.
    """
    value = to_plain(value)
    if isinstance(value, str):
        spelled = _parse(value)
        return [{"role": role, "content": value}] if spelled is None else [_message(m) for m in spelled]
    if value is None:
        raise MalformedRow("it is empty (null)")
    if not isinstance(value, list):
        raise MalformedRow(f"it is of type {type(value).__name__}, not a string or a list of messages")
    if not value:
        raise MalformedRow("its list of messages is empty")
    return [_message(m) for m in value]


def to_tools(value: object) -> list[Any] | None:
    """Tool schemas as a list of dicts (from a list, an array or JSON for one); None or empty = no tools."""
    value = _without_none(to_plain(value))
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as e:
            raise MalformedRow(f"its tools are a string that is not JSON ({e})") from e
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise MalformedRow("its tools are not a list of schemas")
    return value


def content_text(message: Message) -> str:
    """The text of a message: its content, or the text parts of a content that comes in parts."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _parse(text: str) -> list[object] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return value
    return None


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise MalformedRow(f"a message is of type {type(value).__name__}, not {{role, content}}")
    message = {k: _without_none(v) for k, v in value.items() if v is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MalformedRow("a message has no role")
    if message.get("content") is None:
        if not message.get("tool_calls"):
            raise MalformedRow(f"the content of a message (role {role}) is empty (null)")
        message["content"] = ""  # templates commonly concatenate it
    if not isinstance(message["content"], (str, list)):
        raise MalformedRow(f"the content of a message (role {role}) is of type "
                           f"{type(message['content']).__name__}")
    return message


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value
