"""Policy losses beyond the recorded numbers: values by hand, masks, and estimators of KL as losses."""

import math
from dataclasses import replace

import pytest
import torch

from miniverl.algos import kl
from miniverl.algos.aggregate import AGGREGATIONS, aggregate
from miniverl.algos.policy_losses import LOSSES, ClipSettings

CLIP = ClipSettings(low=0.2, high=0.28)


def run(name, log_probs, old, advantages, mask, mode="token-mean"):
    leaf = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    old, advantages, mask = (torch.tensor(x, dtype=torch.float64) for x in (old, advantages, mask))
    first = (torch.arange(leaf.shape[1]) == 0).expand_as(leaf).double()  # for those that treat some apart
    found = LOSSES[name](leaf, old, advantages, mask, replace(CLIP, selected_NT=first))
    loss = aggregate(found.loss_NT, mask, mode)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return found, loss, gradient


def test_gspo_takes_the_sequences_mean_ratio_and_every_token_learns():
    """LOS-11: log-ratios .4, 0, 0 have the sequence ratio e^.1333, not e^.4."""
    found, _, gradient = run("gspo", [[-1.0, -1, -1]], [[-1.4, -1, -1]], [[-1.0] * 3], [[1.0] * 3])
    assert found.loss_NT.tolist() == [pytest.approx([math.exp(0.4 / 3)] * 3)]
    assert gradient.tolist() == [pytest.approx([math.exp(0.4 / 3) / 3] * 3)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_may_hold_anything(name, junk):
    clean = run(name, [[-1.0, -2, 0]], [[-1.1, -1.8, 0]], [[0.5, 0.5, 0]], [[1.0, 1, 0]])
    dirty = run(name, [[-1.0, -2, junk]], [[-1.1, -1.8, junk]], [[0.5, 0.5, junk]], [[1.0, 1, 0]])
    torch.testing.assert_close(dirty[1], clean[1])
    torch.testing.assert_close(dirty[2], clean[2])
    for metric in clean[0].metrics:
        torch.testing.assert_close(dirty[0].metrics[metric], clean[0].metrics[metric])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_trained_is_0_and_masked_rows_do_not_count(name, mode):
    """LOS-08: numerator and denominator leave out the same rows."""
    new, old, advantages = [[-1.0, -2], [-3, -1]], [[-1.1, -1.8], [-2.5, -1.5]], [[0.5, 0.5], [-1, -1]]
    _, loss, gradient = run(name, new, old, advantages, [[0.0, 0], [0, 0]], mode)
    assert (loss.item(), gradient.abs().sum().item()) == (0.0, 0.0)
    alone = run(name, new[:1], old[:1], advantages[:1], [[1.0, 1]], mode)[1]
    torch.testing.assert_close(run(name, new, old, advantages, [[1.0, 1], [0, 0]], mode)[1], alone)


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_importance_weights_carry_no_gradient(name):
    """LOS-12: d(−w A log π)/d log π = −w A with w detached."""
    _, _, gradient = run(name, [[-1.0]], [[-1.1]], [[2.0]], [[1.0]])
    assert gradient.item() == pytest.approx(-2 * math.exp(0.1))


def test_two_certain_tokens_are_kept_by_dppo_kl():
    found, loss, _ = run("dppo_kl", [[0.0]], [[0.0]], [[1.0]], [[1.0]])
    assert loss.isfinite() and found.metrics["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", "zero"), ("k2", "reverse"), ("k3", "forward"), ("k1+", "reverse"), ("k3+", "reverse")],
)
def test_the_expected_gradient_of_a_kl_estimate(name, expected):
    """LOS-02, LOS-03: on policy, summed over all tokens with their probability: k1 gives 0, k2 the reverse
    KL's gradient, k3 the forward KL's (q − p)."""
    torch.manual_seed(0)
    logits, log_p = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64).log_softmax(-1)
    leaf = logits.clone().requires_grad_()
    log_q = leaf.log_softmax(-1)
    (log_q.exp().detach() * kl.ESTIMATORS[name](log_q, log_p)).sum().backward()
    q, lq = log_q.exp().detach(), log_q.detach()
    reverse = q * ((lq - log_p) - (q * (lq - log_p)).sum())
    wanted = {"zero": torch.zeros(7, dtype=torch.float64), "reverse": reverse, "forward": q - log_p.exp()}
    torch.testing.assert_close(leaf.grad, wanted[expected], rtol=1e-9, atol=1e-12)
