"""The embedded engine: batched sampling over a key/value cache, with the trainer's own module.

A prompt is prefilled once for all its samples; finished rows leave the batch; weights are never copied,
because the module *is* the trainer's. How a token's hidden state comes about is `decoder`'s (and on CUDA
`cuda_graphs`') business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miniverl.models.load import LoadedModel
from miniverl.workers.rollout.base import Completion, Request, Sampling
from miniverl.workers.rollout.cuda_graphs import GraphDecoder
from miniverl.workers.rollout.decoder import Decoder, FamilyDecoder, ModuleDecoder, family_of
from miniverl.workers.rollout.responses import Responses, rows_of
from miniverl.workers.rollout.sampling import draw, uniforms

COMPACT_SHARE = 0.125
"""Finished rows leave once they are this share of the batch: a compaction copies the cache, an idle row
costs compute."""


class HfCached:
    name = "hf_cached"
    seeded = True

    def __init__(self, model: LoadedModel, max_batch_rows: int, cuda_graphs: bool) -> None:
        self.model = model
        self.max_batch_rows = max_batch_rows
        self.notes: tuple[str, ...] = ()
        self.decoder: Decoder
        model_type = model.causal_lm.config.model_type
        if not family_of(model):
            self.decoder = ModuleDecoder(model)
            self.notes = (
                f"hf_cached: {model_type} is decoded through its own forward pass (the faster written-out "
                "block covers Llama, Qwen2, Qwen3 and Mistral without a sliding window).",
            )
        elif cuda_graphs and model.device.type == "cuda":
            self.decoder = GraphDecoder(FamilyDecoder(model))
            # A capture that fails is to be told at start, not found out.
            self.generate([Request("capture", (0,))], Sampling(0.0, 0, 1.0, 2, (), 0))
        else:
            self.decoder = FamilyDecoder(model)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        done: list[list[Completion]] = []
        for part in self._parts(requests):
            completions = iter(self._generate(part, sampling))
            done += [[next(completions) for _ in request.samples] for request in part]
        if self.notes == () and isinstance(self.decoder, GraphDecoder):
            self.notes = self.decoder.notes
        return done

    def _parts(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Requests in the order given, cut where the next would exceed `max_batch_rows` (one alone may)."""
        parts: list[list[Request]] = []
        rows = 0
        for request in requests:
            if not parts or rows + len(request.samples) > self.max_batch_rows:
                parts.append([])
                rows = 0
            parts[-1].append(request)
            rows += len(request.samples)
        return parts

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        rows = rows_of(requests)
        responses = Responses(len(rows), sampling)
        if not responses.live:
            return responses.completions()
        device = self.model.device
        noise_BT = torch.from_numpy(
            uniforms(sampling.seed, [(r.uid, r.sample) for r in rows], sampling.max_new_tokens)
        )
        noise_TB = noise_BT.T.contiguous().to(device)
        ids_BP, pad_B = _left_padded(requests, device)
        length = ids_BP.shape[1]
        repeats = torch.tensor([len(r.samples) for r in requests], device=device)
        hidden_BH = self.decoder.prefill(ids_BP, pad_B, repeats, length + sampling.max_new_tokens)
        batch = list(range(len(rows)))
        for step in range(sampling.max_new_tokens):
            ids_B, log_probs_B = draw(self._logits(hidden_BH), sampling, noise_TB[step])
            responses.append(batch, ids_B.tolist(), log_probs_B.tolist())
            if not responses.live:
                break
            if len(batch) - len(responses.live) >= COMPACT_SHARE * len(batch):
                live = set(responses.live)
                stay = torch.tensor([i for i, row in enumerate(batch) if row in live], device=device)
                batch = [row for row in batch if row in live]
                self.decoder.keep(stay)
                ids_B, noise_TB = ids_B[stay], noise_TB[:, stay]
            hidden_BH = self.decoder.step(ids_B, length + step)
        return responses.completions()

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        head = self.model.head
        return torch.nn.functional.linear(hidden_BH, head.weight_VH, head.bias_V)


def _left_padded(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, P]` padded on the left (with 0, never attended to) and the padding's width `[B]`."""
    longest = max(len(r.token_ids) for r in requests)
    ids = [[0] * (longest - len(r.token_ids)) + list(r.token_ids) for r in requests]
    return torch.tensor(ids, device=device), torch.tensor(
        [longest - len(r.token_ids) for r in requests], device=device
    )
