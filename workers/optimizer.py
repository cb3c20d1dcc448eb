"""AdamW over a role's trained parameters: schedule, clipping, gradients that are not finite, its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from miniverl.config import OptimConfig, RunError
from miniverl.metrics import Max, Metric, Sum
from miniverl.workers.optimizer_state import load_optimizer, os_errors, save_optimizer


class Optimizer:
    """What steps `role`'s parameters.

    `taken` counts steps, also those that a gradient without a number made no step of: the schedule goes on.
    """

    def __init__(
        self,
        role: str,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        lr: float,
        total_steps: int,
    ) -> None:
        self.role, self.parameters, self.config = role, dict(parameters), optim
        self.lr, self.total_steps = lr, total_steps
        self.adamw = torch.optim.AdamW(
            self.parameters.values(), lr=lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.taken = 0
        self.skipped_in_a_row = 0

    def step(self) -> dict[str, Metric]:
        """One step with the gradients in `.grad`, which are gone afterwards.

        Raises:
            RunError: the gradient was not finite `optim.max_skipped` times in a row; the weights are as
                before.
        """
        lr = self.lr * lr_factor(self.taken, self.config, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.grad_clip or math.inf)
        )
        self.taken += 1
        metrics: dict[str, Metric] = {f"{self.role}/lr": Max(lr)}
        if math.isfinite(norm):
            self.adamw.step()
            # The fused kernel writes without counting, and `identity` counts.
            torch.autograd.graph.increment_version(self.parameters.values())
            metrics[f"{self.role}/grad_norm"] = Max(norm)
        self.adamw.zero_grad()
        metrics[f"{self.role}/skipped_updates"] = Sum(float(not math.isfinite(norm)))
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise RunError(
                f"{self.role}, optimizer step {self.taken}: the gradient's norm is {norm}, "
                f"{self.skipped_in_a_row} times in a row (optim.max_skipped={self.config.max_skipped}). The "
                "weights were not changed; the last checkpoint is good. A smaller optim.lr, or "
                "dtype=float32, usually helps."
            )
        return metrics

    def save(self, directory: Path, prefix: str = "") -> None:
        """Parameters, moments and counters as safetensors into an existing directory."""
        with os_errors():
            save_file(
                {name: p.detach().cpu().contiguous() for name, p in self.parameters.items()},
                directory / f"{prefix}weights.safetensors",
            )
            counters = {"taken": self.taken, "skipped_in_a_row": self.skipped_in_a_row}
            save_file(
                {name: torch.tensor([count]) for name, count in counters.items()},
                directory / f"{prefix}counters.safetensors",
            )
        save_optimizer(self.adamw, self.parameters, directory / f"{prefix}optimizer.safetensors")

    def load(self, directory: Path, prefix: str = "") -> None:
        """Take up where `save` left off."""
        with torch.no_grad():
            for name, saved in load_file(directory / f"{prefix}weights.safetensors").items():
                self.parameters[name].copy_(saved)
        load_optimizer(self.adamw, self.parameters, directory / f"{prefix}optimizer.safetensors")
        counters = load_file(directory / f"{prefix}counters.safetensors")
        self.taken, self.skipped_in_a_row = (int(counters[n]) for n in ("taken", "skipped_in_a_row"))


def lr_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Share of optim.lr at the 0-based `step`: linear warm-up (first step 1/warmup), then the schedule to
    its floor."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    progress = (step - optim.warmup_steps) / max(1, total_steps - 1 - optim.warmup_steps)
    fall = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * max(0.0, fall)
