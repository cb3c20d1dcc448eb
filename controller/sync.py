"""Weight versions: after a sync the rollout engine provably reads the actor's weights, or the run stops."""

from __future__ import annotations

from miniverl.config import RunError
from miniverl.controller.group import WorkerGroup
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.worker import RolloutWorker


def sync(actor: WorkerGroup, rollout: WorkerGroup, version: int) -> None:
    """Make `version` (optimizer steps taken) what the engine generates with.

    Raises:
        RunError: engine and actor do not hold the same weights.
    """
    received = rollout.all(RolloutWorker.sync, version)
    held = actor.all(Actor.identity)
    if received != held:
        raise RunError(
            f"after the weight sync to version {version} the rollout engine does not hold the actor's "
            f"weights (engine {received[0][:12]}…, actor {held[0][:12]}…); nothing was generated with them."
        )
