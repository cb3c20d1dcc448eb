"""A frozen model that scores tokens: the teacher of distillation, or the reference of a KL term. Never
trained, never on the autograd tape."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from miniverl.algos.objectives import head_log_probs
from miniverl.config import Config, ModelConfig
from miniverl.models.digest import module_digest
from miniverl.models.forward import hidden_before_trained
from miniverl.models.load import load_model
from miniverl.pack import micro_batches
from miniverl.types import Batch, Head, HiddenTargets, TopKTargets
from miniverl.workers.log_probs import trained_log_probs


class Reference:
    def __init__(
        self, config: Config, model: ModelConfig, vocab_size: int, device: str, role: str = "teacher"
    ) -> None:
        self.config = config
        self.model = load_model(
            role, model, vocab_size=vocab_size, device=torch.device(device), seed=config.trainer.seed
        )
        self.model.causal_lm.requires_grad_(False)

    @property
    def head(self) -> Head:
        return self.model.head

    @torch.no_grad()
    def score(self, batch: Batch) -> Batch:
        """The batch with this model's targets for every trained token: hidden states, or top-k log-probs."""
        if not len(batch):  # a shard of a batch with fewer sequences than workers
            return batch
        found: dict[int, tuple[Tensor, ...]] = {}
        for piece in micro_batches(batch, self.config.trainer.micro_batch_tokens):
            parts = self._targets(hidden_before_trained(self.model.backbone, piece))
            per_row = zip(*(part.cpu().split(piece.trained_per_row()) for part in parts), strict=True)
            found |= zip(piece.rows, per_row, strict=True)
        columns = [torch.cat(column) for column in zip(*(found[row] for row in batch.rows), strict=True)]
        return replace(
            batch, targets=HiddenTargets(columns[0]) if len(columns) == 1 else TopKTargets(*columns)
        )

    def log_probs(self, batch: Batch, temperature: float) -> list[Tensor]:
        """log p of each sequence's trained tokens at `temperature`, one tensor per sequence in the batch's
        order."""
        return trained_log_probs(self.model, batch, self.config, temperature)

    def digest(self) -> str:
        return module_digest(self.model.causal_lm)

    def _targets(self, hidden_MH: Tensor) -> tuple[Tensor, ...]:
        k = self.config.algo.teacher_top_k
        if k is None:
            return (hidden_MH,)
        chunk = self.config.algo.loss_chunk_tokens
        tops = [
            head_log_probs(part, self.model.head, self.config.rollout.temperature).topk(k, -1)
            for part in hidden_MH.split(chunk)
        ]
        return torch.cat([t.indices for t in tops]), torch.cat([t.values for t in tops])
