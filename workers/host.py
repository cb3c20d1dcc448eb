"""One process of a pool: it holds the workers placed there, by role, and passes calls on to them.

Workers in one Host share memory: `colocated("actor")` as an argument becomes the worker itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from miniverl.workers.memory import PeakMemory


@dataclass(frozen=True, slots=True)
class _Colocated:
    role: str
    attribute: str | None


def colocated(role: str, attribute: str | None = None) -> Any:
    """An argument that stands for the worker of `role` in the same Host, or for one attribute of it."""
    return _Colocated(role, attribute)


class Host:
    def __init__(self, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        self.workers: dict[str, Any] = {}
        self.device = device
        self.memory: PeakMemory | None = None

    def build(
        self, role: str, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # By now the workers' modules are imported: what is measured from here on is models and their work.
        self.memory = self.memory or PeakMemory(self.device)
        self.workers[role] = worker(*self._resolved(args), **kwargs)

    def drop(self, role: str) -> None:
        """Let go of a worker that is not needed any more, and of its memory."""
        del self.workers[role]
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.memory is not None:
            self.memory.before(f"{role}.{method}")
        return getattr(self.workers[role], method)(*self._resolved(args), **kwargs)

    def peak_memory_bytes(self) -> int:
        """Highest memory since the first worker was built, over what the process held just before."""
        return self.memory.peak() if self.memory else 0

    def process_id(self) -> int:
        return os.getpid()

    def _resolved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found = []
        for arg in args:
            if isinstance(arg, _Colocated):
                arg = (
                    self.workers[arg.role]
                    if arg.attribute is None
                    else getattr(self.workers[arg.role], arg.attribute)
                )
            found.append(arg)
        return tuple(found)
