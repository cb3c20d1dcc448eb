"""Wall-clock seconds of the parts of a step.

What a part is called, and when it is logged, is the trainer's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Adds up what each part took until `pop`.

    >>> timers = Timers()
    >>> with timers("gen"):
    ...     pass
    >>> list(timers.pop()), timers.pop()
    (['timing_s/gen'], {})
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`, also if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def pop(self) -> dict[str, float]:
        """`timing_s/<name>` → seconds since the last pop; starts again from nothing."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": value for name, value in seconds.items()}
