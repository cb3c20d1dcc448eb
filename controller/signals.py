"""What an update learns from: scored rollouts → batches with their targets. One class per objective, so that
the page needs no `if`. Some learn themselves (a critic, a process reward model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from miniverl.controller.group import WorkerGroup
from miniverl.pack import pack
from miniverl.types import Batch, Rollout
from miniverl.workers.reference import Reference


class Signal(Protocol):
    @property
    def learners(self) -> tuple[WorkerGroup, ...]:
        """Groups besides the actor whose weights change."""
        ...

    def __call__(self, rollouts: Sequence[Rollout], step: int) -> tuple[list[Batch], dict[str, float]]:
        """One batch with its targets per optimizer step to take, and numbers about them.

        step: steps finished so far.
        """
        ...


@dataclass(frozen=True)
class Distillation:
    """The teacher's distribution at every trained token."""

    teacher: WorkerGroup

    @property
    def learners(self) -> tuple[WorkerGroup, ...]:
        return ()

    def __call__(self, rollouts: Sequence[Rollout], step: int) -> tuple[list[Batch], dict[str, float]]:
        return [self.teacher.shard(Reference.score, pack(rollouts))], {}
