"""What the captured graphs compute, on a CPU: the static step, and its cache's book-keeping uncaptured."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miniverl.workers.rollout import cuda_graphs
from miniverl.workers.rollout.base import Request, Sampling
from miniverl.workers.rollout.cuda_graphs import GraphDecoder, static_step
from miniverl.workers.rollout.decoder import FamilyDecoder, ModuleDecoder, family_of
from miniverl.workers.rollout.hf_cached import HfCached
from miniverl.workers.rollout.hf_reference import HfReference
from tests.tiny_models import FAMILY, KINDS, VOCAB, loaded, tiny

SAMPLING = Sampling(1.0, 0, 1.0, max_new_tokens=12, stop_ids=(4, 9, 17, 21), seed=1)


def test_the_written_out_block_serves_only_its_family():
    assert {kind: family_of(loaded(tiny(kind))) for kind in KINDS} == {kind: kind in FAMILY for kind in KINDS}
    windowed = tiny("qwen2")
    windowed.config.layer_types = ["full_attention", "sliding_attention"]
    assert not family_of(loaded(windowed))


@torch.inference_mode()
@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 2, 4)], ids=["even", "ragged"])
def test_the_static_step_is_the_step(kind, pads):
    """With idle rows beyond the real ones, and old numbers in places that no row has written yet."""
    model, prompt, rows, slots = loaded(tiny(kind)), 5, 4, 16
    torch.manual_seed(0)
    ids_BP, pad_B = torch.randint(0, VOCAB, (3, prompt)), torch.tensor(pads)
    inner = FamilyDecoder(model)
    inner.prefill(ids_BP, pad_B, torch.tensor([1, 2, 1]), prompt + 6)
    shape = (rows + 3, inner.kv_heads, slots, inner.head_dim)
    keys, values = ([9 * torch.randn(shape) for _ in inner.layers] for _ in range(2))
    for static, own in zip([*keys, *values], [*inner.keys, *inner.values], strict=True):
        static[:rows, :, : own.shape[2]] = own
    static_pad = torch.cat([inner.pad_B, torch.zeros(3, dtype=torch.long)])
    for slot in range(prompt, prompt + 6):
        ids_B = torch.randint(0, VOCAB, (rows,))
        expected = inner.step(ids_B, slot)
        got = static_step(
            inner, keys, values, torch.cat([ids_B, ids_B[:3]]), static_pad, torch.tensor([slot])
        )
        torch.testing.assert_close(got[:rows], expected, rtol=1e-5, atol=1e-5)
        assert got.isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_and_its_steps_are_the_full_forward_pass(kind):
    model = loaded(tiny(kind))
    decoder = FamilyDecoder(model) if kind in FAMILY else ModuleDecoder(model)
    sequences = [[3, 7, 5, 9, 1, 8], [4, 2], [6, 6, 6, 1]]
    ids_BP = torch.tensor([[0] * (6 - len(s)) + s for s in sequences])
    pad_B = torch.tensor([6 - len(s) for s in sequences])
    hidden = decoder.prefill(ids_BP, pad_B, torch.tensor([1, 1, 1]), 10)
    for slot in range(6, 10):
        for row, s in zip(hidden, sequences, strict=True):
            expected = model.backbone(input_ids=torch.tensor([s])).last_hidden_state[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
        tokens = [(7 * slot + i) % VOCAB for i in range(3)]
        for s, token in zip(sequences, tokens, strict=True):
            s.append(token)
        hidden = decoder.step(torch.tensor(tokens), slot)
        if slot == 7:  # the middle row leaves
            decoder.keep(torch.tensor([0, 2]))
            hidden, sequences = hidden[[0, 2]], [sequences[0], sequences[2]]
            break


@dataclass
class Uncaptured:
    """Stands for a CUDA graph: replaying it runs the static step over the same buffers."""

    run: Any

    def replay(self) -> None:
        self.run()


class UncapturedDecoder(GraphDecoder):
    captures = 0

    def _capture(self, rows: int) -> cuda_graphs._Captured:
        self.captures += 1
        keys, values = [k[:rows] for k in self._keys], [v[:rows] for v in self._values]
        ids_B, pad_B = torch.zeros(2, rows, dtype=torch.long)
        slot = torch.zeros(1, dtype=torch.long)
        hidden: Tensor = static_step(self.inner, keys, values, ids_B, pad_B, slot)
        return cuda_graphs._Captured(
            Uncaptured(  # type: ignore[arg-type]
                lambda: hidden.copy_(static_step(self.inner, keys, values, ids_B, pad_B, slot))
            ),
            ids_B,
            pad_B,
            slot,
            hidden,
        )


def flat(answers):
    return [completion for answer in answers for completion in answer]


def same(a, b):
    for one, other in zip(flat(a), flat(b), strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


def test_buckets_compaction_and_a_growing_cache_change_no_sample(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SLOT_BUCKET", 16)
    model = loaded(tiny("qwen3", scale=3))
    engine, reference = HfCached(model, 256, False), HfReference(model, 256)
    decoder = UncapturedDecoder(FamilyDecoder(model))
    engine.decoder = decoder
    small = [Request(f"s{i}", (3, 7, 9)[: 1 + i % 3], (0,)) for i in range(3)]
    large = [Request(f"l{i}", (3, 7, 9, 1, 5)[: 1 + i % 5], (0, 1, 2)) for i in range(7)]
    long = [Request("x", tuple(range(8)) * 3, (0, 1))]
    for requests in (small, large, small, long, large):
        same(engine.generate(requests, SAMPLING), reference.generate(requests, SAMPLING))
    captured = decoder.captures
    same(engine.generate(large, SAMPLING), reference.generate(large, SAMPLING))
    assert decoder.captures == captured  # every bucket is captured once
    assert engine.notes == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the capture works here")
def test_a_failed_capture_is_noted_and_steps_run_uncaptured():
    model = loaded(tiny("llama", scale=3))
    engine = HfCached(model, 256, False)
    engine.decoder = GraphDecoder(FamilyDecoder(model))
    requests = [Request(f"r{i}", (3, 7, 9)[: 1 + i % 3], (0, 1)) for i in range(6)]
    for _ in range(2):
        same(engine.generate(requests, SAMPLING), HfReference(model, 256).generate(requests, SAMPLING))
    assert len(engine.notes) == 1 and "without CUDA graphs" in engine.notes[0]
