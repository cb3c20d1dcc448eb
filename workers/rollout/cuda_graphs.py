"""One-token steps replayed from captured CUDA graphs: a launch per step instead of hundreds.

A graph is captured once per shape bucket (rows, cache slots) over static buffers and replayed from then on.
It wraps a FamilyDecoder and computes what that does. Where a capture fails, steps run uncaptured and `notes`
says so.

Shape legend: B rows · T cache slots, both rounded up to a bucket · D head dimension
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from miniverl.workers.rollout.decoder import FamilyDecoder

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SLOT_BUCKET = 256


@dataclass(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids_B: Tensor
    pad_B: Tensor
    slot: Tensor
    hidden_BH: Tensor


class GraphDecoder:
    """A Decoder. Rows beyond the real ones compute on stale cache and are cut off the result.

    All buckets are views of one static cache, the largest asked for so far; a larger one drops the graphs.
    """

    def __init__(self, inner: FamilyDecoder) -> None:
        self.inner = inner
        self.notes: tuple[str, ...] = ()
        self.rows = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._captured: dict[int, _Captured] = {}
        self._active: _Captured | None = None

    @property
    def buckets(self) -> list[int]:
        """Row counts that have a captured graph."""
        return sorted(self._captured)

    def prefill(self, ids_BP: Tensor, pad_B: Tensor, repeats: Tensor, slots: int) -> Tensor:
        hidden_BH = self.inner.prefill(ids_BP, pad_B, repeats, slots)
        self.rows = len(hidden_BH)
        self._enter()
        return hidden_BH

    def step(self, ids_B: Tensor, slot: int) -> Tensor:
        active = self._active
        if active is None:
            return self.inner.step(ids_B, slot)
        active.ids_B[: self.rows] = ids_B
        active.slot.fill_(slot)
        active.graph.replay()
        return active.hidden_BH[: self.rows]

    def keep(self, rows: Tensor) -> None:
        if self._active is not None:
            self.inner.keys = [k[: self.rows] for k in self._keys]
            self.inner.values = [v[: self.rows] for v in self._values]
        self.inner.keep(rows)
        self.rows = len(rows)
        self._enter()

    def _enter(self) -> None:
        """Move the inner decoder's cache into the static one and choose the graph of its bucket, capturing
        if new."""
        if self.notes:
            return
        rows = next((b for b in ROW_BUCKETS if b >= self.rows), self.rows)
        slots = -(-self.inner.keys[0].shape[2] // SLOT_BUCKET) * SLOT_BUCKET
        self._reserve(rows, slots)
        if rows not in self._captured:
            try:
                self._captured[rows] = self._capture(rows)
            except RuntimeError as error:  # what torch raises for an operation that cannot be captured
                self._active = None
                self.notes = (f"hf_cached: decoding without CUDA graphs, their capture failed: {error}",)
                return
        active = self._captured[rows]
        for static, own in zip(self._keys + self._values, self.inner.keys + self.inner.values, strict=True):
            static[: self.rows, :, : own.shape[2]] = own
        active.pad_B.zero_()
        active.pad_B[: self.rows] = self.inner.pad_B
        self._active = active
        self.inner.keys, self.inner.values = [], []

    def _reserve(self, rows: int, slots: int) -> None:
        """A static cache of at least this many rows and slots."""
        if self._keys and self._keys[0].shape[0] >= rows and self._keys[0].shape[2] >= slots:
            return
        if self._keys:
            rows, slots = max(rows, self._keys[0].shape[0]), max(slots, self._keys[0].shape[2])
        self._captured.clear()
        shape = (rows, self.inner.kv_heads, slots, self.inner.head_dim)
        self._keys = [self.inner.keys[0].new_zeros(shape) for _ in self.inner.layers]
        self._values = [self.inner.keys[0].new_zeros(shape) for _ in self.inner.layers]

    def _capture(self, rows: int) -> _Captured:
        keys, values = [k[:rows] for k in self._keys], [v[:rows] for v in self._values]
        device = keys[0].device
        zeros = torch.zeros(2, rows, dtype=torch.long, device=device)
        state = _Captured(
            torch.cuda.CUDAGraph(),
            zeros[0],
            zeros[1],
            torch.zeros(1, dtype=torch.long, device=device),
            keys[0].new_zeros(rows, 1),
        )
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                static_step(self.inner, keys, values, state.ids_B, state.pad_B, state.slot)
        torch.cuda.current_stream().wait_stream(warm_up)
        with torch.cuda.graph(state.graph):
            state.hidden_BH = static_step(self.inner, keys, values, state.ids_B, state.pad_B, state.slot)
        return state


def static_step(
    inner: FamilyDecoder, keys: list[Tensor], values: list[Tensor], ids_B: Tensor, pad_B: Tensor, slot: Tensor
) -> Tensor:
    """`FamilyDecoder.step` with no shape or branch that depends on data: all T slots are attended through a
    mask.

    `slot` is a one-element tensor, so one captured graph serves every position. Returns hidden states `[B,
    H]`.
    """
    x = inner.embed(ids_B[:, None])
    cos, sin = inner.rotary_at(x, (slot - pad_B)[:, None])
    places_T = torch.arange(keys[0].shape[2], device=ids_B.device)
    mask = ((places_T <= slot) & (places_T >= pad_B[:, None]))[:, None, None]
    batch, groups = len(ids_B), inner.heads // inner.kv_heads
    for i, layer in enumerate(inner.layers):
        q, k, v = inner.qkv(layer, layer.input_layernorm(x), cos, sin)
        keys[i].index_copy_(2, slot, k)
        values[i].index_copy_(2, slot, v)
        q = q.view(batch, inner.kv_heads, groups, inner.head_dim)
        mixed = F.scaled_dot_product_attention(q, keys[i], values[i], attn_mask=mask)
        x = x + layer.self_attn.o_proj(mixed.reshape(batch, 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return inner.norm(x[:, 0])
