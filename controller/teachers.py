"""Teachers that score the tokens which the student sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miniverl.controller.group import WorkerGroup
from miniverl.controller.off_policy import engine_log_probs
from miniverl.types import Batch, Rollout
from miniverl.workers.reference import Reference


@dataclass(frozen=True)
class Teachers:
    teacher: WorkerGroup
    temperature: float
    """Of the student's sampling: both sides of the gap are at it."""

    def gap(self, rollouts: Sequence[Rollout], batch: Batch) -> list[Tensor]:
        """log p(teacher) − log q(behaviour) of each rollout's trained tokens. The behaviour is what drew
        them: the engine's own log-probs."""
        teacher = self.teacher.rows(Reference.log_probs, batch, self.temperature)
        return [p - q for p, q in zip(teacher, engine_log_probs(rollouts), strict=True)]
