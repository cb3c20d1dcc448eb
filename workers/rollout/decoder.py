"""Prefill and one-token steps over a preallocated key/value cache, through the model's own layers.

`FamilyDecoder` writes the decoder block of the Llama family out (Llama, Qwen2, Qwen3, SmolLM, Mistral
without a sliding window): it calls the model's own projections, norms and MLPs (so LoRA and 4-bit layers
work, and no weight is copied) and leaves out what a general forward pays per call. `ModuleDecoder` calls the
model's forward with its own cache, for every other model. Both are handed left-padded prompts, so that all
rows write at the same slot.

Shape legend: B rows · P padded prompt length · T cache slots · D head dimension · G query heads per
key/value head
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from miniverl.models.load import LoadedModel

FAMILY = ("llama", "qwen2", "qwen3", "mistral")


class Decoder(Protocol):
    def prefill(self, ids_BP: Tensor, pad_B: Tensor, repeats: Tensor, slots: int) -> Tensor:
        """Run the prompts once, then make `repeats[b]` rows of each. Returns last hidden states `[rows,
        H]`."""
        ...

    def step(self, ids_B: Tensor, slot: int) -> Tensor:
        """Feed one token per row, which takes cache place `slot`. Returns hidden states `[B, H]`."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        ...


def family_of(model: LoadedModel) -> bool:
    """Whether the written-out block is this model's block."""
    config: Any = model.causal_lm.config
    if config.model_type not in FAMILY:
        return False
    layer_types = set(config.to_dict().get("layer_types") or ["full_attention"])
    sliding = config.to_dict().get("sliding_window") if config.model_type == "mistral" else None
    return layer_types == {"full_attention"} and sliding is None


class FamilyDecoder:
    """The Llama family's block over a static cache `[layers][B, heads, T, D]`."""

    def __init__(self, model: LoadedModel) -> None:
        config: Any = model.causal_lm.config
        backbone: Any = model.backbone
        self.embed, self.rotary, self.norm = backbone.embed_tokens, backbone.rotary_emb, backbone.norm
        self.layers = list(backbone.layers)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = self.layers[0].self_attn.head_dim
        self.normed_heads = config.model_type == "qwen3"
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.pad_B = torch.zeros(0)
        self.ragged = False

    def prefill(self, ids_BP: Tensor, pad_B: Tensor, repeats: Tensor, slots: int) -> Tensor:
        batch, length = ids_BP.shape
        self.ragged = bool(pad_B.any())
        x = self.embed(ids_BP)
        places_P = torch.arange(length, device=ids_BP.device)
        cos, sin = self.rotary_at(x, (places_P - pad_B[:, None]).clamp_min(0))
        mask = None
        if self.ragged:
            causal_PP = places_P[None, :] <= places_P[:, None]
            # A padded place may look at itself: a row of a mask without any entry would give NaN.
            real_BPP = (places_P[None, None, :] >= pad_B[:, None, None]) | torch.eye(
                length, dtype=torch.bool, device=ids_BP.device
            )
            mask = (causal_PP & real_BPP)[:, None]
        rows = int(repeats.sum())
        shape = (rows, self.kv_heads, slots, self.head_dim)
        self.keys = [x.new_zeros(shape) for _ in self.layers]
        self.values = [x.new_zeros(shape) for _ in self.layers]
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(layer, layer.input_layernorm(x), cos, sin)
            self.keys[i][:, :, :length] = k.repeat_interleave(repeats, 0)
            self.values[i][:, :, :length] = v.repeat_interleave(repeats, 0)
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.pad_B = pad_B.repeat_interleave(repeats)
        return self.norm(x[:, -1]).repeat_interleave(repeats, 0)

    def step(self, ids_B: Tensor, slot: int) -> Tensor:
        x = self.embed(ids_B[:, None])
        cos, sin = self.rotary_at(x, (slot - self.pad_B)[:, None])
        mask = None
        if self.ragged:
            mask = (torch.arange(slot + 1, device=ids_B.device) >= self.pad_B[:, None])[:, None, None]
        batch, groups = len(ids_B), self.heads // self.kv_heads
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(layer, layer.input_layernorm(x), cos, sin)
            self.keys[i][:, :, slot : slot + 1] = k
            self.values[i][:, :, slot : slot + 1] = v
            # The G query heads of a key head stand as G queries of one head: no key is repeated.
            q = q.view(batch, self.kv_heads, groups, self.head_dim)
            mixed = F.scaled_dot_product_attention(
                q, self.keys[i][:, :, : slot + 1], self.values[i][:, :, : slot + 1], attn_mask=mask
            )
            x = x + layer.self_attn.o_proj(mixed.reshape(batch, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x[:, 0])

    def keep(self, rows: Tensor) -> None:
        for i in range(len(self.layers)):  # layer by layer, so that only one layer's cache exists twice
            self.keys[i] = self.keys[i][rows]
            self.values[i] = self.values[i][rows]
        self.pad_B = self.pad_B[rows]

    def rotary_at(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, places)
        return cos[:, None], sin[:, None]

    def qkv(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = layer.self_attn
        q = attention.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = attention.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = attention.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.normed_heads:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin, v.transpose(1, 2)


class ModuleDecoder:
    """Any causal model, through its own forward and transformers' dynamic cache."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.cache: Any = None
        self.pad_B = torch.zeros(0)

    def prefill(self, ids_BP: Tensor, pad_B: Tensor, repeats: Tensor, slots: int) -> Tensor:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.causal_lm.config)
        self.pad_B = pad_B
        hidden_BH = self._forward(ids_BP, 0)
        index = torch.repeat_interleave(torch.arange(len(pad_B), device=pad_B.device), repeats)
        self.keep(index)
        return hidden_BH[index]

    def step(self, ids_B: Tensor, slot: int) -> Tensor:
        return self._forward(ids_B[:, None], slot)

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.pad_B = self.pad_B[rows]

    def _forward(self, ids: Tensor, first_slot: int) -> Tensor:
        slots = torch.arange(first_slot + ids.shape[1], device=ids.device)
        attention_mask = (slots >= self.pad_B[:, None]).long()
        positions = (slots[first_slot:] - self.pad_B[:, None]).clamp_min(0)
        out = self.model.backbone(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)
