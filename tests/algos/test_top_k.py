"""Top-k + tail bucket: a true divergence, between 0 and the full one, with the full gradient behind it."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniverl.algos.divergences import DIVERGENCES
from miniverl.algos.objectives import TopKDistillation
from miniverl.types import TopKTargets

CASES = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("jsd", {"beta": 0.0}),
    ("jsd", {"beta": 0.3}),
    ("jsd", {"beta": 1.0}),
    ("skew_kl", {"alpha": 0.1}),
    ("skew_rkl", {"alpha": 0.1}),
    ("tvd", {}),
]
IDS = [f"{name}{tuple(numbers.values())}" for name, numbers in CASES]


def targets(z_p, k):
    top = z_p.log_softmax(-1).topk(k, -1)
    return TopKTargets(top.indices, top.values)


def top_k(name, numbers, z_p, z_q, k):
    objective = TopKDistillation(partial(DIVERGENCES[name], **numbers), targets(z_p, k))
    return objective(z_q.log_softmax(-1), slice(0, len(z_q)))


def buckets(log_x, ids):
    """Probabilities `[C, K+1]`: those of `ids`, and the sum of all others, each summed for itself."""
    x = log_x.exp()
    others = torch.ones_like(x).scatter(-1, ids, 0.0)
    return torch.cat([x.gather(-1, ids), (x * others).sum(-1, keepdim=True)], -1)


def naive(name, numbers, z_p, z_q, k):
    """Value by autograd-friendly definition over the K + 1 buckets."""
    ids = z_p.topk(k, -1).indices
    p, q = buckets(z_p.log_softmax(-1), ids), buckets(z_q.log_softmax(-1), ids)

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    beta, alpha = numbers.get("beta", 0.5), numbers.get("alpha", 0.0)
    if name == "forward_kl" or beta == 0.0:
        return kl(p, q)
    if name == "reverse_kl" or beta == 1.0:
        return kl(q, p)
    if name == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    if name == "skew_kl":
        return kl(p, alpha * p + (1 - alpha) * q)
    if name == "skew_rkl":
        return kl(q, alpha * q + (1 - alpha) * p)
    return (p - q).abs().sum(-1) / 2


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_value_and_gradient_match_autograd_over_the_buckets(name, numbers, k):
    torch.manual_seed(0)
    z_p, z_q = 2 * torch.randn(5, 7).double(), (2 * torch.randn(5, 7).double()).requires_grad_()
    expected = naive(name, numbers, z_p, z_q, k)
    expected.sum().backward()
    got = top_k(name, numbers, z_p, z_q.detach(), k)
    torch.testing.assert_close(got.value_C, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.grad_CV, z_q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
@given(data=st.data())
def test_between_zero_and_the_full_divergence(name, numbers, data):
    logits = st.lists(st.floats(-8, 8), min_size=7, max_size=7)
    z_p, z_q = (torch.tensor([data.draw(logits)], dtype=torch.float64) for _ in range(2))
    k = data.draw(st.integers(1, 7))
    value = top_k(name, numbers, z_p, z_q, k).value_C.item()
    full = DIVERGENCES[name](z_p.log_softmax(-1), z_q.log_softmax(-1), **numbers)[0].item()
    assert -1e-9 <= value <= full + 1e-8  # the teacher's tail is a difference of sent masses


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_tokens_give_the_full_divergence(name, numbers, dtype):
    torch.manual_seed(1)
    z_p, z_q = 3 * torch.randn(4, 6).to(dtype), 3 * torch.randn(4, 6).to(dtype)
    full = DIVERGENCES[name](z_p.log_softmax(-1), z_q.log_softmax(-1), **numbers)[0]
    torch.testing.assert_close(top_k(name, numbers, z_p, z_q, 6).value_C, full)


def test_a_student_above_the_teacher_on_every_top_token_still_gets_a_gradient():
    """The truncated sum without a tail would be negative here, and a clamp at 0 would delete its gradient."""
    p = torch.tensor([[0.3, 0.2, 0.14, 0.09, 0.09, 0.09, 0.09]]).double()
    q = torch.tensor([[0.4, 0.3, 0.2, 0.025, 0.025, 0.025, 0.025]]).double()
    truncated = (p * (p / q).log())[:, :3].sum().item()
    assert truncated < 0
    token = top_k("forward_kl", {}, p.log(), q.log(), 3)
    by_hand = 0.3 * np.log(3 / 4) + 0.2 * np.log(2 / 3) + 0.14 * np.log(0.7) + 0.36 * np.log(3.6)
    assert token.value_C.item() == pytest.approx(by_hand)
    # q - p on the top tokens; the tail's -(0.36 - 0.1) shared among its ids by their share of q, a quarter.
    expected = [0.1, 0.1, 0.06, -0.065, -0.065, -0.065, -0.065]
    np.testing.assert_allclose(token.grad_CV[0], expected, atol=1e-12)


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
def test_minimising_it_does_not_move_mass_out_of_the_top_k(name, numbers):
    torch.manual_seed(2)
    z_p, z_q = torch.randn(3, 7), torch.randn(3, 7).requires_grad_()
    teacher_mass = z_p.softmax(-1).topk(3, -1).values.sum(-1)
    optimizer = torch.optim.Adam([z_q], lr=0.1)
    first = top_k(name, numbers, z_p, z_q.detach(), 3).value_C.sum().item()
    for _ in range(200):
        z_q.grad = top_k(name, numbers, z_p, z_q.detach(), 3).grad_CV
        optimizer.step()
    student_mass = z_q.detach().softmax(-1).gather(-1, z_p.topk(3, -1).indices).sum(-1)
    # Total variation has a constant slope: it ends swinging around its minimum.
    slack = 0.08 if name == "tvd" else 1e-3
    assert (student_mass >= teacher_mass - slack).all()
    assert top_k(name, numbers, z_p, z_q.detach(), 3).value_C.sum().item() < 0.1 * first


def test_masses_and_overlap_are_reported():
    z_p = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]]).double()
    z_q = torch.tensor([[4.0, 0.0, 5.0, 1.0], [0.0, 1.0, 2.0, 3.0]]).double()
    sums = top_k("forward_kl", {}, z_p, z_q, 2).sums
    p, q = z_p.softmax(-1), z_q.softmax(-1)
    assert sums["distillation/teacher_mass"].item() == pytest.approx(
        (p[0, 0] + p[0, 1] + p[1, 3] + p[1, 2]).item()
    )
    assert sums["distillation/student_mass"].item() == pytest.approx(
        (q[0, 0] + q[0, 1] + q[1, 3] + q[1, 2]).item()
    )
    # Row 0: teacher {0, 1}, student {2, 0}: a half. Row 1: both. Summed over tokens.
    assert sums["distillation/overlap"].item() == pytest.approx(1.5)


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=IDS)
def test_a_confident_student_or_teacher_in_float32(name, numbers):
    """Where 1 - mass rounds to 0, the tail still has its gradient, and its value stays below the full one."""
    confident = torch.tensor([[20.0, 19.0, 0.0, 0.0, 0.0, -1.0]])
    vague = torch.tensor([[2.0, 1.5, 0.5, 0.0, 0.0, 0.0]])
    for z_p, z_q in ((vague, confident), (confident, vague), (confident, confident)):
        narrow = top_k(name, numbers, z_p, z_q, 2)
        wide = top_k(name, numbers, z_p.double(), z_q.double(), 2)
        full = DIVERGENCES[name](z_p.double().log_softmax(-1), z_q.double().log_softmax(-1), **numbers)[0]
        assert -1e-6 <= narrow.value_C.item() <= full.item() + 1e-6
        tolerance = 0.35 * wide.grad_CV.abs().max().item() + 1e-6
        # The teacher's tail is only known to float32's precision, which its log-ratio feels by a few nats.
        torch.testing.assert_close(narrow.grad_CV.double(), wide.grad_CV, rtol=0, atol=tolerance)
        if z_p is vague:
            torch.testing.assert_close(narrow.grad_CV.double(), wide.grad_CV, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(narrow.value_C.double(), wide.value_C, rtol=1e-4, atol=1e-6)


def test_a_student_whose_tail_underflows_gets_a_finite_gradient():
    z_p = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    z_q = torch.tensor([[300.0, 299.0, 0.0, -5.0]])
    token = top_k("forward_kl", {}, z_p, z_q, 2)
    p = z_p.double().softmax(-1)[0]
    tail = (p[2] + p[3]).item()
    share = 1 / (1 + np.exp(-5.0))
    assert token.value_C.isfinite().all()
    np.testing.assert_allclose(token.grad_CV[0, 2:], [-tail * share, -tail * (1 - share)], rtol=1e-5)


def test_ragged_sequences_with_one_token_from_the_teacher():
    """Completions of 1 and 3 tokens, K = 1: the flat batch is the per-sample one, and nothing is NaN."""
    torch.manual_seed(3)
    z_p, z_q = torch.randn(4, 6), torch.randn(4, 6)
    together = top_k("forward_kl", {}, z_p, z_q, 1)
    apart = [top_k("forward_kl", {}, z_p[rows], z_q[rows], 1) for rows in (slice(0, 1), slice(1, 4))]
    assert together.value_C.isfinite().all()
    torch.testing.assert_close(together.value_C, torch.cat([t.value_C for t in apart]))
    torch.testing.assert_close(together.grad_CV, torch.cat([t.grad_CV for t in apart]))
