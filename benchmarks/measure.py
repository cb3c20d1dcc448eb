"""What every benchmark here shares: clocks, medians, targets, a table for people, a RESULT line for machines.

What is measured, and what it is compared with, is each benchmark's own business.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

OUT = Path(__file__).parent / "out"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds that something took."""

    cpu: float
    """Of this process, user and system: what a busy machine distorts least."""
    wall: float


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the last table: what was promised and what came out."""

    what: str
    measured: float | None
    """None = it could not be measured."""
    direction: Literal["≥", "≤"]
    target: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.target if self.direction == "≥" else self.measured <= self.target

    def row(self) -> tuple[str, str, str, str]:
        wanted = f"{self.direction} {self.target:g} {self.unit}"
        if self.measured is None:
            return self.what, wanted, "", "NOT MEASURED"
        return self.what, wanted, f"{self.measured:.3g} {self.unit}", "OK" if self.met else "FALLS SHORT"


@dataclass
class Outcome:
    """Collected while a benchmark runs; `finish` prints it."""

    benchmark: str
    numbers: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Cell → why it has no number."""
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def attempt(self, cell: str, measure: Callable[[], None]) -> bool:
        """Run one cell. A cell that raises is reported at the end, and the others still run."""
        try:
            measure()
        except Exception as error:  # an edge: whatever a cell or a peer does must not hide the other cells
            traceback.print_exc()
            self.failed[cell] = f"{type(error).__name__}: {error}"
            return False
        return True

    def note(self, text: str) -> None:
        print(text, flush=True)
        self.notes.append(text)

    def finish(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
        """Print table and RESULT line; the exit status, 1 if a cell failed. A missed target is no failure."""
        show(self.benchmark, columns, rows)
        if self.targets:
            show("targets", ("what", "target", "measured", ""), [target.row() for target in self.targets])
        for cell, why in self.failed.items():
            print(f"FAILED {cell}: {why}")
        result = {
            "benchmark": self.benchmark,
            "numbers": self.numbers,
            "targets": [asdict(target) for target in self.targets],
            "failed": self.failed,
            "notes": self.notes,
            "seconds": round(time.perf_counter() - self.started, 1),
            "threads": torch.get_num_threads(),
            "load1": round(os.getloadavg()[0], 2),
        }
        print("RESULT " + json.dumps(result), flush=True)
        return 1 if self.failed else 0


def one_thread() -> None:
    """One torch thread, also in what this process starts; no progress bars, nothing from a model hub."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextmanager
def clock(into: list[Spent]) -> Iterator[None]:
    """Append what the block took."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    into.append(Spent(time.process_time() - cpu, time.perf_counter() - wall))


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=118).print(table)


def read_result(output: str) -> dict[str, Any]:
    """The RESULT line of a benchmark's output.

    Raises:
        ValueError: there is none.
    """
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise ValueError("it printed no RESULT line")
    return json.loads(lines[-1].removeprefix("RESULT "))
