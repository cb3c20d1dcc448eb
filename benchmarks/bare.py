"""The bare limit of decoding: prefill, then one token a step over a preallocated cache, argmax, nothing else.

Plain torch over the weights of a Llama or Qwen2 model. No sampling, log-probs, stop ids or modules: what an
engine adds shows as the distance from here.

Shape legend: B rows · P padded prompt length · T tokens · H hidden · D head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    o: Tensor
    norm_mlp: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Bare:
    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        if config.model_type not in ("llama", "qwen2"):
            raise ValueError(f"the bare limit is written for llama and qwen2, not {config.model_type}")
        w = dict(model.named_parameters(remove_duplicate=False))
        self.embedding, self.head, self.norm = (
            w["model.embed_tokens.weight"],
            w["lm_head.weight"],
            w["model.norm.weight"],
        )
        self.layers = [_layer(w, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        theta = config.rope_parameters["rope_theta"]
        self.inverse = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuations of `new_tokens` tokens each."""
        batch, length = len(prompts), max(map(len, prompts))
        slots = length + new_tokens
        pad_B = torch.tensor([length - len(p) for p in prompts])
        ids_BP = torch.tensor([[0] * (length - len(p)) + p for p in prompts])
        angles = (torch.arange(slots) - pad_B[:, None]).clamp_min(0)[..., None] * self.inverse
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        self.keys = [torch.zeros(batch, self.kv_heads, slots, self.head_dim) for _ in self.layers]
        self.values = [torch.zeros_like(k) for k in self.keys]
        places = torch.arange(slots)
        real_BT = places >= pad_B[:, None]
        causal = (places[:length, None] >= places[None, :length]) & (
            real_BT[:, None, :length] | torch.eye(length, dtype=torch.bool)
        )
        ids_B = self._forward(ids_BP, 0, cos[:, :, :length], sin[:, :, :length], causal[:, None])
        done = [ids_B]
        for slot in range(length, slots - 1):
            mask = real_BT[:, None, None, : slot + 1]
            at = slice(slot, slot + 1)
            ids_B = self._forward(ids_B[:, None], slot, cos[:, :, at], sin[:, :, at], mask)
            done.append(ids_B)
        return torch.stack(done, 1).tolist()

    def _forward(self, ids: Tensor, slot: int, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length = ids.shape
        end, heads, kv_heads, dim = slot + length, self.heads, self.kv_heads, self.head_dim
        x = F.embedding(ids, self.embedding)
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer.norm_in, self.eps)
            q = F.linear(h, *layer.q).view(batch, length, heads, dim).transpose(1, 2)
            k = F.linear(h, *layer.k).view(batch, length, kv_heads, dim).transpose(1, 2)
            keys[:, :, slot:end] = _rotated(k, cos, sin)
            values[:, :, slot:end] = F.linear(h, *layer.v).view(batch, length, kv_heads, dim).transpose(1, 2)
            q = _rotated(q, cos, sin)
            if length == 1:  # query heads that share a key head stand as queries of one head
                q = q.view(batch, kv_heads, heads // kv_heads, dim)
            mixed = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=length > 1
            )
            mixed = mixed if length == 1 else mixed.transpose(1, 2)
            x = x + F.linear(mixed.reshape(batch, length, heads * dim), layer.o)
            h = F.rms_norm(x, x.shape[-1:], layer.norm_mlp, self.eps)
            x = x + F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        x = F.rms_norm(x[:, -1], x.shape[-1:], self.norm, self.eps)
        return F.linear(x, self.head).argmax(-1)


def _layer(w: dict[str, torch.nn.Parameter], at: str) -> _Layer:
    def linear(name: str) -> tuple[Tensor, Tensor | None]:
        return w[f"{at}self_attn.{name}_proj.weight"], w.get(f"{at}self_attn.{name}_proj.bias")

    return _Layer(
        norm_in=w[f"{at}input_layernorm.weight"],
        q=linear("q"),
        k=linear("k"),
        v=linear("v"),
        o=w[f"{at}self_attn.o_proj.weight"],
        norm_mlp=w[f"{at}post_attention_layernorm.weight"],
        gate=w[f"{at}mlp.gate_proj.weight"],
        up=w[f"{at}mlp.up_proj.weight"],
        down=w[f"{at}mlp.down_proj.weight"],
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
