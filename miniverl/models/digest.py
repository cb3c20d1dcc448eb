"""SHA-256 over a module's state, for proving that two copies of a model are the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of (name, dtype, shape, bytes), independent of the order they come in."""
    total = hashlib.sha256()
    for one in sorted(_digest_one(name, tensor) for name, tensor in tensors):
        total.update(one)
    return total.hexdigest()


def module_digest(module: nn.Module, trainable_only: bool = False) -> str:
    """Digest of all parameters and persistent buffers, or of the trained parameters alone."""
    if trainable_only:
        return digest((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return digest(module.state_dict().items())


def _digest_one(name: str, tensor: Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous()
    head = f"{name}|{data.dtype}|{tuple(data.shape)}|".encode()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(head + hashlib.sha256(raw).digest()).digest()
