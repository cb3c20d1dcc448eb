"""The chunked loss against a naive one that holds all logits and leaves the gradient to autograd."""

from functools import partial
from typing import Any

import pytest
import torch

from miniverl.algos.chunked import token_log_probs, token_loss
from miniverl.algos.divergences import DIVERGENCES
from miniverl.algos.objectives import (
    FullDistillation,
    NegativeLogLikelihood,
    TopKDistillation,
    head_log_probs,
)
from miniverl.types import Head, HiddenTargets, TopKTargets

M, V, H, T = 11, 13, 6, 0.7
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def naive_jsd(log_p, log_q, beta=0.3):
    m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, m) + (1 - beta) * kl(log_q, m)


NAIVE = {"forward_kl": kl, "reverse_kl": lambda log_p, log_q: kl(log_q, log_p), "jsd": naive_jsd}


def setting(dtype, bias=True) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(M, H, dtype=dtype, requires_grad=True),
        "weight": torch.randn(V, H, dtype=dtype, requires_grad=True),
        "bias": torch.randn(V, dtype=dtype, requires_grad=True) if bias else None,
        "teacher_hidden": torch.randn(M, 4, dtype=dtype),
        "teacher": Head(torch.randn(V, 4, dtype=dtype), torch.randn(V, dtype=dtype)),
    }


def divergence(name):
    return partial(DIVERGENCES[name], beta=0.3) if name == "jsd" else DIVERGENCES[name]


def gradients(s):
    found = [s[name].grad for name in ("hidden", "weight", "bias") if s[name] is not None]
    for name in ("hidden", "weight", "bias"):
        if s[name] is not None:
            s[name].grad = None
    return found


def close(got, expected, dtype):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [1, 4, M, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", list(NAIVE))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_distillation_in_chunks_is_the_naive_loss(dtype, name, bias, chunk):
    s = setting(dtype, bias)
    head = Head(s["weight"], s["bias"])
    log_q = (torch.nn.functional.linear(s["hidden"], s["weight"], s["bias"]) / T).log_softmax(-1)
    log_p = (s["teacher_hidden"] @ s["teacher"].weight_VH.T + s["teacher"].bias_V) / T
    expected = NAIVE[name](log_p.log_softmax(-1), log_q).sum() / 17
    expected.backward()
    expected_grads = gradients(s)

    objective = FullDistillation(divergence(name), HiddenTargets(s["teacher_hidden"]), s["teacher"], T)
    result = token_loss(s["hidden"], head, objective, temperature=T, denominator=17, chunk_tokens=chunk)
    result.loss.backward()
    close([result.loss], [expected], dtype)
    assert result.total == pytest.approx(17 * expected.item(), rel=1e-5)
    close(gradients(s), expected_grads, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_likelihood_and_top_k_do_not_depend_on_the_chunk(dtype):
    s = setting(dtype)
    head, ids = Head(s["weight"], s["bias"]), torch.randint(0, V, (M,))
    top = torch.randn(M, V, dtype=dtype).log_softmax(-1).topk(5, -1)
    for objective in (
        NegativeLogLikelihood(ids),
        TopKDistillation(divergence("jsd"), TopKTargets(top.indices, top.values)),
    ):
        seen = []
        for chunk in (M, 3):
            r = token_loss(s["hidden"], head, objective, temperature=T, denominator=M, chunk_tokens=chunk)
            r.loss.backward()
            seen.append((r, gradients(s)))
        (whole, whole_grads), (parts, parts_grads) = seen
        close([parts.loss, *parts_grads], [whole.loss, *whole_grads], dtype)
        assert parts.sums == pytest.approx(whole.sums, rel=1e-5)
    logits = torch.nn.functional.linear(s["hidden"], s["weight"], s["bias"]) / T
    expected = torch.nn.functional.cross_entropy(logits, ids)
    r = token_loss(
        s["hidden"], head, NegativeLogLikelihood(ids), temperature=T, denominator=M, chunk_tokens=3
    )
    close([r.loss], [expected], dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tied_embeddings_get_both_gradients_and_a_padded_head_none_beyond_the_vocabulary(dtype):
    """The head is a cut of the embedding table, which the hidden states come out of too."""
    torch.manual_seed(1)
    table = torch.randn(V + 3, H, dtype=dtype, requires_grad=True)
    mix = torch.randn(H, H, dtype=dtype)
    ids, labels = torch.randint(0, V, (M,)), torch.randint(0, V, (M,))
    torch.nn.functional.cross_entropy(((table[ids] @ mix).tanh() @ table[:V].T) / T, labels).backward()
    assert table.grad is not None
    expected, table.grad = table.grad, None
    hidden = (table[ids] @ mix).tanh()
    r = token_loss(
        hidden, Head(table[:V]), NegativeLogLikelihood(labels), temperature=T, denominator=M, chunk_tokens=4
    )
    r.loss.backward()
    assert table.grad is not None
    close([table.grad], [expected], dtype)
    assert table.grad[V:].count_nonzero() == 0


def test_what_is_frozen_gets_no_gradient():
    s = setting(torch.float64)
    s["weight"].requires_grad_(False)
    objective = NegativeLogLikelihood(torch.zeros(M, dtype=torch.long))
    token_loss(
        s["hidden"], Head(s["weight"]), objective, temperature=1.0, denominator=M, chunk_tokens=4
    ).loss.backward()
    assert s["weight"].grad is None
    assert s["hidden"].grad is not None and s["hidden"].grad.abs().sum() > 0


def test_a_scaled_loss_scales_its_gradient_and_a_second_backward_is_refused():
    s = setting(torch.float64)
    objective = NegativeLogLikelihood(torch.zeros(M, dtype=torch.long))
    seen = []
    for factor in (1, 3):
        loss = token_loss(
            s["hidden"], Head(s["weight"]), objective, temperature=T, denominator=M, chunk_tokens=4
        ).loss
        (factor * loss).backward(retain_graph=True)
        seen.append(gradients({**s, "bias": None}))
    for once, thrice in zip(*seen, strict=True):
        torch.testing.assert_close(3 * once, thrice)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


@pytest.mark.parametrize("rows", [0, M])
def test_nothing_trained_is_loss_zero_and_gradient_zero(rows):
    s = setting(torch.float32)
    r = token_loss(
        s["hidden"][:rows],
        Head(s["weight"], s["bias"]),
        NegativeLogLikelihood(torch.zeros(rows, dtype=torch.long)),
        temperature=T,
        denominator=0,
        chunk_tokens=4,
    )
    r.loss.backward()
    assert r.loss.item() == 0.0
    assert all(g.count_nonzero() == 0 for g in gradients(s))


def test_log_probs_at_a_temperature_and_twice():
    """Trainer log-probs are log_softmax(z / T), and asking again changes nothing."""
    s = setting(torch.float64)
    head, ids = Head(s["weight"].detach(), s["bias"].detach()), torch.randint(0, V, (M,))
    logits = s["hidden"].detach() @ head.weight_VH.T + head.bias_V
    for temperature in (0.7, 1.0, 1.3):
        expected = (logits / temperature).log_softmax(-1)[torch.arange(M), ids]
        for chunk in (3, 100):
            got = token_log_probs(
                s["hidden"].detach(), head, ids, temperature=temperature, chunk_tokens=chunk
            )
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert token_log_probs(s["hidden"][:0], head, ids[:0], temperature=1.0, chunk_tokens=4).shape == (0,)


def test_bfloat16_logits_are_normalised_in_float32():
    torch.manual_seed(2)
    hidden, weight = torch.randn(5, 16).bfloat16(), torch.randn(4096, 16).bfloat16()
    got = head_log_probs(hidden, Head(weight), 0.7)
    logits = torch.nn.functional.linear(hidden, weight)
    assert got.dtype == torch.float32
    assert (got.double() - (logits.double() / 0.7).log_softmax(-1)).abs().max() < 1e-3
    assert (got.exp().sum(-1) - 1).abs().max() < 1e-5


def test_bfloat16_head_gradients_are_summed_in_float32():
    """Many small contributions to one row of the head, each below half a unit in the sum's last place."""
    torch.manual_seed(3)
    rows = 512
    hidden = (1 + torch.rand(rows, 4)).bfloat16().requires_grad_()
    weight = torch.randn(6, 4).bfloat16().requires_grad_()
    objective = NegativeLogLikelihood(torch.zeros(rows, dtype=torch.long))
    token_loss(
        hidden, Head(weight), objective, temperature=1.0, denominator=rows, chunk_tokens=1
    ).loss.backward()
    wide_hidden, wide_weight = hidden.detach().double(), weight.detach().double().requires_grad_()
    logits = wide_hidden @ wide_weight.T
    torch.nn.functional.cross_entropy(logits, torch.zeros(rows, dtype=torch.long)).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=0.01, atol=0.003)
