"""The cached engine against the reference engine, both against the trainer's log-probs and plain numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from miniverl.config import RolloutConfig
from miniverl.pack import pack
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Completion, Request, Sampling
from miniverl.workers.rollout.hf_cached import HfCached
from miniverl.workers.rollout.hf_reference import HfReference
from miniverl.workers.rollout.responses import Responses
from tests.tiny_models import FAMILY, KINDS, VOCAB, config, loaded, rollout, tiny, write_model

DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-k": {"top_k": 4, "temperature": 1.3},
    "top-p": {"top_p": 0.8},
}
REQUESTS = [
    Request("a#0", (3, 7, 5), (0, 1, 2)),
    Request("b#0", (9,)),
    Request("c#0", (1, 2, 3, 4, 5, 6, 7), (1, 3)),
    Request("d#0", (30, 0), (0, 1)),
]


def sampling(**options: Any) -> Sampling:
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 10,
        "stop_ids": (2, 11),
        "seed": 5,
    }
    return Sampling(**{**neutral, **options})


def engines(model, rows=256):
    return HfCached(model, rows, cuda_graphs=True), HfReference(model, rows)


def flat(answers):
    return [completion for answer in answers for completion in answer]


def same(a, b, tolerance=1e-5):
    for one, other in zip(flat(a), flat(b), strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=tolerance)


@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_cached_engine_gives_what_the_reference_gives(kind, draw):
    cached, reference = engines(loaded(tiny(kind)))
    answers = cached.generate(REQUESTS, sampling(**DRAWS[draw]))
    assert [len(a) for a in answers] == [3, 1, 2, 2]
    same(answers, reference.generate(REQUESTS, sampling(**DRAWS[draw])))
    assert bool(cached.notes) == (kind not in FAMILY)
    assert any(len(c.token_ids) > 1 for c in flat(answers))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_one_length_and_a_single_prompt(kind):
    cached, reference = engines(loaded(tiny(kind, seed=3)))
    for requests in ([Request("a", (4, 5, 6), (0, 1)), Request("b", (7, 8, 9))], [Request("a", (4,))]):
        same(cached.generate(requests, sampling()), reference.generate(requests, sampling()))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_neither_order_nor_batch_size_changes_a_sample(kind):
    model = loaded(tiny(kind))
    together = HfCached(model, 256, False).generate(REQUESTS, sampling())
    for rows in (1, 3, 5):
        same(HfCached(model, rows, False).generate(REQUESTS, sampling()), together)
        same(HfReference(model, rows).generate(REQUESTS, sampling()), together)
    order = [2, 0, 3, 1]
    shuffled = HfCached(model, 256, False).generate([REQUESTS[i] for i in order], sampling())
    same(shuffled, [together[i] for i in order])
    alone = HfCached(model, 256, False).generate([Request("c#0", REQUESTS[2].token_ids, (3,))], sampling())
    same(alone, [[together[2][1]]])


@pytest.mark.parametrize("seed", [0, 7])
def test_samples_of_a_prompt_differ_and_a_rerun_does_not(seed):
    engine = HfCached(loaded(tiny("llama", scale=5)), 256, False)
    requests = [Request("a#0", (3, 7), (0, 1, 2, 3)), Request("a#1", (3, 7), (0, 1, 2, 3))]
    first = engine.generate(requests, sampling(seed=seed, stop_ids=()))
    assert len({c.token_ids for c in flat(first)}) == 8  # also the same text as another occurrence
    again = HfCached(loaded(tiny("llama", scale=5)), 256, False)
    assert again.generate(requests, sampling(seed=seed, stop_ids=())) == first
    assert engine.generate(requests, sampling(seed=seed + 1, stop_ids=())) != first


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_any_stop_id_ends_a_response_and_is_its_last_token(kind):
    cached, _ = engines(loaded(tiny(kind, scale=3)))
    requests = [Request(f"p{i}", (3, 7), (0, 1)) for i in range(12)]
    stop = {4, 9, 17, 21}
    free = flat(cached.generate(requests, sampling(stop_ids=(), max_new_tokens=12)))
    stopped = flat(cached.generate(requests, sampling(stop_ids=tuple(stop), max_new_tokens=12)))
    assert {c.finish for c in stopped} == {"stop", "length"}
    assert len({c.token_ids[-1] for c in stopped if c.finish == "stop"}) > 1
    for whole, cut in zip(free, stopped, strict=True):
        end = next((t + 1 for t, token in enumerate(whole.token_ids) if token in stop), 12)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.finish == ("stop" if whole.token_ids[end - 1] in stop else "length")
        np.testing.assert_allclose(cut.log_probs, whole.log_probs[:end], atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_finished_rows_leave_the_batch(kind):
    cached, _ = engines(loaded(tiny(kind, scale=3)))
    widths, step = [], cached.decoder.step
    cached.decoder.step = lambda ids, slot: (widths.append(len(ids)), step(ids, slot))[1]  # type: ignore[method-assign]
    requests = [Request(f"p{i}", (3, 7, 9)[: 1 + i % 3], (0, 1)) for i in range(12)]
    answers = flat(cached.generate(requests, sampling(stop_ids=(4, 9, 17, 21), max_new_tokens=12)))
    assert widths[0] >= 18 and widths[-1] < widths[0] // 2
    assert widths == sorted(widths, reverse=True)
    for t, width in enumerate(widths, 1):
        alive = sum(len(c.token_ids) > t for c in answers)
        assert alive <= width <= alive / (1 - 0.125) + 1


@pytest.mark.parametrize("engine", ["hf_cached", "hf_reference"])
def test_no_budget_no_requests(engine):
    cached, reference = engines(loaded(tiny("llama")))
    e = cached if engine == "hf_cached" else reference
    assert e.generate([], sampling()) == []
    assert e.generate([Request("a", (1,), (0, 1))], sampling(max_new_tokens=0)) == [
        [Completion((), (), "length")] * 2
    ]


def numpy_log_probs(model, prompt, completion, s):
    """Of the distribution drawn from, by plain numpy over an unpadded full forward pass."""
    ids, found = list(prompt), []
    for token in completion.token_ids:
        with torch.no_grad():
            z = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        p = np.exp((z - z.max()) / s.temperature)
        if s.top_k:
            p[p < np.sort(p)[-s.top_k]] = 0
        p /= p.sum()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s.top_p]] = 0
        found.append(np.log(p[token] / p.sum()))
        ids.append(token)
    return found


@pytest.mark.parametrize("draw", ["T=0.7", "top-k", "top-p"])
def test_log_probs_are_of_the_distribution_drawn_from(draw):
    model, s = tiny("qwen2"), sampling(**DRAWS[draw])
    for engine in engines(loaded(model)):
        for request, answer in zip(REQUESTS, engine.generate(REQUESTS, s), strict=True):
            for completion in answer:
                expected = numpy_log_probs(model, request.token_ids, completion, s)
                np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_the_trainers(kind, temperature, tmp_path):
    """Log-prob conformance: engine and trainer agree on every sampled token, with a head of 2 padded rows."""
    vocab = VOCAB - 2
    c = config(write_model(tmp_path, tiny(kind, scale=10)), rollout=RolloutConfig(temperature=temperature))
    actor = Actor(c, vocab, "cpu")
    requests = [r for r in REQUESTS if max(r.token_ids) < vocab]
    for engine in engines(actor.model):
        answers = engine.generate(requests, sampling(temperature=temperature))
        pairs = [(r, a) for r, answer in zip(requests, answers, strict=True) for a in answer]
        trainer = actor.log_probs(pack([rollout(r.token_ids, a.token_ids) for r, a in pairs]), temperature)
        for (_, a), expected in zip(pairs, trainer, strict=True):
            np.testing.assert_allclose(a.log_probs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi"])
@pytest.mark.parametrize("draw", ["greedy", "T=1"])
def test_the_padded_vocabulary_is_never_sampled_nor_normalised_over(kind, draw):
    """A head of 32 rows under a tokenizer of 28 that would all but always choose id 30."""
    model = tiny(kind)
    head = model.get_output_embeddings()
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([[3, 7, 5]])).last_hidden_state[0, -1]
        head.weight[30] = 5 * hidden / hidden.norm()  # type: ignore[index, operator]
        assert model(torch.tensor([[3, 7, 5]])).logits[0, -1].argmax() == 30
    for engine in engines(loaded(model, vocab=28)):
        answers = flat(engine.generate([Request("a", (3, 7, 5), tuple(range(8)))], sampling(**DRAWS[draw])))
        assert all(token < 28 for c in answers for token in c.token_ids)
        if draw == "T=1":
            with torch.no_grad():
                log_q = model(torch.tensor([[3, 7, 5]])).logits[0, -1, :28].log_softmax(-1)
            for c in answers:
                assert c.log_probs[0] == pytest.approx(log_q[c.token_ids[0]].item(), abs=1e-5)


def test_a_generation_config_of_the_model_changes_nothing():
    """No library default filters what is called on-policy."""
    model = tiny("llama", scale=5)
    before = HfCached(loaded(model), 256, False).generate(REQUESTS, sampling())
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=9.0, eos_token_id=3
    )
    assert HfCached(loaded(model), 256, False).generate(REQUESTS, sampling()) == before
    assert HfReference(loaded(model), 256).generate(REQUESTS, sampling()) is not None


def test_the_engine_reads_weights_that_changed_in_place():
    model = tiny("llama")
    engine = HfCached(loaded(model), 256, False)
    before = engine.generate(REQUESTS, sampling())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    after = engine.generate(REQUESTS, sampling())
    assert after != before
    same(after, HfReference(loaded(model), 256).generate(REQUESTS, sampling()))


def test_a_row_takes_no_token_after_its_last():
    r = Responses(3, sampling(max_new_tokens=3))
    assert not r.append([0, 1, 2], [5, 6, 7], [-0.1] * 3)
    assert r.append([0, 1, 2], [11, 6, 7], [-0.2] * 3)
    assert r.live == [1, 2]
    assert not r.append([0], [9], [-0.3])
    assert r.append([1, 2], [2, 7], [-0.4] * 2) and r.live == []
    assert [(c.token_ids, c.finish) for c in r.completions()] == [
        ((5, 11), "stop"),
        ((6, 6, 2), "stop"),
        ((7, 7, 7), "length"),
    ]
