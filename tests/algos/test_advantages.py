"""Advantages against hand-computed values, and what must not change them."""

import math

import pytest
import torch

from miniverl.algos.advantages import ESTIMATORS, Episode, Settings
from miniverl.algos.aggregate import masked_whiten

GROUPED = ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]


def episode(scores, groups, lengths=None, width=4):
    lengths = lengths or [width] * len(scores)
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        mask[i, :length], rewards[i, length - 1] = 1, score
    return Episode(rewards, mask, torch.tensor(groups))


def per_sequence(name, e, **settings):
    return ESTIMATORS[name](e, Settings(**settings)).advantages_NT[:, 0].tolist()


def test_gae_by_hand_before_whitening():
    e = Episode(
        torch.tensor([[0.0, 0, 1]]),
        torch.ones(1, 3),
        torch.tensor([0]),
        values_NT=torch.tensor([[0.1, 0.2, 0.3]]),
    )
    found = ESTIMATORS["gae"](e, Settings(gamma=1.0, lam=0.95))
    raw = torch.tensor([[0.82675, 0.765, 0.7]])
    torch.testing.assert_close(found.returns_NT, raw + torch.tensor([[0.1, 0.2, 0.3]]))
    torch.testing.assert_close(found.advantages_NT, (raw - raw.mean()) / raw.std())


def test_gae_passes_over_tool_tokens():
    holes = Episode(
        torch.tensor([[0.0, 9.0, 1.0]]),
        torch.tensor([[1.0, 0, 1]]),
        torch.tensor([0]),
        values_NT=torch.tensor([[0.1, 7.0, 0.3]]),
    )
    dense = Episode(
        torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([0]), values_NT=torch.tensor([[0.1, 0.3]])
    )
    settings = Settings(gamma=0.9, lam=0.8)
    found = ESTIMATORS["gae"](holes, settings)
    torch.testing.assert_close(
        found.returns_NT[:, [0, 2]], ESTIMATORS["gae"](dense, settings).returns_NT
    )
    assert found.returns_NT[0, 1] == found.advantages_NT[0, 1] == 0


def test_group_baselines_by_hand():
    e = episode([1.0, 0.0, 0.0, 1.0, 0.5, 0.0], [0, 0, 0, 1, 1, 1], lengths=[1, 2, 3, 4, 4, 2])
    std = math.sqrt(1 / 3)
    assert per_sequence("grpo", e)[:3] == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std], rel=1e-5)
    assert per_sequence("grpo", e, norm_by_std=False) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, 0, -0.5])
    assert per_sequence("rloo", e) == pytest.approx([1, -0.5, -0.5, 0.75, 0, -0.75])
    assert per_sequence("opo", e) == pytest.approx([5 / 6, -1 / 6, -1 / 6, 0.4, -0.1, -0.6], rel=1e-5)
    assert per_sequence("gpg", e) == pytest.approx([x * 2 for x in (2 / 3, -1 / 3, -1 / 3, 0.5, 0, -0.5)])
    assert per_sequence("grpo_passk", e, norm_by_std=False) == pytest.approx([1, 0, 0, 0.5, 0, 0])


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("score", [0.0, 0.3, 1.0])
def test_equal_rewards_are_exactly_no_signal(name, score):
    """float32 [0.3] * 6 has a standard deviation of 3e-8: noise, not signal."""
    assert per_sequence(name, episode([score] * 6, [0] * 6, lengths=[1, 2, 3, 4, 3, 2])) == [0.0] * 6


@pytest.mark.parametrize("name", GROUPED)
def test_the_order_of_rows_does_not_matter(name):
    """ADV-05: pairing is by group id, never by position."""
    scores, groups, lengths = [1.0, 0.0, 0.5, 0.2, 0.9, 0.0], [3, 1, 3, 1, 3, 1], [1, 2, 3, 4, 2, 3]
    order = [4, 2, 0, 5, 1, 3]
    plain = per_sequence(name, episode(scores, groups, lengths))
    rows = [(scores[i], groups[i], lengths[i]) for i in order]
    shuffled = per_sequence(name, episode([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]))
    assert shuffled == pytest.approx([plain[i] for i in order], rel=1e-5, abs=1e-6)


def test_a_group_of_one_as_documented():
    """ADV-03: verl's rule, stated; the config refuses n=1 unless asked for."""
    alone = episode([0.7], [0])
    for name in ("grpo", "rloo", "opo", "gpg"):
        assert per_sequence(name, alone) == pytest.approx([0.7], rel=1e-5)
    assert per_sequence("rloo_vectorized", alone) == [0.0]
    with pytest.raises(ValueError, match="group of one"):
        ESTIMATORS["grpo_passk"](alone, Settings())


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("gae", "remax", "opd", "prime")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_missing_reward_is_refused_not_spread(name, bad):
    """ADV-02."""
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        ESTIMATORS[name](episode([1.0, bad, 0.0, 1.0], [0, 0, 0, 0]), Settings())


@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_next_to_nothing_is_defined(tokens):
    """ADV-09."""
    mask = torch.zeros(2, 3)
    mask[0, :tokens] = 1
    assert masked_whiten(torch.full((2, 3), 5.0), mask).tolist() == [[0.0] * 3] * 2


def test_whitening_is_over_the_whole_mask():
    """ADV-08: not per row."""
    values, mask = torch.tensor([[1.0, 2, 99], [5, 99, 8]]), torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    kept = torch.tensor([1.0, 2, 5, 8])
    torch.testing.assert_close(
        masked_whiten(values, mask)[mask == 1], (kept - kept.mean()) / kept.std()
    )


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("gae", "remax", "opd", "prime")])
def test_writing_a_span_changes_that_span_alone(name):
    """ADV-12: an expanded view would change the row."""
    found = ESTIMATORS[name](episode([1.0, 0.0], [0, 0], width=6), Settings())
    before, returns = found.advantages_NT.clone(), found.returns_NT.clone()
    found.advantages_NT[0, 2:4] -= 1
    torch.testing.assert_close((before - found.advantages_NT)[0], torch.tensor([0.0, 0, 1, 1, 0, 0]))
    torch.testing.assert_close(found.returns_NT, returns)
