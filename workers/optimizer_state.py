"""AdamW's moments to and from safetensors, by parameter name: no pickle, and a missing tensor is an error.

A disk that is full is an OSError here as everywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """What safetensors raises for a full disk and the like, with the number in its text, as OSError."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def save_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: Path
) -> None:
    """Write `<moment>/<parameter>`; empty before the first step."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}/{name}"] = value.detach().cpu().contiguous()
    with os_errors():
        save_file(tensors, path)


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: Path
) -> None:
    """Restore what `save_optimizer` wrote.

    Raises:
        ValueError: a parameter's moments are missing, or moments of an unknown parameter are there.
    """
    tensors = load_file(path)
    expected = {f"{moment}/{name}" for name in parameters for moment in MOMENTS}
    if tensors and set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)[:3]
        raise ValueError(
            f"{path}: the optimizer state does not belong to these parameters (first differences: {odd})"
        )
    optimizer.state.clear()
    for name, parameter in parameters.items():
        for moment in MOMENTS:
            if f"{moment}/{name}" in tensors:
                value = tensors[f"{moment}/{name}"]
                optimizer.state[parameter][moment] = (
                    value
                    if moment == "step" and parameter.device.type == "cpu"
                    else (value.to(parameter.device))
                )
