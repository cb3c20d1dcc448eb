"""The actor's gradient against a naive loss without padding, chunks or micro-batches, and how it is cut."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miniverl.config import AlgoConfig, LoraConfig, OptimConfig, RolloutConfig, RunError
from miniverl.config_algo import Divergence
from miniverl.metrics import Max, Mean, Metric, Sum
from miniverl.pack import micro_batches, pack, pack_rows
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference
from tests.tiny_models import config, ragged_batch, rollout, small_pieces, tiny, write_model

EIGHT = [(5, 9), (2, 6), (3, 6), (7, 2), (1, 7), (7, 1), (2, 8), (6, 3)]
T = 0.7
VOCAB = 30
"""Two rows of the heads are padding."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "student", tiny("qwen2", seed=1, tied=True)),
        write_model(root / "teacher", tiny("qwen3", seed=2)),
    )


@pytest.fixture(scope="module")
def gpt2s(tmp_path_factory):
    """Models that are float64 throughout: the Llama family's norms compute in float32 for any weights."""
    root = tmp_path_factory.mktemp("gpt2s")
    return (
        write_model(root / "student", tiny("gpt2", seed=1, tied=True)),
        write_model(root / "teacher", tiny("gpt2", seed=2)),
    )


def pair(
    models, dtype, top_k=None, micro_batch_tokens=4096, divergence: Divergence = "jsd", **options: Any
) -> tuple[Actor, Reference]:
    c = config(
        *models,
        dtype=dtype,
        algo=AlgoConfig(divergence=divergence, beta=0.3, teacher_top_k=top_k, loss_chunk_tokens=3),
        rollout=RolloutConfig(temperature=T),
        **options,
    )
    c = small_pieces(c, micro_batch_tokens)
    assert c.model.teacher is not None
    actor, reference = Actor(c, VOCAB, "cpu"), Reference(c, c.model.teacher, VOCAB, "cpu")
    actor.attach_teacher(reference.head)
    return actor, reference


def mean(metric: Metric) -> Mean:
    assert isinstance(metric, Mean)
    return metric


def gradient(actor, batches):
    actor.optimizer.adamw.zero_grad()
    metrics = [actor.backward(batch) for batch in batches]
    found = {name: p.grad.clone() for name, p in actor.trained.items() if p.grad is not None}
    actor.optimizer.adamw.zero_grad()
    return found, metrics


def same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def naive_jsd(models, batch):
    """Loss and gradients in float64, a sequence at a time, from all logits, by autograd."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64, attn_implementation="eager").eval()
        for m in models
    )
    total = torch.zeros((), dtype=torch.float64)
    sizes = batch.lengths_N.tolist()
    for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
        log_q = (student(ids[None]).logits[0, :-1, :VOCAB] / T).log_softmax(-1)[mask[1:] == 1]
        with torch.no_grad():
            log_p = (teacher(ids[None]).logits[0, :-1, :VOCAB] / T).log_softmax(-1)[mask[1:] == 1]
        log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
        total = total + (0.3 * log_p.exp() * (log_p - log_m) + 0.7 * log_q.exp() * (log_q - log_m)).sum()
    loss = total / batch.trained_tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize(("kind", "tolerance"), [("models", 1e-6), ("gpt2s", 1e-11)])
def test_distillation_is_the_naive_loss(kind, tolerance, request):
    models = request.getfixturevalue(kind)
    actor, reference = pair(models, "float64")
    batch = ragged_batch(EIGHT, vocab=VOCAB)
    found, (metrics,) = gradient(actor, [reference.score(batch)])
    loss, expected = naive_jsd(models, batch)
    same(found, expected, tolerance)
    logged = mean(metrics["actor/distillation_loss"])
    assert logged.count == batch.trained_tokens
    assert logged.total / logged.count == pytest.approx(loss, rel=1e-6)


def test_supervised_is_cross_entropy_at_temperature_one(gpt2s):
    actor = Actor(config(gpt2s[0], dtype="float64", rollout=RolloutConfig(temperature=T)), VOCAB, "cpu")
    batch = ragged_batch(EIGHT, vocab=VOCAB)
    found, _ = gradient(actor, [batch])
    student = AutoModelForCausalLM.from_pretrained(gpt2s[0], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    sizes = batch.lengths_N.tolist()
    for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
        logits = student(ids[None]).logits[0, :-1, :VOCAB]
        nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total = total + (nll * mask[1:]).sum()
    (total / batch.trained_tokens).backward()
    same(found, {name: p.grad for name, p in student.named_parameters()}, 1e-10)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [("models", "float32", 1e-6), ("gpt2s", "float64", 1e-12)]
)
@pytest.mark.parametrize("top_k", [None, 4])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(kind, dtype, tolerance, top_k, request):
    models = request.getfixturevalue(kind)
    actor, reference = pair(models, dtype, top_k)
    batch = reference.score(ragged_batch(EIGHT, vocab=VOCAB))
    whole, (metrics,) = gradient(actor, [batch])
    shards = {
        "1 x 8": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "2 x 4": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "3 + 5": [[6, 0, 3], [7, 5, 1, 2, 4]],
        "8 x 1": [[i] for i in range(8)],
        "more workers than rows": [[3], [], [0, 1, 2, 4, 5, 6, 7]],
    }
    largest = max(g.abs().max().item() for g in whole.values())
    for split in shards.values():
        found, parts = gradient(actor, [batch.select(share) for share in split])
        same(found, whole, tolerance * max(1.0, largest))
        for name, value in metrics.items():
            means = [mean(part[name]) for part in parts if name in part]
            assert sum(m.total for m in means) == pytest.approx(mean(value).total, rel=1e-5)
            assert sum(m.count for m in means) == mean(value).count
    for budget, pieces in ((14, [1] * 8), (28, [2, 3, 3]), (45, [3, 5]), (56, [4, 4]), (112, [8])):
        cut, _ = pair(models, dtype, top_k, micro_batch_tokens=budget)
        assert [len(piece) for piece in micro_batches(batch, budget)] == pieces
        same(gradient(cut, [batch])[0], whole, tolerance * max(1.0, largest))


@pytest.mark.parametrize("budget", [4096, 17])
def test_packed_rows_are_cross_entropy_of_each_document_alone(gpt2s, budget):
    """Pre-training on learned positions: packed rows in micro-batches, against a document at a time."""
    c = config(gpt2s[0], dtype="float64", algo=AlgoConfig(name="pretrain", loss_chunk_tokens=3))
    rollouts = dataclasses.replace(c.rollout, temperature=T)  # which must not matter
    data = dataclasses.replace(c.data, row_tokens=17)
    c = small_pieces(dataclasses.replace(c, rollout=rollouts, data=data), budget)
    random = torch.Generator().manual_seed(6)
    documents = [torch.randint(0, VOCAB, (n,), generator=random) for n in (9, 8, 4, 2, 2, 5, 17)]
    owners = (0, 0, 1, 1, 1, 1, 2)
    rollouts = [
        dataclasses.replace(rollout(d[:1].tolist(), d[1:].tolist()), uid=f"row{owner}")
        for d, owner in zip(documents, owners, strict=True)
    ]
    found, (metrics,) = gradient(Actor(c, VOCAB, "cpu"), [pack_rows(rollouts)])
    student = AutoModelForCausalLM.from_pretrained(gpt2s[0], dtype=torch.float64, attn_implementation="eager")
    total = torch.zeros((), dtype=torch.float64)
    for ids in documents:
        logits = student(ids[None]).logits[0, :-1, :VOCAB]
        total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    (total / 40).backward()
    assert mean(metrics["actor/nll_loss"]).count == 40
    assert mean(metrics["actor/nll_loss"]).total == pytest.approx(total.item())
    same(found, {name: p.grad for name, p in student.named_parameters()}, 1e-10)


def test_gradient_checkpointing_changes_no_gradient(models):
    plain, reference = pair(models, "float64")
    batch = reference.score(ragged_batch(EIGHT, vocab=VOCAB))
    saving, _ = pair(models, "float64", gradient_checkpointing=True)
    same(gradient(saving, [batch])[0], gradient(plain, [batch])[0], 1e-12)


def test_masked_rows_count_neither_above_nor_below_the_line(models):
    """Three of four rows are fully masked: loss and gradient are those of the fourth alone."""
    actor, reference = pair(models, "float64")
    rows = [
        rollout([1, 2], [3, 4, 5], [0, 0, 0], "length"),
        rollout([1, 2, 3], [6, 7], [1, 1]),
        rollout([4], [9, 9, 9, 9], [0, 0, 0, 0], "length"),
        rollout([1, 2], [], []),
    ]
    found, (with_masked,) = gradient(actor, [reference.score(pack(rows))])
    alone, (without,) = gradient(actor, [reference.score(pack(rows[1:2]))])
    same(found, alone, 1e-12)
    a, b = (mean(m["actor/distillation_loss"]) for m in (with_masked, without))
    assert (a.count, a.total) == (2, pytest.approx(b.total))


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_fully_masked_batch_changes_nothing(models, top_k):
    actor, reference = pair(models, "float32", top_k)
    batch = reference.score(pack([rollout([1, 2], [3, 4], [0, 0]), rollout([5], [6], [0])]))
    found, (metrics,) = gradient(actor, [batch])
    assert all(g.count_nonzero() == 0 for g in found.values())
    assert metrics["actor/distillation_loss"] == Mean(0.0, 0)
    before = actor.digest()
    actor.update(batch)
    assert actor.digest() == before


def test_prompts_and_completions_of_different_lengths_are_aligned(models):
    """Prompts of 2 and 5 tokens, completions of 3 and 1: as if each were alone and unpadded."""
    actor, _ = pair(models, "float32")
    rows = [rollout([3, 4], [5, 6, 7]), rollout([8, 9, 10, 11, 12], [13])]
    found = actor.log_probs(pack(rows), temperature=T)
    student = AutoModelForCausalLM.from_pretrained(models[0])
    for row, log_probs in zip(rows, found, strict=True):
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]], dtype=torch.long)
        with torch.no_grad():
            log_q = (student(ids).logits[0, :, :VOCAB] / T).log_softmax(-1)
        first = len(row.prompt_ids) - 1
        expected = torch.stack([log_q[first + t, token] for t, token in enumerate(row.response_ids.tolist())])
        torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)


def test_log_probs_come_back_in_the_batch_order_and_twice_the_same(models):
    actor, _ = pair(models, "float64", micro_batch_tokens=28)
    batch = ragged_batch(EIGHT, vocab=VOCAB)
    found = actor.log_probs(batch, temperature=1.3)
    assert [len(f) for f in found] == batch.trained_per_row()
    shuffled = actor.log_probs(batch.select([4, 0, 7, 2]), temperature=1.3)
    for a, b in zip(shuffled, (found[4], found[0], found[7], found[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, actor.log_probs(batch, temperature=1.3), strict=True):
        assert torch.equal(a, b)


def test_a_student_equal_to_its_teacher_learns_nothing(models):
    actor, reference = pair((models[1], models[1]), "float64")
    found, (metrics,) = gradient(actor, [reference.score(ragged_batch(EIGHT, vocab=VOCAB))])
    assert abs(mean(metrics["actor/distillation_loss"]).total) < 1e-12
    assert max(g.abs().max() for g in found.values()) < 1e-12


def test_a_step_follows_the_schedule_and_clips(models):
    actor, reference = pair(
        models,
        "float64",
        optim=OptimConfig(lr=0.01, warmup_steps=2, grad_clip=0.5, weight_decay=0.1),
        divergence="forward_kl",
    )
    batch = reference.score(ragged_batch(EIGHT, vocab=VOCAB))
    name = "model.layers.0.mlp.up_proj.weight"
    before = actor.trained[name].detach().clone()
    gradients, _ = gradient(actor, [batch])
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    metrics = actor.update(batch)
    assert metrics["actor/lr"] == Max(0.005)
    logged = metrics["actor/grad_norm"]
    assert isinstance(logged, Max) and logged.value == pytest.approx(norm)
    # AdamW's first step: decay, then lr · g / (|g| + eps), since both moments hold one clipped gradient.
    g = gradients[name] * min(1.0, 0.5 / (norm + 1e-6))
    expected = before * (1 - 0.005 * 0.1) - 0.005 * g / (g.abs() + 1e-8)
    torch.testing.assert_close(actor.trained[name].detach(), expected, rtol=1e-6, atol=1e-9)
    assert actor.optimizer.taken == 1 and all(p.grad is None for p in actor.trained.values())
    assert actor.update(batch)["actor/lr"] == Max(0.01)


def test_gradients_that_are_not_finite_take_no_step_and_three_in_a_row_end_the_run(models):
    actor, reference = pair(models, "float32")
    batch = reference.score(ragged_batch(EIGHT, vocab=VOCAB))
    actor.trained["model.norm.weight"].data[0] = torch.inf
    before = actor.digest()
    for _ in range(2):
        skipped = actor.update(batch)
        assert skipped["actor/skipped_updates"] == Sum(1.0) and "actor/grad_norm" not in skipped
    with pytest.raises(RunError, match="optimizer step 3: the gradient's norm is nan, 3 times in a row"):
        actor.update(batch)
    assert actor.digest() == before and not actor.optimizer.adamw.state
    assert all(p.grad is None for p in actor.trained.values())


def test_save_and_load_go_on_bit_for_bit(models, tmp_path):
    optim = OptimConfig(lr=0.01, schedule="cosine", warmup_steps=1)
    actor, reference = pair(models, "float32", optim=optim)
    batches = [reference.score(ragged_batch(EIGHT, seed=s, vocab=VOCAB)) for s in range(4)]
    for batch in batches[:2]:
        actor.update(batch)
    actor.save(str(tmp_path))
    noise = torch.rand(3)
    for batch in batches[2:]:
        actor.update(batch)
    again, _ = pair(models, "float32", optim=optim)
    again.load(str(tmp_path))
    assert torch.equal(torch.rand(3), noise)
    for batch in batches[2:]:
        again.update(batch)
    assert (again.optimizer.taken, again.digest()) == (actor.optimizer.taken, actor.digest())


def test_only_the_adapter_is_trained_and_saved(models, tmp_path):
    actor, reference = pair(models, "float32", lora=LoraConfig(rank=2, alpha=4.0), optim=OptimConfig(lr=0.1))
    assert all("lora_" in name for name in actor.trained)
    frozen = {n: p.clone() for n, p in actor.model.causal_lm.named_parameters() if n not in actor.trained}
    before = actor.digest()
    batch = reference.score(ragged_batch(EIGHT, vocab=VOCAB))
    actor.update(batch)
    actor.update(batch)
    assert actor.digest() != before
    for name, p in actor.model.causal_lm.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name])
            assert p.grad is None
    actor.save(str(tmp_path))
    again, _ = pair(models, "float32", lora=LoraConfig(rank=2, alpha=4.0))
    again.load(str(tmp_path))
    assert again.digest() == actor.digest()


def test_distillation_without_targets_is_refused(models):
    actor, _ = pair(models, "float32")
    with pytest.raises(ValueError, match="needs the teacher's targets"):
        actor.backward(ragged_batch(EIGHT, vocab=VOCAB))


def test_no_graph_outlives_its_micro_batch(models, monkeypatch):
    """Twenty micro-batches leave as many live losses as one: metrics are numbers, not graphs."""
    import miniverl.workers.actor as module

    actor, reference = pair(models, "float32", micro_batch_tokens=14)
    batch = reference.score(ragged_batch([(5, 9)] * 20, vocab=VOCAB))
    seen, most = [], 0
    real = module.token_loss

    def watched(*args, **kwargs):
        nonlocal most
        result = real(*args, **kwargs)
        seen.append(weakref.ref(result.loss))
        most = max(most, sum(r() is not None for r in seen))
        return result

    monkeypatch.setattr(module, "token_loss", watched)
    metrics = actor.backward(batch)
    gc.collect()
    assert len(seen) == 20 and most <= 2 and not any(r() is not None for r in seen)
    assert all(isinstance(x, float | int) for m in metrics.values() for x in dataclasses.astuple(m))
