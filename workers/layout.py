"""A micro-batch's trained tokens as a rectangle: how flat values are padded, and reduced to a loss.

Shape legend: N sequences · T most trained tokens of one · M trained tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miniverl.algos.aggregate import aggregate
from miniverl.types import Batch


@dataclass(frozen=True)
class Layout:
    batch: Batch
    like: Tensor
    """dtype and device of the rectangles."""
    horizon: int
    """The constant length of `seq-mean-token-sum-norm`."""

    def padded(self, flat_M: Tensor) -> Tensor:
        """`[N, T]`, 0 behind each sequence."""
        return pad_sequence(
            list(flat_M.to(self.like).split(self.batch.trained_per_row())), batch_first=True
        )

    @property
    def mask_NT(self) -> Tensor:
        return self.padded(torch.ones(sum(self.batch.trained_per_row())))

    def reduced(self, values_NT: Tensor, mode: str) -> Tensor:
        """The share of the global batch's aggregate that these tokens are, 0-dim."""
        return aggregate(
            values_NT,
            self.mask_NT,
            mode,
            tokens=self.batch.trained_tokens,
            sequences=self.batch.trained_sequences,
            horizon=self.horizon,
        )
