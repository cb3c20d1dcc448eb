"""From dataset rows to what a supervised update learns from, over real workers in this process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from miniverl.config import AlgoConfig, Config, ConfigError, PlacementConfig, RunError
from miniverl.config_supervised import PreferenceConfig
from miniverl.controller.group import WorkerGroup
from miniverl.controller.pool import LocalPool
from miniverl.controller.supervised_signals import Preference
from miniverl.data.responses import dataset_rollouts
from miniverl.types import PreferenceTargets, Prompt
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference
from tests.tiny_models import config, tiny, write_model

VOCAB = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(i), tiny("gpt2", seed=i, tied=True)) for i in (1, 2)]


def signal_of(models, preference: PreferenceConfig, workers: int = 1) -> Preference:
    """With another model as reference, so that a mix-up of the two shows."""
    c: Config = config(models[0], dtype="float64", algo=AlgoConfig(name="preference", preference=preference))
    c = replace(c, rollout=replace(c.rollout, temperature=0.5))  # nothing here may read it
    pool = LocalPool(PlacementConfig(), "cpu", workers)
    pool.build("actor", Actor, c, VOCAB, "cpu")
    pool.build("reference", Reference, c, replace(c.model.student, path=models[1]), VOCAB, "cpu", "student")
    return Preference(c, WorkerGroup(pool, "actor"), WorkerGroup(pool, "reference"))


PROMPTS = [
    Prompt("a#0", (3, 4), "a", reference_ids=(5, 6, 7), reference_mask=(0, 1, 1), rejected_ids=(8,),
           rejected_mask=(1,)),
    Prompt("b#0", (9,), "b", reference_ids=(1, 2), reference_mask=(1, 1), rejected_ids=(2, 2, 1),
           rejected_mask=(1, 1, 1)),
    Prompt("c#0", (3, 3, 3), "c", reference_ids=(11,), reference_mask=(1,), rejected_ids=(12, 13),
           rejected_mask=(1, 1)),
]


def rollouts(prompts):
    return [r for p in prompts for r in dataset_rollouts(p, 0, 16)]


def log_prob(path: str, prompt, response, mask) -> float:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        log_q = model(torch.tensor([[*prompt, *response]])).logits[0, :, :VOCAB].log_softmax(-1)
    return sum(float(log_q[len(prompt) - 1 + t, y]) for t, y in enumerate(response) if mask[t])


@pytest.mark.parametrize("workers", [1, 2])
def test_pairs_carry_verdicts_and_the_references_log_probs(models, workers):
    batch, facts = signal_of(models, PreferenceConfig("dpo"), workers)(PROMPTS, rollouts(PROMPTS))
    assert batch.units == (0, 0, 1, 1, 2, 2)
    assert batch.trained_sequences == 6 and facts == {}
    found = batch.targets
    assert isinstance(found, PreferenceTargets) and found.ref_log_probs_M is not None
    assert found.preferred_M.int().tolist() == [1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0]
    sums = [float(part.sum()) for part in found.ref_log_probs_M.split(batch.trained_per_row())]
    expected = []
    for p in PROMPTS:
        expected.append(log_prob(models[1], p.token_ids, p.reference_ids, p.reference_mask))
        expected.append(log_prob(models[1], p.token_ids, p.rejected_ids, p.rejected_mask))
    assert sums == pytest.approx(expected, rel=1e-9)


def test_no_reference_is_asked_where_the_loss_has_none(models):
    signal = replace(signal_of(models, PreferenceConfig("simpo")), reference=None)
    batch, _ = signal(PROMPTS, rollouts(PROMPTS))
    assert isinstance(batch.targets, PreferenceTargets) and batch.targets.ref_log_probs_M is None


@pytest.mark.parametrize("workers", [1, 2])
def test_the_kl_of_kto_takes_each_prompt_with_the_next_ones_response(models, workers):
    labelled = [
        replace(p, rejected_ids=None, rejected_mask=None, desirable=good)
        for p, good in zip(PROMPTS, (True, False, True), strict=True)
    ]
    batch, facts = signal_of(models, PreferenceConfig("kto"), workers)(labelled, rollouts(labelled))
    crossed = [(labelled[i], labelled[(i + 1) % 3]) for i in range(3)]
    ratios = [
        log_prob(models[0], p.token_ids, q.reference_ids, q.reference_mask)
        - log_prob(models[1], p.token_ids, q.reference_ids, q.reference_mask)
        for p, q in crossed
    ]
    expected = max(0.0, sum(ratios) / 3)
    assert expected > 0, "a mean below zero would prove nothing"
    assert facts == {"preference/reference_kl": pytest.approx(expected, rel=1e-9)}
    assert isinstance(batch.targets, PreferenceTargets)
    assert batch.targets.kl == facts["preference/reference_kl"]
    assert batch.targets.preferred_M.int().tolist() == [1, 1, 0, 0, 1]


def test_a_response_that_trains_nothing_within_the_limit_is_named(models):
    cut = replace(PROMPTS[0], reference_mask=(0, 0, 1))
    sides = dataset_rollouts(cut, 0, 2)
    with pytest.raises(RunError, match=r"row a#0: .*rollout\.max_response_length=256"):
        signal_of(models, PreferenceConfig("dpo"))([cut], sides)


def test_what_a_page_learns_from_is_one_row_each():
    with pytest.raises(ConfigError, match="one row per prompt"):
        config("student", algo=AlgoConfig(name="preference"), rollout=replace(config("s").rollout, n=2))
