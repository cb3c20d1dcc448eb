"""Noise, filters and the draw, each against an independent computation."""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.sampling import draw, filtered_logits, uniforms

WORD = 2**64


def sampling(**options: Any) -> Sampling:
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 8,
        "stop_ids": (),
        "seed": 0,
    }
    return Sampling(**{**neutral, **options})


def splitmix64(state):
    """One step in plain integers: the new state and its output."""
    state = (state + 0x9E3779B97F4A7C15) % WORD
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return state, z ^ (z >> 31)


def filtered(logits, temperature, top_k, top_p):
    """Probabilities of one row in float64: divide, keep the k largest, keep the nucleus, renormalise."""
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[np.argsort(-p)[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        order, mass, kept = np.argsort(-p), 0.0, []
        for token in order:
            if mass >= top_p:
                break
            kept.append(token)
            mass += p[token]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    return p / p.sum()


def test_splitmix64_reference_outputs():
    """The published sequence of seed 1234567 (as in the test vectors of Vigna's and Java's generators)."""
    state, outputs = 1234567, []
    for _ in range(3):
        state, z = splitmix64(state)
        outputs.append(z)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 7, -3, 2**40])
def test_noise_is_splitmix64_of_the_key(seed):
    keys = [("addition/12#0", 0), ("addition/12#0", 1), ("ü#1", 11)]
    got = uniforms(seed, keys, 5)
    for (uid, sample), row in zip(keys, got, strict=True):
        key = hashlib.sha256(f"{seed}/{uid}/{sample}".encode()).digest()[:8]
        state = int.from_bytes(key, "big")
        for u in row:
            state, z = splitmix64(state)
            assert u == (z >> 11) / 2**53


def test_noise_depends_on_its_key_and_position_alone():
    a = uniforms(1, [("a", 0), ("b", 3)], 6)
    assert np.array_equal(a[::-1], uniforms(1, [("b", 3), ("a", 0)], 6))
    assert np.array_equal(a[:, :2], uniforms(1, [("a", 0), ("b", 3)], 2))
    others = uniforms(1, [("a", 1), ("a#", 0), ("b", 0)], 6)
    assert len(np.unique(np.concatenate([a, others, uniforms(2, [("a", 0)], 6)]))) == 36
    assert uniforms(1, [], 3).shape == (0, 3) and uniforms(1, [("a", 0)], 0).shape == (1, 0)


def test_noise_is_uniform_and_uncorrelated():
    u = uniforms(0, [(f"p{i}#0", k) for i in range(250) for k in range(4)], 40)
    assert u.min() >= 0 and u.max() < 1
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    chi2 = ((counts - u.size / 64) ** 2 / (u.size / 64)).sum()
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    for a, b in ((u[:, 0], u[:, 1]), (u[::4, 0], u[1::4, 0]), (u[:-1, 0], u[1:, 0])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))


@given(
    st.lists(st.integers(-80, 80).map(lambda i: i / 10), min_size=9, max_size=9, unique=True),
    st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 9, 50]),
    st.sampled_from([1e-6, 0.31, 0.9, 1.0]),
)
def test_draws_are_of_the_filtered_renormalised_distribution(logits, temperature, top_k, top_p):
    got = filtered_logits(
        torch.tensor([logits], dtype=torch.float64),
        sampling(temperature=temperature, top_k=top_k, top_p=top_p),
    ).log_softmax(-1)
    expected = filtered(np.array(logits), temperature, top_k, top_p)
    np.testing.assert_allclose(got[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_filters_by_hand():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()

    def kept(**filters):
        return filtered_logits(logits, sampling(**filters)).softmax(-1)[0].tolist()

    assert kept(top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    # 0.4 does not reach 0.65, 0.4 + 0.3 does: the token that crosses the line stays.
    assert kept(top_p=0.65) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    # top-k comes first: among {.4, .3} renormalised, 4/7 alone reaches 0.5.
    assert kept(top_k=2, top_p=0.5) == [1, 0, 0, 0]


def test_bfloat16_logits_are_filtered_in_float32():
    logits = torch.randn(2, 500).bfloat16()
    got = filtered_logits(logits, sampling(temperature=0.7)).log_softmax(-1)
    assert got.dtype == torch.float32
    assert (got.double() - (logits.double() / 0.7).log_softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.5, 3, 1.0), (1.0, 0, 0.8)]
)
def test_drawn_tokens_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square of 40,000 draws; no token outside the filters, and each draw's log-prob is its own."""
    logits = np.array([1.0, -0.5, 2.0, 0.3, -4.0, 1.4])
    n = 40_000
    u = uniforms(3, [(f"p{i}", 0) for i in range(n)], 1)[:, 0]
    rows = torch.tensor(logits, dtype=torch.float32).expand(n, -1)
    ids, log_probs = draw(
        rows, sampling(temperature=temperature, top_k=top_k, top_p=top_p), torch.from_numpy(u)
    )
    p = filtered(logits, temperature, top_k, top_p)
    counts = np.bincount(ids.numpy(), minlength=6)
    assert (counts[p == 0] == 0).all()
    expected = n * p[p > 0]
    chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)
    np.testing.assert_allclose(log_probs, np.log(p[ids.numpy()]), rtol=1e-5, atol=1e-6)


def test_the_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().double()
    points = torch.tensor([0.0, 0.2499, 0.2501, 0.4999, 0.5001, 1 - 2.0**-53], dtype=torch.float64)
    ids, _ = draw(logits.expand(6, -1), sampling(), points)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_tokens_without_probability_are_never_drawn(u):
    """At the ends of the noise's range, with impossible tokens first, between and last, also by underflow."""
    for nothing in (-torch.inf, -300.0):
        logits = torch.tensor([[nothing, 0.0, nothing, 1.0, nothing, nothing]])
        ids, log_probs = draw(logits, sampling(), torch.tensor([u], dtype=torch.float64))
        assert ids.item() in (1, 3) and log_probs.isfinite().all()
    last = torch.randn(200, 50, dtype=torch.float32) * 10
    ids, _ = draw(last, sampling(top_k=2), torch.full((200,), u, dtype=torch.float64))
    assert (ids[:, None] == last.topk(2).indices).any(-1).all()


def test_greedy_takes_the_largest_and_says_so():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    ids, log_probs = draw(logits, sampling(temperature=0.0, top_k=2), torch.tensor([0.99, 0.0]))
    assert ids.tolist() == [1, 0] and log_probs.tolist() == [0.0, 0.0]
