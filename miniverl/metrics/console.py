"""The progress that a person sees: one live line on a terminal, quiet plain lines elsewhere.

It shows the few numbers one looks at while waiting; everything else is for the other sinks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

LOSSES = ("actor/distillation_loss", "actor/nll_loss")
PLAIN_INTERVAL_S = 1.0
LIVE_INTERVAL_S = 0.1
# Dropped in this order where a terminal is too narrow for all of them.
_LEAST_WANTED = ("split", "tok/s", "length", "ETA", "held-out", "reward", "loss")


class ConsoleSink:
    """step k/N, loss, held-out accuracy, response length, tokens/s, where the time goes, time left.

    Without a terminal: at most one line per second, besides lines with an evaluation and the last step's.
    """

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._total, self._stream, self._clock = total_steps, stream, clock
        self._latest: dict[str, float] = {}
        self._step = 0
        self._first: tuple[int, float] | None = None  # step and time of the first call: the base of the ETA
        self._shown_at = -float("inf")
        self._pending = False
        self._console = Console(file=stream, highlight=False)
        self._live = None
        if stream.isatty() and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        self._step = step
        self._latest.update(metrics)
        interval = LIVE_INTERVAL_S if self._live else PLAIN_INTERVAL_S
        self._pending = True
        if "val/accuracy" in metrics or step >= self._total or now - self._shown_at >= interval:
            self._show(now)

    def close(self) -> None:
        if self._pending:
            self._show(self._clock())
        if self._live:
            self._live.stop()

    def _show(self, now: float) -> None:
        self._pending, self._shown_at = False, now
        shown = describe(self._latest, self._seconds_left(now))
        if self._live:
            self._live.update(self._live_line(shown), refresh=True)
            return
        self._latest.pop("val/accuracy", None)  # a plain line tells an evaluation once, where it happened
        width = len(str(self._total))
        told = [_labelled(name, text) for name, text in shown.items()]
        self._stream.write(" | ".join([f"step {self._step:>{width}}/{self._total}", *told]) + "\n")
        self._stream.flush()

    def _seconds_left(self, now: float) -> float | None:
        if self._first is None or self._step <= self._first[0] or self._step >= self._total:
            return None
        step, since = self._first
        return (now - since) / (self._step - step) * (self._total - self._step)

    def _live_line(self, shown: dict[str, str]) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = f"step {self._step}/{self._total}"
        bar = 16
        room = self._console.width - len(head) - bar - 2
        for name in _LEAST_WANTED:
            if sum(len(_labelled(key, text)) + 2 for key, text in shown.items()) <= room:
                break
            shown.pop(name, None)
        grid = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = [Text(head, "bold"), ProgressBar(self._total, self._step, width=bar)]
        for name, text in shown.items():
            before, _, after = _labelled(name, text).partition(text)
            styled = ((before, "dim"), (text, _STYLES.get(name, "")), (after, "dim"))
            cells.append(Text.assemble(*styled, no_wrap=True))
        grid.add_row(*cells)
        return grid


_STYLES = {"held-out": "bold green", "loss": "cyan", "reward": "cyan"}


def describe(metrics: Mapping[str, float], seconds_left: float | None) -> dict[str, str]:
    """The known ones of: loss, reward, held-out, length, tok/s, split, ETA, ready to print (ASCII, for any
    terminal). A policy gradient has a reward and no loss: its loss is about 0 at every step.

    >>> describe({"actor/nll_loss": 0.25, "val/accuracy": 0.5, "perf/throughput": 8300.0}, 102)
    {'loss': '0.25', 'held-out': '50.0%', 'tok/s': '8.3k', 'ETA': '1:42'}
    """
    shown = {}
    loss = next((metrics[name] for name in LOSSES if name in metrics), None)
    if loss is not None:
        shown["loss"] = f"{loss:.4g}"
    if "critic/advantages/mean" in metrics and "critic/score/mean" in metrics:
        shown["reward"] = f"{metrics['critic/score/mean']:.3g}"
    if "val/accuracy" in metrics:
        shown["held-out"] = f"{metrics['val/accuracy']:.1%}"
    if "response_length/mean" in metrics:
        shown["length"] = f"{metrics['response_length/mean']:.1f}"
    if "perf/throughput" in metrics:
        shown["tok/s"] = compact(metrics["perf/throughput"])
    split = _split(metrics)
    if split:
        shown["split"] = split
    if seconds_left is not None:
        shown["ETA"] = duration(seconds_left)
    return shown


def compact(number: float) -> str:
    """A count in three digits or so.

    >>> [compact(n) for n in (7, 950, 8300, 2_500_000)]
    ['7', '950', '8.3k', '2.5M']
    """
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """
    >>> duration(102), duration(3723)
    ('1:42', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _labelled(name: str, text: str) -> str:
    if name == "split":
        return text
    return f"{text} {name}" if name == "tok/s" else f"{name} {text}"


def _split(metrics: Mapping[str, float]) -> str:
    """Shares of generation, scoring and update (with the weight sync) in the time of these three."""
    names = {"gen": ("gen",), "score": ("score",), "update": ("update_actor", "update_weights")}
    seconds = {
        label: sum(metrics.get(f"timing_s/{part}", 0.0) for part in parts) for label, parts in names.items()
    }
    whole = sum(seconds.values())
    return " ".join(f"{label} {value / whole:.0%}" for label, value in seconds.items()) if whole > 0 else ""
