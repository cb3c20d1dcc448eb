"""log-probs of a batch's trained tokens under a loaded model, in micro-batches: for actor and reference."""

from __future__ import annotations

import torch
from torch import Tensor

from miniverl.algos.chunked import token_log_probs
from miniverl.config import Config
from miniverl.models.forward import hidden_before_trained, trained_token_ids
from miniverl.models.load import LoadedModel
from miniverl.pack import micro_batches
from miniverl.types import Batch


@torch.no_grad()
def trained_log_probs(model: LoadedModel, batch: Batch, config: Config, temperature: float) -> list[Tensor]:
    """log q of each sequence's trained tokens at `temperature`, one tensor per sequence in the batch's
    order."""
    found: dict[int, Tensor] = {}
    for piece in micro_batches(batch, config.trainer.micro_batch_tokens):
        flat_M = token_log_probs(
            hidden_before_trained(model.backbone, piece),
            model.head,
            trained_token_ids(piece),
            temperature=temperature,
            chunk_tokens=config.algo.loss_chunk_tokens,
        )
        found |= zip(piece.rows, flat_M.cpu().split(piece.trained_per_row()), strict=True)
    return [found[row] for row in batch.rows]
