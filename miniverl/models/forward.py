"""Batch → hidden states. The only place that pads, with `packed`, so the only one that knows on which side.

Padding is on the right without an attention mask: in a causal model real tokens never look at it, and what
is computed at padded places is thrown away.

Shape legend: N sequences · L longest of them · S tokens end to end · M trained tokens  · H hidden
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miniverl.models.packed import hidden_of_rows, lay_rows
from miniverl.types import Batch


def hidden_before_trained(backbone: nn.Module, batch: Batch) -> Tensor:
    """Last hidden states `[M, H]` at the positions that predict the batch's trained tokens, in the batch's
    order."""
    if batch.packed:
        rows = lay_rows(batch)
        hidden_XH = hidden_of_rows(backbone, rows)
        return hidden_XH[rows.index_M.to(hidden_XH.device)]
    device = next(backbone.parameters()).device
    ids_NL, index_M = pad(batch)
    hidden_NLH = backbone(input_ids=ids_NL.to(device), use_cache=False).last_hidden_state
    return hidden_NLH.flatten(0, 1)[index_M.to(device)]


def pad(batch: Batch) -> tuple[Tensor, Tensor]:
    """Right-padded ids `[N, L]`, and for each trained token the flat index into `[N·L]` of the position
    before it.

    The padded id is 0: any valid id does, since nothing real attends to it.
    """
    lengths_N = batch.lengths_N
    n, longest = len(lengths_N), int(lengths_N.max())
    row_S = torch.repeat_interleave(torch.arange(n), lengths_N)
    column_S = torch.arange(len(batch.token_ids_S)) - (torch.cumsum(lengths_N, 0) - lengths_N)[row_S]
    ids_NL = torch.zeros(n, longest, dtype=torch.long)
    ids_NL[row_S, column_S] = batch.token_ids_S
    trained_S = batch.mask_S == 1
    if bool((column_S[trained_S] == 0).any()):
        raise ValueError(
            "a sequence's first token cannot be trained: nothing comes before it to predict it from"
        )
    return ids_NL, (row_S * longest + column_S - 1)[trained_S]


def trained_token_ids(batch: Batch) -> Tensor:
    """Ids `[M]` of the trained tokens, in the batch's order."""
    return batch.token_ids_S[batch.mask_S == 1]
