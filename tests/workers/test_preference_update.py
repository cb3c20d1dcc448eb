"""The preference update: against a naive loss in float64, however it is cut, and what it refuses."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from miniverl.config import AlgoConfig, ConfigError, LoraConfig
from miniverl.config_supervised import PreferenceConfig, PreferenceLoss
from miniverl.metrics import Mean, Sum, finalize, merge
from miniverl.pack import micro_batches, pack_together, shares
from miniverl.types import Batch, PreferenceTargets
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference
from tests.tiny_models import config, rollout, tiny, write_model

VOCAB = 30
PAIRS = [((5, 9), (5, 2)), ((2, 6), (2, 7)), ((3, 1), (3, 6)), ((7, 2), (7, 3)), ((1, 7), (1, 7))]
"""(prompt, response) lengths of the chosen and of the rejected sequence."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student and another reference, float64 throughout."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(i), tiny("gpt2", seed=i, tied=True)) for i in (1, 2)]


def settings(student: str, preference: PreferenceConfig, budget: int = 4096, **options: Any):
    c = config(
        student,
        dtype="float64",
        algo=AlgoConfig(name="preference", preference=preference, loss_chunk_tokens=3),
        **options,
    )
    return replace(
        c,
        data=replace(c.data, max_prompt_length=5),
        rollout=replace(c.rollout, max_response_length=9),
        trainer=replace(c.trainer, micro_batch_tokens=budget),
    )


def actor_of(student: str, preference: PreferenceConfig, budget: int = 4096, **options: Any) -> Actor:
    return Actor(settings(student, preference, budget, **options), VOCAB, "cpu")


def pairs() -> Batch:
    random = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=random).tolist()

    rows = []
    for i, sides in enumerate(PAIRS):
        for sample, (prompt, response) in enumerate(sides):
            mask = [1] * response
            mask[0] = 0 if response > 2 else 1
            rows.append(replace(rollout(ids(prompt), ids(response), mask), uid=f"p{i}#0", sample=sample))
    return pack_together(rows)


def with_targets(reference: str, kl: float = 0.3) -> Batch:
    batch = pairs()
    c = settings(reference, PreferenceConfig())
    ref = torch.cat(Reference(c, c.model.student, VOCAB, "cpu", "student").log_probs(batch, 1.0))
    preferred = torch.tensor([row % 2 == 0 for row in batch.rows])
    preferred_M = preferred.repeat_interleave(torch.tensor(batch.trained_per_row()))
    return replace(batch, targets=PreferenceTargets(preferred_M, ref, kl))


def gradient(actor: Actor, batches: list[Batch]):
    actor.optimizer.adamw.zero_grad()
    metrics = [actor.backward(batch) for batch in batches]
    return {name: p.grad.clone() for name, p in actor.trained.items() if p.grad is not None}, metrics


def sequence_log_prob(model, ids, mask):
    """Σ and number of trained tokens, a sequence alone, from all logits."""
    log_q = model(ids[None]).logits[0, :-1, :VOCAB].log_softmax(-1)
    taken = log_q[torch.arange(len(ids) - 1), ids[1:]]
    return (taken * mask[1:]).sum(), int(mask[1:].sum())


def naive(student: str, reference: str, p: PreferenceConfig, kl: float = 0.3):
    """The mean loss with its gradient by autograd, from formulas as the papers print them."""
    own, ref = (
        AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64, attn_implementation="eager").eval()
        for m in (student, reference)
    )
    batch = pairs()
    sizes = batch.lengths_N.tolist()
    rows = list(zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True))
    losses = []
    with torch.no_grad():
        refs = [sequence_log_prob(ref, *row)[0] for row in rows]
    for i in range(0, len(rows), 2):
        (w, nw), (x, nx) = (sequence_log_prob(own, *row) for row in rows[i : i + 2])
        dw, dx = w - refs[i], x - refs[i + 1]
        if p.length_normalised:
            dw, dx = dw / nw, dx / nx
        h = dw - dx
        if p.loss == "dpo":
            e = p.label_smoothing
            right, wrong = (torch.log(torch.sigmoid(s * p.beta * h)) for s in (1, -1))
            losses.append(-(1 - e) * right - e * wrong)
        elif p.loss == "ipo":
            losses.append((h - 0.5 / p.beta) ** 2)
        elif p.loss == "simpo":
            losses.append(-torch.log(torch.sigmoid(p.beta / nw * w - p.beta / nx * x - p.margin)))
        elif p.loss == "orpo":
            pw, px = torch.exp(w / nw), torch.exp(x / nx)
            ratio = torch.log((pw / (1 - pw)) / (px / (1 - px)))
            losses.append(-w / nw - p.beta * torch.log(torch.sigmoid(ratio)))
        else:
            z = p.beta * kl
            losses.append(p.desirable_weight * (1 - torch.sigmoid(p.beta * dw - z)))
            losses.append(p.undesirable_weight * (1 - torch.sigmoid(z - p.beta * dx)))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: g.grad for name, g in own.named_parameters() if g.grad is not None}


CASES = [
    PreferenceConfig("dpo", beta=0.2),
    PreferenceConfig("dpo", beta=0.2, label_smoothing=0.1, length_normalised=True),
    PreferenceConfig("ipo", beta=0.2),
    PreferenceConfig("ipo", beta=0.2, length_normalised=True),
    PreferenceConfig("simpo", beta=2.0, margin=0.5),
    PreferenceConfig("orpo", beta=0.1),
    PreferenceConfig("kto", beta=0.2, desirable_weight=1.5),
]


@pytest.mark.parametrize("preference", CASES, ids=lambda p: f"{p.loss}{'/len' * p.length_normalised}")
def test_the_update_is_the_naive_loss_however_it_is_cut(models, preference):
    batch = with_targets(models[1])
    loss, expected = naive(models[0], models[1], preference)
    lone = preference.loss == "kto"
    cuts: list[tuple[int, list[list[int]]]] = [
        (4096, [list(range(10))]),
        (28, [list(range(10))]),  # one pair at a time: the longest takes 2 × 14 tokens
        (45, [list(range(10))]),
        (4096, [[6, 7, 0, 1], [4, 5], [2, 3, 8, 9]]),
        (4096, [[1, 0], [7, 2, 3, 6], [9, 8, 4, 5]]),
    ]
    if lone:
        cuts.append((4096, [[i] for i in range(10)]))
    for budget, parts in cuts:
        pieces = [batch.select(part) for part in parts]
        found, metrics = gradient(actor_of(models[0], preference, budget), pieces)
        merged = merge(metrics)
        total = merged["actor/preference_loss"]
        assert isinstance(total, Sum) and total.value == pytest.approx(loss, rel=1e-10)
        count = merged["preference/accuracy"]
        assert isinstance(count, Mean) and count.count == (10 if lone else 5)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)


def test_metrics_by_hand(models):
    """Rewards, margin and accuracy of DPO from the log-probs that the workers give."""
    batch, preference = with_targets(models[1]), PreferenceConfig("dpo", beta=0.2)
    actor = actor_of(models[0], preference)
    assert isinstance(batch.targets, PreferenceTargets) and batch.targets.ref_log_probs_M is not None
    own = [float(x.sum()) for x in actor.log_probs(batch, 1.0)]
    ref = [float(x.sum()) for x in batch.targets.ref_log_probs_M.split(batch.trained_per_row())]
    rewards = [0.2 * (a - b) for a, b in zip(own, ref, strict=True)]
    found = finalize(actor.backward(batch))
    margins = [rewards[i] - rewards[i + 1] for i in range(0, 10, 2)]
    assert found["preference/margin"] == pytest.approx(sum(margins) / 5)
    assert found["preference/accuracy"] == sum(m > 0 for m in margins) / 5
    assert found["preference/reward_chosen"] == pytest.approx(sum(rewards[::2]) / 5)
    assert found["preference/reward_rejected"] == pytest.approx(sum(rewards[1::2]) / 5)
    tokens = batch.trained_per_row()
    assert found["preference/token_log_prob_chosen"] == pytest.approx(sum(own[::2]) / sum(tokens[::2]))
    assert 0 < found["actor/entropy"] < math.log(VOCAB)


@pytest.mark.parametrize("budget", [28, 45, 60, 84, 4096])
def test_pairs_stay_together(budget):
    batch = pairs()
    pieces = micro_batches(batch, budget)
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(10))
    for piece in pieces:
        assert len(piece) * int(piece.lengths_N.max()) <= budget
        assert {row ^ 1 for row in piece.rows} == set(piece.rows)
    for workers in (1, 2, 3, 4, 7):
        parts = shares(batch, workers)
        assert len(parts) == min(workers, 5)
        assert sorted(i for part in parts for i in part) == list(range(10))
        assert all({i ^ 1 for i in part} == set(part) for part in parts)


def test_a_pair_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="2 sequences that stay together, one of 14 tokens"):
        micro_batches(pairs(), 27)


def test_a_parted_pair_is_refused(models):
    batch = with_targets(models[1])
    for index in ([0, 2], [0, 3], [0, 1, 2]):
        with pytest.raises(ValueError, match="a pair was parted"):
            actor_of(models[0], PreferenceConfig("simpo")).backward(batch.select(index))


def test_the_base_under_an_adapter_is_the_reference(tmp_path):
    """A fresh adapter changes nothing, so the margin is 0; after updates the reference is still the base."""
    student = write_model(tmp_path, tiny("llama", seed=3))
    c = settings(student, PreferenceConfig("dpo"), lora=LoraConfig(rank=2))
    actor = Actor(c, VOCAB, "cpu")
    frozen = Reference(settings(student, PreferenceConfig()), c.model.student, VOCAB, "cpu", "student")
    batch = pairs()
    before = torch.cat(actor.reference_log_probs(batch, 1.0))
    torch.testing.assert_close(before, torch.cat(actor.log_probs(batch, 1.0)), rtol=1e-6, atol=1e-6)
    preferred = torch.tensor([row % 2 == 0 for row in batch.rows])
    preferred_M = preferred.repeat_interleave(torch.tensor(batch.trained_per_row()))
    targets = replace(batch, targets=PreferenceTargets(preferred_M, before))
    losses = [finalize(actor.update(targets))["actor/preference_loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses == sorted(losses, reverse=True)
    after = torch.cat(actor.reference_log_probs(batch, 1.0))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat(frozen.log_probs(batch, 1.0)), before, rtol=1e-6, atol=1e-6)


def test_names_are_those_of_the_config():
    from miniverl.algos.preference import PAIR_LOSSES

    assert {*PAIR_LOSSES, "kto"} == set(get_args(PreferenceLoss))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "algo.preference.label_smoothing=0.1 has no part in"),
        ({"loss": "dpo", "label_smoothing": 0.5}, "algo.preference.label_smoothing=0.5 must lie between"),
        ({"loss": "dpo", "margin": 1.0}, "only in simpo"),
        ({"loss": "orpo", "length_normalised": True}, "only in dpo, ipo, kto"),
    ],
)
def test_settings_that_a_loss_does_not_read_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        config("student", algo=AlgoConfig(name="preference", preference=PreferenceConfig(**change)))


def test_sizes_that_hold_no_pair_or_no_other_prompt_are_refused():
    with pytest.raises(ConfigError, match="raise it to at least 28"):
        settings("student", PreferenceConfig(), budget=27)
    kto = settings("student", PreferenceConfig("kto"), budget=27)
    with pytest.raises(ConfigError, match=r"prompts_per_step=1: algo\.preference\.loss=kto"):
        replace(kto, trainer=replace(kto.trainer, prompts_per_step=1))
