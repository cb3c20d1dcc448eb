"""The implicit process reward model (PRIME): a copy of the student that learns which responses are right.

Its reward of a token is β · (log π_φ − log π_ref); a response counts as right with probability σ(their sum)
(Cui et al. 2025, arXiv 2502.01456).

Shape legend: N sequences · M trained tokens
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from miniverl.config import Config
from miniverl.metrics import Mean, Metric, merge
from miniverl.models.load import load_model
from miniverl.pack import micro_batches
from miniverl.types import Batch, OutcomeTargets
from miniverl.workers.log_probs import differentiable_log_probs, trained_log_probs
from miniverl.workers.optimizer import Optimizer


class ProcessReward:
    def __init__(self, config: Config, vocab_size: int, device: str) -> None:
        self.config = config
        self.model = load_model(
            "student",
            config.model.student,
            vocab_size=vocab_size,
            device=torch.device(device),
            seed=config.trainer.seed,
        )
        self.trained = {name: p for name, p in self.model.causal_lm.named_parameters() if p.requires_grad}
        policy, steps = config.algo.policy, config.trainer.steps
        self.optimizer = Optimizer(
            "process_reward", self.trained, config.optim, policy.prime.lr, steps * policy.mini_batches
        )

    def log_probs(self, batch: Batch, temperature: float) -> list[Tensor]:
        """log π_φ of each sequence's trained tokens, one tensor per sequence in the batch's order."""
        return trained_log_probs(self.model, batch, self.config, temperature)

    def update(self, batch: Batch) -> dict[str, Metric]:
        """One optimizer step on the cross-entropy between σ(β Σ log-ratio) and the outcome, per response.

        Raises:
            RunError: too many gradients in a row were not finite.
        """
        self.model.causal_lm.train()
        pieces = micro_batches(batch, self.config.trainer.micro_batch_tokens)
        parts = [self._backward(piece) for piece in pieces]
        self.model.causal_lm.eval()
        return {**merge(parts), **self.optimizer.step()}

    def save(self, directory: str) -> None:
        """Weights and optimizer as `process_reward_*.safetensors` into an existing directory."""
        self.optimizer.save(Path(directory), "process_reward_")

    def load(self, directory: str) -> None:
        """Take up where `save` left off."""
        self.optimizer.load(Path(directory), "process_reward_")

    def _backward(self, batch: Batch) -> dict[str, Metric]:
        targets = batch.targets
        if not isinstance(targets, OutcomeTargets):
            raise ValueError("a process reward model learns from outcomes; the batch carries none")
        temperature = self.config.rollout.temperature
        log_probs_M, _ = differentiable_log_probs(self.model, batch, self.config, temperature)
        counts = batch.trained_per_row()
        ratio_M = log_probs_M - targets.ref_log_probs_M.to(log_probs_M)
        written = [i for i, count in enumerate(counts) if count]
        ratios, outcomes = ratio_M.split(counts), targets.outcomes_M.to(log_probs_M).split(counts)
        if not written:
            return {"process_reward/loss": Mean(0.0, 0), "process_reward/accuracy": Mean(0.0, 0)}
        logits_N = self.config.algo.policy.prime.beta * torch.stack([ratios[i].sum() for i in written])
        outcomes_N = torch.stack([outcomes[i][0] for i in written])
        total = binary_cross_entropy_with_logits(logits_N, outcomes_N, reduction="sum")
        (total / max(1, batch.trained_sequences)).backward()
        agreed = float(((logits_N.detach() > 0) == (outcomes_N > 0.5)).sum())
        return {
            "process_reward/loss": Mean(float(total.detach()), len(written)),
            "process_reward/accuracy": Mean(agreed, len(written)),
        }
