"""From logits to a token: filters, the draw, its log-prob, and the noise it is drawn with.

Noise is counter-based: u = f(seed, prompt uid, sample index, position). No generator holds state, so batch
order, batch size, worker count and restarts cannot change a sample.

Shape legend: B rows · T positions · V vocabulary
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miniverl.workers.rollout.base import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, keys: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """Uniform numbers in [0, 1) `[B, T]` for rows keyed by (prompt uid, sample index), positions 0 …
    length-1.

    A row's key is the first 8 bytes of SHA-256; its t-th number is the t-th output of SplitMix64 started
    there (Steele, Lea & Flood 2014), of which the top 53 bits are kept.
    """
    starts = [
        int.from_bytes(hashlib.sha256(f"{seed}/{uid}/{sample}".encode()).digest()[:8], "big")
        for uid, sample in keys
    ]
    counters_T = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
    state_BT = np.array(starts, dtype=np.uint64)[:, None] + counters_T[None, :]
    state_BT = (state_BT ^ (state_BT >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_BT = (state_BT ^ (state_BT >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state_BT = state_BT ^ (state_BT >> np.uint64(31))
    return (state_BT >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: ids `[B]`, log-probs `[B]`.

    The draw inverts the cumulative distribution at `uniform_B` (float64), so one number per token is all the
    noise. Tokens of probability 0 are never drawn.
    """
    if sampling.greedy:
        ids_B = logits_BV.argmax(-1)
        return ids_B, torch.zeros_like(ids_B, dtype=torch.promote_types(logits_BV.dtype, torch.float32))
    probs_BV = torch.softmax(filtered_logits(logits_BV, sampling), -1)
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    point_B1 = uniform_B.unsqueeze(-1) * cumulative_BV[:, -1:]
    ids_B1 = torch.searchsorted(cumulative_BV, point_B1, right=True).clamp_max(logits_BV.shape[-1] - 1)
    return ids_B1.squeeze(-1), probs_BV.gather(-1, ids_B1).squeeze(-1).log()


def filtered_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits `[B, V]` of what is drawn from: / temperature, top-k, then top-p; dropped ids are -inf."""
    scaled_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if sampling.temperature != 1.0:
        scaled_BV = scaled_BV / sampling.temperature
    if 0 < sampling.top_k < scaled_BV.shape[-1]:
        kth_B1 = scaled_BV.topk(sampling.top_k, -1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, -torch.inf)
    return _nucleus(scaled_BV, sampling.top_p) if sampling.top_p < 1.0 else scaled_BV


def _nucleus(scaled_BV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches `top_p`; at least one stays."""
    sorted_BV, order_BV = torch.sort(scaled_BV, dim=-1, descending=True, stable=True)
    mass_before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
    dropped_BV = torch.zeros_like(scaled_BV, dtype=torch.bool).scatter_(-1, order_BV, mass_before_BV >= top_p)
    return scaled_BV.masked_fill(dropped_BV, -torch.inf)
