"""The critic role: a model of its own that predicts the return from every state, with its optimizer.

Shape legend: N sequences · T most trained tokens of one · M trained tokens · H hidden
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from miniverl.algos.value import value_loss
from miniverl.config import Config
from miniverl.metrics import Mean, Metric, Sum, merge
from miniverl.models.digest import digest
from miniverl.models.forward import hidden_before_trained
from miniverl.models.load import load_model
from miniverl.pack import micro_batches
from miniverl.types import Batch, ValueTargets
from miniverl.workers.layout import Layout
from miniverl.workers.log_probs import per_row
from miniverl.workers.optimizer import Optimizer


class Critic:
    def __init__(self, config: Config, vocab_size: int, device: str) -> None:
        self.config = config
        loaded = load_model(
            "student" if config.model.critic is None else "critic",
            config.model.critic or config.model.student,
            vocab_size=vocab_size,
            device=torch.device(device),
            seed=config.trainer.seed,
        )
        # Only what lies below the output head is kept: states are valued, no token is predicted.
        self.backbone = loaded.backbone
        hidden = loaded.head.weight_VH.shape[1]
        self.value_head = nn.Linear(hidden, 1, device=loaded.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        named = {**dict(self.backbone.named_parameters()), **_prefixed(self.value_head)}
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        policy, steps = config.algo.policy, config.trainer.steps
        self.optimizer = Optimizer(
            "critic",
            self.trained,
            config.optim,
            policy.critic.lr,
            steps * policy.critic.epochs * policy.mini_batches,
        )

    @torch.no_grad()
    def values(self, batch: Batch) -> list[Tensor]:
        """V of the state before each trained token, one tensor per sequence in the batch's order. Never
        scaled by a temperature: a value is no logit."""
        return per_row(batch, self.config.trainer.micro_batch_tokens, self._values)

    def update(self, batch: Batch) -> dict[str, Metric]:
        """One optimizer step towards the batch's returns.

        Raises:
            RunError: too many gradients in a row were not finite.
        """
        metrics = self.backward(batch)
        return {**metrics, **self.optimizer.step()}

    def backward(self, batch: Batch) -> dict[str, Metric]:
        """Gradients of the batch's value loss into `.grad`."""
        self.backbone.train()
        pieces = micro_batches(batch, self.config.trainer.micro_batch_tokens)
        parts = [self._backward(piece) for piece in pieces]
        self.backbone.eval()
        return merge(parts)

    def digest(self) -> str:
        """SHA-256 of what is trained."""
        return digest(self.trained.items())

    def save(self, directory: str) -> None:
        """Weights, value head and optimizer as `critic_*.safetensors` into an existing directory."""
        self.optimizer.save(Path(directory), "critic_")

    def load(self, directory: str) -> None:
        """Take up where `save` left off."""
        self.optimizer.load(Path(directory), "critic_")

    def _values(self, batch: Batch) -> Tensor:
        hidden_MH = hidden_before_trained(self.backbone, batch)
        return self.value_head(hidden_MH.to(self.value_head.weight.dtype)).squeeze(-1)

    def _backward(self, batch: Batch) -> dict[str, Metric]:
        if not isinstance(batch.targets, ValueTargets):
            raise ValueError("a critic learns from returns; the batch carries none")
        policy, values_M = self.config.algo.policy, self._values(batch)
        layout = Layout(batch, values_M.detach(), self.config.rollout.max_response_length)
        loss_NT, clipped = value_loss(
            layout.padded(values_M),
            layout.padded(batch.targets.old_values_M),
            layout.padded(batch.targets.returns_M),
            layout.mask_NT,
            policy.critic.clip,
        )
        loss = layout.reduced(loss_NT, policy.aggregation)
        loss.backward()
        return {
            "critic/vf_loss": Sum(float(loss.detach())),
            "critic/vf_clipfrac": Mean(float(clipped), len(values_M)),
            "critic/vpred_mean": Mean(float(values_M.detach().sum()), len(values_M)),
        }


def _prefixed(head: nn.Linear) -> dict[str, nn.Parameter]:
    return {f"value_head.{name}": p for name, p in head.named_parameters()}
