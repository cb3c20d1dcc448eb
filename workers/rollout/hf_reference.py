"""The oracle: every token from a full forward pass over prompt and response so far, no cache.

Slow on purpose: it shares nothing with `hf_cached` but the draw, so that one can prove the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from miniverl.models.load import LoadedModel
from miniverl.workers.rollout.base import Completion, Request, Sampling
from miniverl.workers.rollout.responses import Responses, rows_of
from miniverl.workers.rollout.sampling import draw, uniforms


class HfReference:
    name = "hf_reference"
    seeded = True
    notes: tuple[str, ...] = ()

    def __init__(self, model: LoadedModel, max_batch_rows: int) -> None:
        self.model = model
        self.max_batch_rows = max_batch_rows

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        rows = rows_of(requests)
        done: list[Completion] = []
        for start in range(0, len(rows), self.max_batch_rows):
            part = rows[start : start + self.max_batch_rows]
            noise_BT = uniforms(sampling.seed, [(r.uid, r.sample) for r in part], sampling.max_new_tokens)
            done += self._generate([list(r.token_ids) for r in part], noise_BT, sampling)
        by_request = iter(done)
        return [[next(by_request) for _ in r.samples] for r in requests]

    def _generate(
        self, sequences: list[list[int]], noise_BT: np.ndarray, sampling: Sampling
    ) -> list[Completion]:
        responses = Responses(len(sequences), sampling)
        for step in range(sampling.max_new_tokens):
            live = responses.live
            if not live:
                break
            longest = max(len(sequences[b]) for b in live)
            ids = [sequences[b] + [0] * (longest - len(sequences[b])) for b in live]
            hidden = self.model.backbone(
                input_ids=torch.tensor(ids, device=self.model.device), use_cache=False
            ).last_hidden_state
            last = torch.tensor([len(sequences[b]) - 1 for b in live], device=hidden.device)
            hidden_BH = hidden[torch.arange(len(live), device=hidden.device), last]
            head = self.model.head
            logits_BV = torch.nn.functional.linear(hidden_BH, head.weight_VH, head.bias_V)
            noise_B = torch.from_numpy(noise_BT[live, step]).to(hidden.device)
            tokens, log_probs = draw(logits_BV, sampling, noise_B)
            for b, token in zip(live, tokens.tolist(), strict=True):
                sequences[b].append(token)
            responses.append(live, tokens.tolist(), log_probs.tolist())
        return responses.completions()
