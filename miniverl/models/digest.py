"""SHA-256 over a module's state or a model's files, for telling whether two models are the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from miniverl.models.locate import locate


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


def model_identity(role: str, path: str) -> str:
    """What `model.<role>.path` holds, without loading it: the digest of a directory's weights and config,
    or a hub model's commit."""
    place = locate(role, path)
    directory = Path(place)
    if not directory.is_dir():
        from huggingface_hub import hf_hub_download

        return f"hub {Path(hf_hub_download(place, 'config.json', local_files_only=True)).parent.name}"
    total = hashlib.sha256()
    for file in sorted([directory / "config.json", *directory.glob("*.safetensors*")]):
        with file.open("rb") as content:
            total.update(f"{file.name}|{hashlib.file_digest(content, 'sha256').hexdigest()}|".encode())
    return f"files {total.hexdigest()}"


def _digest_one(name: str, tensor: Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous()
    head = f"{name}|{data.dtype}|{tuple(data.shape)}|".encode()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(head + hashlib.sha256(raw).digest()).digest()
