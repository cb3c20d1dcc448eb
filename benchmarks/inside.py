"""A pool that also tells how long its workers' own methods ran, wherever they live.

Workers are built as ever; each of their public methods is timed in its process, and read by one more call.
What a step takes beyond that is the driver, Ray and the wires between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miniverl.controller.pool import Pool


class Meter:
    """Sums what the outermost calls took in this process, and is the worker that tells."""

    total_s = 0.0
    depth = 0

    def seconds(self) -> float:
        return Meter.total_s


class Timed:
    """Builds a worker whose public methods add what they take to the sum."""

    def __init__(self, worker: Callable[..., Any]) -> None:
        self.worker = worker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        built = self.worker(*args, **kwargs)
        for name, member in vars(type(built)).items():
            if callable(member) and not name.startswith("_"):
                setattr(built, name, _timed(member.__get__(built)))
        return built


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        Meter.depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            Meter.depth -= 1
            if not Meter.depth:  # a method that another one called is inside it already
                Meter.total_s += time.perf_counter() - start

    return call


class MeteredPool:
    """A Pool around another one."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.size = pool.size
        pool.build("meter", Meter)

    def inside_s(self) -> float:
        """Seconds that the first host's workers have computed so far."""
        return self.wait([self.call(0, "meter", "seconds", (), {})], "the meter")[0]

    def build(self, role: str, worker: Callable[..., Any], *args: Any) -> None:
        self.pool.build(role, Timed(worker), *args)

    def drop(self, role: str) -> None:
        self.pool.drop(role)

    def call(
        self, host: int, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.pool.call(host, role, method, args, kwargs)

    def wait(self, handles: Sequence[Any], what: str) -> list[Any]:
        return self.pool.wait(handles, what)

    def peak_memory_bytes(self) -> list[int]:
        return self.pool.peak_memory_bytes()

    def close(self) -> None:
        self.pool.close()
