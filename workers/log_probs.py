"""One number per trained token of a batch, in micro-batches; log-probs above all: for actor and reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miniverl.algos.chunked import log_probs_and_entropy, token_log_probs
from miniverl.config import Config
from miniverl.models.forward import hidden_before_trained, trained_token_ids
from miniverl.models.load import LoadedModel
from miniverl.pack import micro_batches
from miniverl.types import Batch


def per_row(batch: Batch, budget_tokens: int, of: Callable[[Batch], Tensor]) -> list[Tensor]:
    """`of` (a micro-batch → `[M]`) of the whole batch: one tensor on the CPU per sequence, in its order."""
    found: dict[int, Tensor] = {}
    for piece in micro_batches(batch, budget_tokens):
        found |= zip(piece.rows, of(piece).cpu().split(piece.trained_per_row()), strict=True)
    return [found[row] for row in batch.rows]


def differentiable_log_probs(
    model: LoadedModel, batch: Batch, config: Config, temperature: float
) -> tuple[Tensor, Tensor]:
    """log q of a micro-batch's trained tokens and the entropy of their distributions, `[M]` each, for a loss
    whose slope depends on all of them."""
    return log_probs_and_entropy(
        hidden_before_trained(model.backbone, batch),
        model.head,
        trained_token_ids(batch),
        temperature=temperature,
        chunk_tokens=config.algo.loss_chunk_tokens,
    )


@torch.no_grad()
def trained_log_probs(model: LoadedModel, batch: Batch, config: Config, temperature: float) -> list[Tensor]:
    """log q of each sequence's trained tokens at `temperature`, one tensor per sequence in the batch's
    order."""

    def log_probs(piece: Batch) -> Tensor:
        return token_log_probs(
            hidden_before_trained(model.backbone, piece),
            model.head,
            trained_token_ids(piece),
            temperature=temperature,
            chunk_tokens=config.algo.loss_chunk_tokens,
        )

    return per_row(batch, config.trainer.micro_batch_tokens, log_probs)
