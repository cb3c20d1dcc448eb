"""Preference losses against numbers worked out by hand, and gradients against finite differences."""

import math

import pytest
import torch

from miniverl.algos.preference import (
    PAIR_LOSSES,
    LabelSettings,
    PairSettings,
    Side,
    dpo,
    ipo,
    kto,
    orpo,
    reference_kl,
    simpo,
)


def side(log_probs, ref, lengths) -> Side:
    def vector(values):
        return torch.tensor(values, dtype=torch.float64)

    return Side(vector(log_probs).requires_grad_(), vector(ref), vector(lengths))


CHOSEN = ([-4.0, -9.0], [-5.0, -8.0], [4, 3])
REJECTED = ([-6.0, -2.0], [-5.5, -3.0], [2, 5])


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smooth", [0.0, 0.1])
def test_dpo_by_hand(smooth):
    """Log-ratios: chosen +1, −1; rejected −0.5, +1."""
    found = dpo(side(*CHOSEN), side(*REJECTED), PairSettings(beta=0.2, label_smoothing=smooth))
    margins = (0.2 * 1.5, 0.2 * -2.0)
    expected = [-(1 - smooth) * math.log(sigma(h)) - smooth * math.log(sigma(-h)) for h in margins]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.chosen_rewards.tolist() == pytest.approx([0.2, -0.2])
    assert found.rejected_rewards.tolist() == pytest.approx([-0.1, 0.2])


def test_a_smoothed_dpo_is_least_where_the_margin_says_the_label_is_right_that_often():
    """d/dh = 0 at σ(h) = 1 − ε."""
    h = math.log(0.9 / 0.1)
    chosen = side([h], [0.0], [1])
    dpo(chosen, side([0.0], [0.0], [1]), PairSettings(1.0, label_smoothing=0.1)).loss.sum().backward()
    assert chosen.log_probs.grad is not None
    assert float(chosen.log_probs.grad) == pytest.approx(0, abs=1e-12)


def test_dpo_starts_at_log_two():
    same = ([-4.0, -9.0], [-4.0, -9.0], [4, 3])
    assert dpo(side(*same), side(*same), PairSettings(0.1)).loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_ipo_by_hand():
    found = ipo(side(*CHOSEN), side(*REJECTED), PairSettings(beta=0.25))
    assert found.loss.tolist() == pytest.approx([(1.5 - 2) ** 2, (-2.0 - 2) ** 2])


def test_length_normalisation_divides_each_log_ratio_by_its_own_length():
    settings = PairSettings(beta=0.25, length_normalised=True)
    margins = (1 / 4 + 0.5 / 2, -1 / 3 - 1 / 5)
    found = ipo(side(*CHOSEN), side(*REJECTED), settings)
    assert found.loss.tolist() == pytest.approx([(m - 2) ** 2 for m in margins])
    found = dpo(side(*CHOSEN), side(*REJECTED), settings)
    assert found.loss.tolist() == pytest.approx([-math.log(sigma(0.25 * m)) for m in margins])


def test_simpo_by_hand():
    found = simpo(side(*CHOSEN), side(*REJECTED), PairSettings(beta=2.0, margin=0.5))
    margins = (2 * (-1 + 3) - 0.5, 2 * (-3 + 0.4) - 0.5)
    assert found.loss.tolist() == pytest.approx([-math.log(sigma(m)) for m in margins])


def test_orpo_by_hand():
    """P = e^−1 and e^−3; e^−3 and e^−0.4."""
    def odds(log_p: float) -> float:
        return math.exp(log_p) / (1 - math.exp(log_p))

    found = orpo(side(*CHOSEN), side(*REJECTED), PairSettings(beta=0.1))
    ratios = [math.log(odds(-1) / odds(-3)), math.log(odds(-3) / odds(-0.4))]
    expected = [nll - 0.1 * math.log(sigma(r)) for nll, r in zip((1, 3), ratios, strict=True)]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_of_a_certain_response_is_finite(dtype):
    certain = Side(torch.zeros(1, dtype=dtype, requires_grad=True), torch.zeros(1), torch.ones(1))
    other = Side(torch.full((1,), -1e4, dtype=dtype, requires_grad=True), torch.zeros(1), torch.ones(1))
    for chosen, rejected in ((certain, other), (other, certain)):
        loss = orpo(chosen, rejected, PairSettings(0.1)).loss
        assert bool(loss.isfinite().all())
        (slope,) = torch.autograd.grad(loss.sum(), [chosen.log_probs])
        assert bool(slope.isfinite().all())


def test_kto_by_hand():
    """Rewards 0.2 and −0.2; z = 0.2 × 0.7."""
    settings = LabelSettings(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    found = kto(side(*CHOSEN), torch.tensor([True, False]), 0.7, settings)
    expected = [1.5 * (1 - sigma(0.2 - 0.14)), 0.5 * (1 - sigma(0.14 + 0.2))]
    assert found.loss.tolist() == pytest.approx(expected)
    assert found.rewards.tolist() == pytest.approx([0.2, -0.2])


def test_kto_raises_what_is_desirable_and_lowers_what_is_not():
    responses = side(*CHOSEN)
    kto(responses, torch.tensor([True, False]), 0.7, LabelSettings(0.2)).loss.sum().backward()
    assert responses.log_probs.grad is not None
    up, down = responses.log_probs.grad.tolist()
    assert up < 0 < down


def test_the_reference_kl_is_a_mean_that_is_never_below_zero():
    assert reference_kl(torch.tensor([1.0, -0.5])) == pytest.approx(0.25)
    assert reference_kl(torch.tensor([-1.0, -0.5])) == 0.0
    assert reference_kl(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("normalised", [False, True])
def test_slopes_are_those_of_finite_differences(name, normalised):
    settings = PairSettings(0.3, length_normalised=normalised, margin=0.4)

    def loss(good: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        chosen, rejected = side(*CHOSEN), side(*REJECTED)
        return PAIR_LOSSES[name](
            Side(good, chosen.ref_log_probs, chosen.lengths),
            Side(bad, rejected.ref_log_probs, rejected.lengths),
            settings,
        ).loss

    assert torch.autograd.gradcheck(loss, (side(*CHOSEN).log_probs, side(*REJECTED).log_probs))
