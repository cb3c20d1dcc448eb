"""Every divergence against its definition in float64 numpy, its gradient against finite differences."""

from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniverl.algos.divergences import DIVERGENCES, PARAMETERS
from miniverl.algos.objectives import FullDistillation, NegativeLogLikelihood
from miniverl.config_algo import Divergence
from miniverl.types import Head, HiddenTargets

BETAS = (0.0, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4, 1.0)
CASES = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("tvd", {}),
    *[("jsd", {"beta": beta}) for beta in BETAS],
    *[(name, {"alpha": alpha}) for name in ("skew_kl", "skew_rkl") for alpha in (0.0, 0.1, 0.7, 1.0)],
]
IDS = [f"{name}{tuple(numbers.values())}" for name, numbers in CASES]


def kl(a, b):
    return float(np.sum(a * np.log(a / b)))


def defined(name, p, q, beta=0.0, alpha=0.0):
    """The definitions of the papers, over probabilities."""
    if name == "forward_kl" or (name == "jsd" and beta == 0):
        return kl(p, q)
    if name == "reverse_kl" or (name == "jsd" and beta == 1):
        return kl(q, p)
    if name == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    if name == "skew_kl":
        return kl(p, alpha * p + (1 - alpha) * q)
    if name == "skew_rkl":
        return kl(q, alpha * q + (1 - alpha) * p)
    return float(np.abs(p - q).sum() / 2)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def finite_differences(value, z, h=1e-5):
    steps = np.eye(len(z)) * h
    return np.array([(value(z + s) - value(z - s)) / (2 * h) for s in steps])


def distil(name, numbers, z_p, z_q):
    """Value and logit gradient `[C, V]` through the objective; its head is the identity: hidden = logits."""
    z_p, z_q = torch.as_tensor(z_p), torch.as_tensor(z_q)
    objective = FullDistillation(
        partial(DIVERGENCES[name], **numbers),
        HiddenTargets(z_p),
        Head(torch.eye(z_p.shape[-1], dtype=z_p.dtype)),
        1.0,
    )
    token = objective(z_q.log_softmax(-1), slice(0, len(z_p)))
    return token.value_C.numpy(), token.grad_CV.numpy()


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
def test_value_and_gradient_match_the_definition(name, numbers):
    random = np.random.default_rng(0)
    z_p, z_q = 2 * random.normal(size=(4, 9)), 2 * random.normal(size=(4, 9))
    values, grads = distil(name, numbers, z_p, z_q)
    for c in range(4):
        p = softmax(z_p[c])

        def value(z, p=p):
            return defined(name, p, softmax(z), **numbers)

        assert values[c] == pytest.approx(value(z_q[c]), rel=1e-9, abs=1e-13)
        np.testing.assert_allclose(grads[c], finite_differences(value, z_q[c]), rtol=1e-5, atol=1e-8)


def test_closed_form_gradients():
    random = np.random.default_rng(1)
    z_p, z_q = random.normal(size=(1, 6)), random.normal(size=(1, 6))
    p, q = softmax(z_p[0]), softmax(z_q[0])
    np.testing.assert_allclose(distil("forward_kl", {}, z_p, z_q)[1][0], q - p, atol=1e-12)
    np.testing.assert_allclose(
        distil("reverse_kl", {}, z_p, z_q)[1][0], q * (np.log(q / p) - kl(q, p)), atol=1e-12
    )
    for beta in BETAS[1:-1]:
        m = beta * p + (1 - beta) * q
        expected = (1 - beta) * q * (np.log(q / m) - kl(q, m))
        np.testing.assert_allclose(distil("jsd", {"beta": beta}, z_p, z_q)[1][0], expected, atol=1e-12)


def test_by_hand():
    p, q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    half = np.log(4 / 3) / 2
    assert DIVERGENCES["forward_kl"](p, q)[0].item() == pytest.approx(half)  # ½log2 + ½log⅔
    assert DIVERGENCES["reverse_kl"](p, q)[0].item() == pytest.approx(0.75 * np.log(1.5) - 0.25 * np.log(2))
    assert DIVERGENCES["tvd"](p, q)[0].item() == pytest.approx(0.25)


def test_jsd_tends_to_zero_at_its_ends_and_jumps_to_the_two_kls_there():
    random = np.random.default_rng(2)
    z_p, z_q = random.normal(size=(1, 7)), random.normal(size=(1, 7))
    p, q = softmax(z_p[0]), softmax(z_q[0])

    def jsd(beta):
        return distil("jsd", {"beta": beta}, z_p, z_q)[0][0]

    assert jsd(1e-4) < 1e-3 * jsd(0.0) and jsd(1 - 1e-4) < 1e-3 * jsd(1.0)
    assert jsd(1e-4) / 1e-4 == pytest.approx(kl(p, q), rel=1e-3)
    assert jsd(1 - 1e-4) / 1e-4 == pytest.approx(kl(q, p), rel=1e-3)
    assert jsd(0.0) == pytest.approx(kl(p, q), rel=1e-12)
    assert jsd(1.0) == pytest.approx(kl(q, p), rel=1e-12)


@pytest.mark.parametrize("beta", [1e-4, 0.5, 1 - 1e-4])
def test_jsd_of_peaked_distributions_in_float32(beta):
    """Mixing in log space: no token of one distribution is lost where the other is far below it."""
    random = np.random.default_rng(3)
    z_p, z_q = 30 * random.normal(size=(4, 8)), 30 * random.normal(size=(4, 8))
    values, grads = distil("jsd", {"beta": beta}, z_p.astype(np.float32), z_q.astype(np.float32))
    wide, wide_grads = distil("jsd", {"beta": beta}, z_p, z_q)
    np.testing.assert_allclose(values, wide, rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(grads, wide_grads, atol=2e-6)


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(name, numbers, dtype):
    z = (10 * np.random.default_rng(4).normal(size=(5, 11))).astype(dtype)
    values, grads = distil(name, numbers, z, z)
    tolerance = 1e-6 if dtype is np.float32 else 1e-14
    assert np.abs(values).max() <= tolerance
    assert np.abs(grads).max() <= tolerance


@given(
    st.sampled_from(CASES),
    st.lists(st.floats(-60, 60), min_size=10, max_size=10),
)
def test_values_are_never_negative_and_gradients_sum_to_zero(case, numbers):
    name, parameters = case
    z_p, z_q = np.array([numbers[:5]]), np.array([numbers[5:]])
    values, grads = distil(name, parameters, z_p, z_q)
    assert values[0] >= -1e-12
    assert np.isfinite(grads).all() and abs(grads.sum()) < 1e-9


def test_temperature_divides_both_sides():
    random = np.random.default_rng(5)
    z_p, z_q = random.normal(size=(3, 6)), random.normal(size=(3, 6))
    objective = FullDistillation(
        DIVERGENCES["forward_kl"], HiddenTargets(torch.tensor(z_p)), Head(torch.eye(6).double()), 0.7
    )
    got = objective(torch.tensor(z_q / 0.7).log_softmax(-1), slice(0, 3)).value_C.numpy()
    expected = [kl(softmax(a / 0.7), softmax(b / 0.7)) for a, b in zip(z_p, z_q, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_negative_log_likelihood():
    z = np.random.default_rng(6).normal(size=(3, 5))
    token = NegativeLogLikelihood(torch.tensor([4, 0, 4]))(torch.tensor(z).log_softmax(-1), slice(0, 3))
    q = np.stack([softmax(row) for row in z])
    np.testing.assert_allclose(token.value_C, -np.log(q[[0, 1, 2], [4, 0, 4]]), rtol=1e-12)
    np.testing.assert_allclose(token.grad_CV, q - np.eye(5)[[4, 0, 4]], atol=1e-12)


def test_the_registry_is_what_the_config_offers():
    assert set(DIVERGENCES) == set(get_args(Divergence))
    assert set(PARAMETERS) <= set(DIVERGENCES)
