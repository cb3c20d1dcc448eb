"""Weights out of the actor and into a rollout engine.

One way exists so far: the engine reads the actor's own module, in the same process. Nothing moves, so
nothing can go stale; what is checked is that both really hold the same storage.
"""

from __future__ import annotations

import hashlib

from torch import nn

from miniverl.models.load import LoadedModel


class SharedModule:
    """The actor's module, read in place. `version` is the one that the last `receive` named."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.version = -1

    def receive(self, version: int) -> str:
        self.version = version
        return storage_identity(self.model.causal_lm)


def storage_identity(module: nn.Module) -> str:
    """Digest of where each parameter and buffer lies and how often it was written to.

    Equal identities in one process mean the same bytes, without reading them.
    """
    total = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        total.update(
            f"{name}|{tensor.data_ptr()}|{tensor._version}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode()
        )
    return total.hexdigest()
