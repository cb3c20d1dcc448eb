"""A Config to and from plain data: every dotted key there is, and the paragraph for what does not fit one.

One rule for all sources (command line, YAML, JSON): values keep their type, so the text "8" is not the number
8; a mapping may be written as a mapping or as JSON text of one. Defaults and cross-field checks are
`config`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from miniverl.config import Config, ConfigError

VOLATILE = ("summary", "hardware", "plan_only", "trainer.run_dir", "trainer.resume", "placement.wait_s",
            "algo.cache_dir", "placement.call_timeout_s", "placement.dashboard", "reward.workers")
"""Keys that name, place or time a run without changing what it computes: left out of `fingerprint`."""


@dataclass(frozen=True, slots=True)
class Key:
    """What one dotted key takes."""

    hint: Any
    section: type | None = None
    """The dataclass that it holds, if it is a section."""
    free: bool = False
    """It holds a mapping with keys of the user's own."""


def _walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, hint in get_type_hints(cls, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        section = next((o for o in options if isinstance(o, type) and is_dataclass(o)), None)
        yield prefix + name, Key(hint, section, free=get_origin(hint) is dict)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")


KEYS: dict[str, Key] = dict(_walk(Config))
"""Every key, also those of sections that are off (null) by default."""


def defaults() -> dict[str, Any]:
    """The whole tree of defaults as plain data, without the cross-field checks (the bare tree has no
    teacher)."""
    tree: dict[str, Any] = {}
    for f in fields(cast(Any, Config)):
        value = f.default if f.default_factory is MISSING else f.default_factory()
        tree[f.name] = _plain(f.name, asdict(cast(Any, value)) if is_dataclass(value) else value)
    return tree


def config_to_dict(config: Config) -> dict[str, Any]:
    """The config as data that JSON can hold; `config_from_dict` gives the same config back.

    Raises ConfigError if `extra` holds something that JSON cannot.
    """
    return {name: _plain(name, value) for name, value in asdict(cast(Any, config)).items()}


def config_from_dict(data: Mapping[str, Any]) -> Config:
    """The Config of a tree of settings; what the tree leaves out is at its default.

    Raises ConfigError, one paragraph, for an unknown key, a value of the wrong type, or a contradiction.
    """
    tree = {str(name): _plain(str(name), value) for name, value in data.items()}
    try:
        # JSON mode, because it is strict about scalars and still takes lists for tuples and mappings for
        # sections.
        return TypeAdapter(Config).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ConfigError(_paragraph(error, tree)) from None


def fingerprint(config: Config, ignore: Collection[str] = VOLATILE) -> str:
    """16 hex digits that two configs share exactly if they differ in nothing but the keys of `ignore`.

    Raises ValueError if `ignore` names a key that does not exist.
    """
    tree = config_to_dict(config)
    for key in ignore:
        if key not in KEYS:
            raise ValueError(f"fingerprint cannot ignore {key}: the nearest key is {nearest_key(key)}")
        *path, last = key.split(".")
        node: Any = tree
        for name in path:
            node = node[name] if node is not None else None
        if node is not None:
            del node[last]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key of a tree of settings, in place.

    A mapping is merged key by key. Setting a key inside a section that is off (null) turns the section on,
    the rest of it at its defaults; setting the section itself to null turns it off. Raises ConfigError for an
    unknown key.
    """
    known = find_key(key, value)
    value = _plain(key, value)
    if isinstance(value, dict) and (known.section or known.free):
        holder = _open(tree, key)
        for name, item in value.items():
            if known.section:
                put(tree, f"{key}.{name}", item)
            else:
                holder[name] = item
        return
    *path, last = key.split(".")
    _open(tree, ".".join(path))[last] = value


def find_key(key: str, value: Any) -> Key:
    """The Key of a dotted name; inside a free mapping, any name. Raises ConfigError with the nearest key."""
    if key in KEYS:
        return KEYS[key]
    parts = key.split(".")
    for cut in range(1, len(parts)):
        holder = KEYS.get(".".join(parts[:cut]))
        if holder is not None and holder.free and all(parts):
            return Key(object)
    near = nearest_key(key)
    raise ConfigError(f"{key}={_shown(value)}: there is no key {key}. The nearest is {near}, "
                      f"which takes {_expected(KEYS[near].hint)}.")


def nearest_key(key: str) -> str:
    """The key that looks most like a misspelt one: alike as a whole, and by its last part."""
    name = key.rpartition(".")[2]
    return max(KEYS, key=lambda k: 0.45 * _alike(key, k) + 0.55 * _alike(name, k.rpartition(".")[2]))


def nearest_word(word: str, words: Collection[str]) -> str | None:
    """The word most like `word`, or None if none is much like it."""
    best = max(words, key=lambda other: _alike(word, other), default=None)
    return best if best is not None and _alike(word, best) >= 0.4 else None


def _alike(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _open(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping at a dotted key; what is null or missing on the way becomes an empty one."""
    node = tree
    path = ""
    for name in key.split(".") if key else []:
        path = f"{path}.{name}".lstrip(".")
        child = _plain(path, node.get(name))
        node[name] = {} if child is None else child
        if not isinstance(node[name], dict):
            raise ConfigError(f"{key}: {path}={_shown(child)} is not a mapping, so nothing can be set inside "
                              "it.")
        node = node[name]
    return node


def _plain(key: str, value: Any) -> Any:
    """The value as JSON data (dict, list, str, int, float, bool, None), unknown keys refused."""
    known = find_key(key, value)
    if isinstance(value, str) and (known.section or known.free):
        value = _from_json(key, value, known)
    if isinstance(value, Mapping) and known.section:
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    return _loose(key, value)


def _loose(key: str, value: Any) -> Any:
    """`_plain` for what stands inside a single key, where names are no keys of ours."""
    if isinstance(value, Mapping):
        return {str(name): _loose(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_loose(key, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not a finite number.")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key}={value!r} holds bytes that are not UTF-8 text.") from None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{key}={value!r} is of type {type(value).__name__}, which cannot be kept as JSON; use "
                      "text, numbers, true/false, null, lists and mappings of those.")


def _from_json(key: str, text: str, known: Key) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={_shown(text)} is not {_expected(known.hint)} (nor JSON text of one).")
    return value


def _paragraph(error: ValidationError, tree: dict[str, Any]) -> str:
    """The first fault in full, the keys of any others by name."""
    faults: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        parts = [str(part) for part in fault["loc"]]
        while parts and ".".join(parts) not in KEYS:
            # The tail says where inside the value, or which branch of a union: the value as a whole says it
            # better.
            parts.pop()
        if not parts:
            return f"The configuration cannot be read: {fault['msg']}."
        value: Any = tree
        for part in parts:
            value = value[part]
        key = ".".join(parts)
        faults.setdefault(key, _mismatch(key, value))
    first, *others = faults.values()
    more = f" Also wrong: {', '.join(list(faults)[1:])}." if others else ""
    return first + more


def _mismatch(key: str, value: Any) -> str:
    hint = KEYS[key].hint
    text = f"{key}={_shown(value)} is not {_expected(hint)}."
    words = [word for word in _leaves(hint) if isinstance(word, str)]
    if isinstance(value, str):
        near = nearest_word(value, words)
        if near is not None:
            return f"{text} The nearest is {near}."
        if not words and _is_json(value):
            return f"{text} It is text because of its quotes: write it without them."
    elif str in _leaves(hint) and isinstance(value, int | float):
        return f"{text} Quote it to make it text: '{key}=\"{value}\"'."
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _leaves(hint: Any) -> list[Any]:
    """Types and literal words that a union is made of."""
    if get_origin(hint) in (Union, types.UnionType):
        return [leaf for option in get_args(hint) for leaf in _leaves(option)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [hint]


def _expected(hint: Any) -> str:
    """A type hint in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [
            words + str(getattr(bound, name))
            for bound in arguments[1:]
            for kind, name, words in ((Gt, "gt", "above "), (Ge, "ge", "at least "), (Le, "le", "at most "))
            if isinstance(bound, kind)
        ]
        return f"{_expected(arguments[0])} {' and '.join(bounds)}".rstrip()
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(option) for option in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list with items that are each {_expected(arguments[0])}"
        return f"a list of {len(arguments)}: {', '.join(_expected(a) for a in arguments)}"
    if origin is dict:
        values = "" if arguments[1] is object else f" whose values are each {_expected(arguments[1])}"
        return f"a mapping{values}"
    if isinstance(hint, type) and is_dataclass(hint):
        return f"a section with the keys {', '.join(f.name for f in fields(cast(Any, hint)))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", object: "any value",
            type(None): "null"}[hint]


def _shown(value: Any) -> str:
    """A value as a user would recognise it, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
