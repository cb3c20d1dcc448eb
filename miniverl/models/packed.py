"""Several documents in one row, none of which sees another: the packed counterpart of `forward.pad`.

Positions restart with each document, and a mask keeps attention inside it.

Shape legend: R rows · L longest of them · S tokens end to end · M trained tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from miniverl.config import ConfigError
from miniverl.models.load import LoadedModel
from miniverl.types import Batch

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Between hidden states of a document alone and in a row (Llama's norms are float32 in any dtype)."""


@dataclass(frozen=True, slots=True)
class Rows:
    ids_RL: Tensor
    positions_RL: Tensor
    """Counting from 0 within each document."""
    document_RL: Tensor
    """Number of the document within its row; −1 = padding."""
    index_M: Tensor
    """Flat index into `[R·L]` of the position before each trained token, in the batch's order."""


def lay_rows(batch: Batch) -> Rows:
    """The batch's units, one a row, their sequences end to end, padded on the right."""
    units = batch.units or tuple(range(len(batch)))
    row_of = {unit: row for row, unit in enumerate(dict.fromkeys(units))}
    ends = [0] * len(row_of)
    places: list[Tensor] = []
    for unit, length in zip(units, batch.lengths_N.tolist(), strict=True):
        row = row_of[unit]
        places.append(torch.arange(ends[row], ends[row] + length))
        ends[row] += length
    longest = max(ends)
    row_N = torch.tensor([row_of[unit] for unit in units])
    row_S = row_N.repeat_interleave(batch.lengths_N)
    column_S = torch.cat(places)
    own_S = torch.cat([torch.arange(n) for n in batch.lengths_N.tolist()])
    shape = (len(row_of), longest)
    ids_RL, positions_RL = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    document_RL = torch.full(shape, -1)
    ids_RL[row_S, column_S] = batch.token_ids_S
    positions_RL[row_S, column_S] = own_S
    document_RL[row_S, column_S] = torch.arange(len(batch)).repeat_interleave(batch.lengths_N)
    trained_S = batch.mask_S == 1
    if bool((own_S[trained_S] == 0).any()):
        raise ValueError("a document's first token cannot be trained: nothing comes before it")
    return Rows(ids_RL, positions_RL, document_RL, (row_S * longest + column_S - 1)[trained_S])


def hidden_of_rows(backbone: nn.Module, rows: Rows) -> Tensor:
    """Last hidden states `[R·L, H]`. The mask is additive, which every attention of transformers takes;
    padding sees padding, so that no row of it is empty."""
    weight = next(p for p in backbone.parameters() if p.is_floating_point())
    document_RL = rows.document_RL.to(weight.device)
    longest = document_RL.shape[1]
    seen_RLL = document_RL[:, :, None] == document_RL[:, None, :]
    seen_RLL &= torch.ones(longest, longest, dtype=torch.bool, device=weight.device).tril()
    mask_RLL = torch.zeros(seen_RLL.shape, dtype=weight.dtype, device=weight.device)
    mask_RLL.masked_fill_(~seen_RLL, torch.finfo(weight.dtype).min)
    return backbone(
        input_ids=rows.ids_RL.to(weight.device),
        position_ids=rows.positions_RL.to(weight.device),
        attention_mask=mask_RLL[:, None],
        use_cache=False,
    ).last_hidden_state.flatten(0, 1)


@torch.no_grad()
def check_packable(role: str, path: str, model: LoadedModel, row_tokens: int) -> None:
    """Raises ConfigError for a model whose documents would see each other in a row, or not see all of
    themselves."""
    window = model.causal_lm.config.to_dict().get("sliding_window")
    if window is not None and window < row_tokens:
        raise ConfigError(
            f"model.{role}.path={path!r} attends to the last {window} tokens only, which the document mask "
            f"of data.row_tokens={row_tokens} would lift. Set data.row_tokens={window} or less, or choose a "
            "model without a sliding window."
        )
    first, second = [0, 1, 1, 0], [1, 1, 0]
    try:
        together = hidden_of_rows(model.backbone, lay_rows(_batch([first, second])))[len(first) :]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.{role}.path={path!r} does not take positions and a document mask, so it cannot be "
            f"pre-trained on packed rows ({type(error).__name__}: {error}); choose a model with plain "
            "attention."
        ) from error
    alone = hidden_of_rows(model.backbone, lay_rows(_batch([second])))
    near = TOLERANCE.get(together.dtype, 0.05)
    if not torch.allclose(together, alone, rtol=near, atol=near * float(alone.abs().max())):
        raise ConfigError(
            f"model.{role}.path={path!r} computes something else for a document in a packed row than alone "
            "(it carries state from token to token, or ignores masks), so it cannot be pre-trained on packed "
            "rows; choose a model with plain attention."
        )


def _batch(documents: Sequence[Sequence[int]]) -> Batch:
    """The documents as one row, nothing trained."""
    return Batch(
        token_ids_S=torch.tensor([i for document in documents for i in document]),
        lengths_N=torch.tensor([len(document) for document in documents]),
        mask_S=torch.zeros(sum(map(len, documents)), dtype=torch.long),
        rows=tuple(range(len(documents))),
        trained_tokens=0,
        trained_sequences=0,
        units=(0,) * len(documents),
        packed=True,
    )
