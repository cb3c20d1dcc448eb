"""Where a step's numbers go: a JSONL file, TensorBoard, the console (`console.py`), or several at once.

A sink takes finished numbers and a step. It survives kill -9 and a resume without repeating or losing a step.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from miniverl.config import ConfigError
from miniverl.metrics.console import ConsoleSink


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One line of strict JSON per call: `{"step": 3, "actor/grad_norm": 0.5}`.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf" (`read_metrics`
    gives them back as floats). Lines of `first_step` and later are dropped first: a resumed run writes them
    again; so is a last line that a kill cut short.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_from(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": int(step)} | {name: _to_json(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard, flushed at every call. Points of `first_step` and later are purged first."""

    def __init__(self, directory: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only this sink needs it

        self._writer = SummaryWriter(str(directory), purge_step=first_step)
        self._names: dict[str, str] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            tag = sanitize(name)
            if self._names.setdefault(tag, name) != name:
                raise ValueError(f"metrics {self._names[tag]!r} and {name!r} would share the curve {tag!r}")
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Several sinks as one; usable as a context manager. Closing closes all of them, even if one fails."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._closing = ExitStack()
        for sink in self._sinks:
            self._closing.callback(sink.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_sinks(names: Sequence[str], run_dir: Path, first_step: int, total_steps: int) -> Sinks:
    """The named sinks of a run that (re)starts at `first_step`.

    `jsonl` writes run_dir/metrics.jsonl, `tensorboard` run_dir/tensorboard, `console` standard output.
    """
    openers = {
        "console": lambda: ConsoleSink(total_steps, sys.stdout),
        "jsonl": lambda: JsonlSink(run_dir / "metrics.jsonl", first_step),
        "tensorboard": lambda: TensorBoardSink(run_dir / "tensorboard", first_step),
    }
    unknown = [name for name in names if name not in openers]
    if unknown:
        raise ConfigError(
            f"trainer.sinks={list(names)}: there is no sink {unknown[0]!r}; known: {', '.join(openers)}."
        )
    return Sinks([openers[name]() for name in names])


def sanitize(name: str) -> str:
    """`name` in the characters that TensorBoard (and other trackers) take: letters, digits and `_ - . /`.

    >>> sanitize("val/pass@4 (greedy)")
    'val/pass_at_4__greedy_'
    """
    return re.sub(r"[^A-Za-z0-9_./-]", "_", name.replace("@", "_at_"))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl in file order, `step` among the keys; [] where there is no file.

    A last line that is cut short is left out; any other bad line raises ConfigError with its number.
    """
    return [values for _, values in _read_lines(path)]


def _to_json(value: float) -> float | str:
    if isinstance(value, numbers.Integral):  # Python's and NumPy's integers alike
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    if not path.exists():
        return []
    raw_lines = path.read_bytes().splitlines()
    read = []
    for row, raw in enumerate(raw_lines, start=1):
        try:
            line = json.loads(raw)
            values = {name: float(value) for name, value in line.items()}
            read.append((raw, values | {"step": int(line["step"])}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if row < len(raw_lines):
                raise ConfigError(
                    f"{path}, line {row}, is not a line of metrics ({type(error).__name__}: {error}). Delete "
                    "that line, or move the file away."
                ) from error
    return read


def _drop_from(path: Path, first_step: int) -> None:
    """Rewrite the file with whole lines before `first_step` only; a kill in between leaves the old file."""
    if not path.exists():
        return
    kept = b"".join(raw + b"\n" for raw, values in _read_lines(path) if values["step"] < first_step)
    if kept == path.read_bytes():
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(kept)
    os.replace(temporary, path)
