"""The teacher: frozen, in eval mode, never on the tape, and apart from the student."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from miniverl.config import AlgoConfig, RolloutConfig
from miniverl.types import HiddenTargets, TopKTargets
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference
from tests.tiny_models import config, ragged_batch, small_pieces, tiny, write_model

SIZES = [(5, 6), (2, 1), (3, 6), (7, 2), (1, 0)]
VOCAB = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "student", tiny("llama", seed=1)),
        write_model(root / "teacher", tiny("qwen2", seed=2)),
    )


def reference_of(models, top_k=None, temperature=1.0, micro_batch_tokens=4096):
    c = config(
        *models,
        algo=AlgoConfig(teacher_top_k=top_k, loss_chunk_tokens=4),
        rollout=RolloutConfig(temperature=temperature),
    )
    c = small_pieces(c, micro_batch_tokens)
    assert c.model.teacher is not None
    return c, Reference(c, c.model.teacher, VOCAB, "cpu")


def naive_log_probs(directory, batch, temperature):
    """`[M, V]` over the real vocabulary, a sequence at a time, unpadded."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    sizes, parts = batch.lengths_N.tolist(), []
    for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1, :VOCAB]
        parts.append((logits / temperature).log_softmax(-1)[mask[1:] == 1])
    return torch.cat(parts)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("micro_batch_tokens", [12, 4096])
def test_targets_are_the_teachers_own_distribution_at_the_runs_temperature(
    models, temperature, micro_batch_tokens
):
    batch = ragged_batch(SIZES, vocab=VOCAB)
    expected = naive_log_probs(models[1], batch, temperature)

    _, full = reference_of(models, None, temperature, micro_batch_tokens)
    targets = full.score(batch).targets
    assert isinstance(targets, HiddenTargets)
    rebuilt = (targets.hidden_MH @ full.head.weight_VH.T / temperature).log_softmax(-1)
    torch.testing.assert_close(rebuilt, expected, rtol=1e-5, atol=1e-5)

    _, top = reference_of(models, 5, temperature, micro_batch_tokens)
    targets = top.score(batch).targets
    assert isinstance(targets, TopKTargets)
    torch.testing.assert_close(targets.log_probs_MK, expected.topk(5).values, rtol=1e-5, atol=1e-5)
    at_ids = expected.gather(-1, targets.ids_MK)
    torch.testing.assert_close(targets.log_probs_MK, at_ids, rtol=1e-5, atol=1e-5)
    assert int(targets.ids_MK.max()) < VOCAB


def test_scoring_a_shard_is_the_shard_of_the_scores(models):
    _, reference = reference_of(models, 3)
    batch = ragged_batch(SIZES, vocab=VOCAB)
    assert len(reference.score(batch.select([]))) == 0  # the share of a worker too many
    for share in ([2, 0], [4]):
        apart = reference.score(batch.select(share)).targets
        cut = reference.score(batch).select(share).targets
        assert isinstance(apart, TopKTargets) and isinstance(cut, TopKTargets)
        torch.testing.assert_close(apart.log_probs_MK, cut.log_probs_MK)


def test_the_teacher_is_frozen_in_eval_mode_and_the_student_is_untouched_by_it(models):
    c, _ = reference_of(models)
    actor = Actor(c, VOCAB, "cpu")
    student = actor.digest()
    assert c.model.teacher is not None
    reference = Reference(c, c.model.teacher, VOCAB, "cpu")
    teacher = reference.digest()
    actor.attach_teacher(reference.head)
    assert actor.digest() == student != teacher
    batch = ragged_batch(SIZES, vocab=VOCAB)
    scored = reference.score(batch)
    assert actor.digest() == student
    for _ in range(3):
        actor.update(scored)
        scored = reference.score(batch)
    assert actor.digest() != student
    assert reference.digest() == teacher
    lm = reference.model.causal_lm
    assert not any(module.training for module in lm.modules())
    assert not any(p.requires_grad or p.grad is not None for p in lm.parameters())
    assert isinstance(scored.targets, HiddenTargets) and not scored.targets.hidden_MH.requires_grad
