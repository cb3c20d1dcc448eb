"""Signals of the policy gradient on the embedded models, dynamic sampling, and off-policy corrections."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from miniverl.config import ConfigError, RunError
from miniverl.config_policy import CorrectionConfig
from miniverl.controller.experience import is_mixed
from miniverl.controller.group import WorkerGroup
from miniverl.controller.off_policy import correct, masked
from miniverl.controller.policy_signal import PolicyGradient
from miniverl.controller.pool import LocalPool
from miniverl.main import compose
from miniverl.types import PolicyTargets, Rollout
from tests.tiny_models import rollout


def settings(tmp_path: Any, algo: str, *more: str) -> list[str]:
    return [
        "+experiment=grpo_demo",
        f"algo={algo}",
        "placement=local",
        "data.addition.digits=[1,2]",
        "trainer.steps=2",
        "trainer.prompts_per_step=4",
        "rollout.n=4",
        "rollout.max_response_length=40",
        "eval.size=4",
        "eval.every=0",
        "trainer.report=false",
        "trainer.export=false",
        "trainer.sinks=[jsonl]",
        f"trainer.run_dir={tmp_path}",
        *more,
    ]


def test_truncated_weights_and_masks_by_hand():
    """LOS-12: plain numbers, so nothing can flow through them."""
    trainer = [torch.tensor([-1.0, -2.0]).requires_grad_().detach(), torch.tensor([-0.5])]
    engine = [torch.tensor([-1.0, -3.0]), torch.tensor([-1.5])]
    token = correct(trainer, engine, CorrectionConfig(truncate="token", cap=2.0))
    assert token.weights is not None and not any(w.requires_grad for w in token.weights)
    torch.testing.assert_close(torch.cat(token.weights), torch.tensor([1.0, 2.0, 2.0]))
    sequence = correct(trainer, engine, CorrectionConfig(truncate="sequence", cap=5.0))
    assert sequence.weights is not None
    torch.testing.assert_close(torch.cat(sequence.weights), torch.full((3,), float(np.e)))
    icepop = correct(trainer, engine, CorrectionConfig(mask="token", mask_low=0.5, mask_high=2.0))
    assert icepop.kept is not None and [k.tolist() for k in icepop.kept] == [[True, False], [False]]
    geometric = correct(trainer, engine, CorrectionConfig(mask="sequence", mask_low=0.5, mask_high=2.0))
    assert geometric.kept is not None  # e^0.5 = 1.65 lies within, e^1 does not
    assert [k.tolist() for k in geometric.kept] == [[True, True], [False]]
    cut = masked(rollout([1], [4, 5, 6], [1, 0, 1]), torch.tensor([False, True]))
    assert cut.mask.tolist() == [0, 0, 1]


def test_a_second_correction_is_refused():
    twice = ["algo.policy.correction.old_log_probs=engine", "algo.policy.correction.truncate=token"]
    with pytest.raises(ConfigError, match="correct a second time"):
        compose(["+experiment=grpo_demo", *twice])


def group(*verdicts: float | None) -> Sequence[Rollout]:
    base = rollout([1], [4])
    return [base if v is None else replace(base, rewards={"exact_match": v, "shaping": i})
            for i, v in enumerate(verdicts)]


def test_the_nll_of_right_responses_is_a_mean_over_their_tokens_in_the_mini_batch():
    """With the engine's log-probs as the old ones, no worker is asked: the batches are the signal's alone."""
    c = compose(
        [
            "+experiment=grpo_demo",
            "algo.policy.kl=null",
            "algo.policy.positive_nll_coef=0.1",
            "algo.policy.mini_batches=2",
            "algo.policy.epochs=2",
            "algo.policy.correction.old_log_probs=engine",
        ]
    )
    signal = PolicyGradient(c, "exact_match", WorkerGroup(LocalPool(c.placement, "cpu"), "actor"))
    rows = [
        replace(
            rollout([1], list(range(4, 4 + length)), finish="stop"),
            uid=uid,
            sample=k,
            reward=right,
            rewards={"exact_match": right},
        )
        for uid in ("a", "b")
        for k, (length, right) in enumerate([(3, 1.0), (2, 0.0), (1, 1.0)])
    ]
    updates, _ = signal(rows, 0)
    assert [len(u) for u in updates] == [3, 3, 3, 3]
    for update in updates:
        assert isinstance(update.targets, PolicyTargets) and update.targets.nll_weights_M is not None
        torch.testing.assert_close(
            update.targets.nll_weights_M, torch.tensor([0.25, 0.25, 0.25, 0, 0, 0.25])
        )


def test_groups_are_kept_by_the_accuracy_metric_alone():
    assert is_mixed(group(1.0, 0.0), "exact_match")
    assert not is_mixed(group(1.0, 1.0), "exact_match")  # though their shaping differs
    assert not is_mixed(group(0.0, None, 0.0), "exact_match")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["algo.policy.max_gen_batches=3"], ("max_gen_batches=3", "0 of 12 prompts", "the step wants 4")),
        (["algo.policy.max_gen_batches=0", "algo.policy.max_gen_s=0.01"], ("max_gen_s=0.01", "prompts had")),
    ],
)
def test_dynamic_sampling_stops_with_counts(tmp_path, more, names):
    """ADV-14: every response is cut before it can be right, so every group is constant."""
    from miniverl.controller.build import run
    from miniverl.controller.plan import make_plan

    c = compose(settings(tmp_path, "dapo", "rollout.max_response_length=2", *more))
    with pytest.raises(RunError) as stopped:
        run(c, make_plan(c))
    assert all(name in str(stopped.value) for name in names)


def test_without_a_bound_dynamic_sampling_is_refused():
    with pytest.raises(ConfigError, match="max_gen_s"):
        compose(["+experiment=grpo_demo", "algo=dapo", "algo.policy.max_gen_batches=0"])


@pytest.mark.parametrize(
    ("algo", "more", "wanted"),
    [
        ("ppo", ["algo.policy.critic.warmup_steps=1"], ("critic/vf_loss", "actor/reward_kl_penalty")),
        (
            "ppo",
            ["model.critic={path: embedded:teacher}", "algo.policy.critic.warmup_steps=0"],
            ("critic/vf_loss",),
        ),
        ("vapo", ["algo.policy.critic.warmup_steps=1"], ("critic/vf_loss", "actor/positive_nll")),
        ("remax", [], ("actor/reward_kl_penalty_coeff", "greedy/reward/failures")),
        ("prime", [], ("process_reward/loss",)),
        ("clip_cov", [], ("actor/pg_clipfrac",)),
        ("kl_cov", [], ("actor/ppo_kl",)),
        ("ppo_kl", [], ("actor/kl_coef",)),
        ("grpo", ["algo.policy.correction.truncate=token"], ("rollout_corr/weight_mean",)),
        ("grpo", ["algo.policy.correction.mask=sequence"], ("rollout_corr/masked_share",)),
        ("grpo", ["algo.policy.epochs=3", "algo.policy.kl_stop=1e-9"], ("actor/updates_left_out",)),
        ("grpo", ["model=demo", "algo.policy.teacher_coef=0.5"], ("actor/pg_loss",)),
    ],
)
def test_each_learns_logs_and_resumes_exactly(tmp_path, algo, more, wanted):
    """Two steps at once give the weights that one step, a stop and another step give."""
    from miniverl.checkpoint import checkpoints
    from miniverl.controller.build import run
    from miniverl.controller.plan import make_plan
    from miniverl.metrics import read_metrics

    whole = compose(settings(tmp_path / "whole", algo, "trainer.save_every=1", *more))
    run(whole, make_plan(whole))
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert all(any(name in row for row in rows) for name in wanted), sorted({k for r in rows for k in r})
    if "algo.policy.kl_stop=1e-9" in more:  # on policy the first of three has no KL, the second has
        assert [row["actor/updates_left_out"] for row in rows if "actor/lr" in row] == [1.0, 1.0]
    found = checkpoints(tmp_path / "whole" / "checkpoints")
    again = compose(settings(tmp_path / "again", algo, f"trainer.resume={found[0].path}", *more))
    run(again, make_plan(again))
    ends = [checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("whole", "again")]
    moved = [(c.path / "weights.safetensors").read_bytes() for c in (found[0], ends[0])]
    assert moved[0] != moved[1], "nothing was learned, so nothing could differ"
    weights = sorted(p.name for p in ends[0].path.glob("*weights.safetensors"))
    assert weights
    for name in weights:
        assert (ends[0].path / name).read_bytes() == (ends[1].path / name).read_bytes(), name
