"""Distillation and process rewards as advantages, covariance, and losses without golden vectors: by hand."""

import pytest
import torch

from miniverl.algos.advantages import ESTIMATORS, Episode, Settings
from miniverl.algos.covariance import covariance, drawn_between, highest
from miniverl.algos.policy_losses import LOSSES, ClipSettings

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
OUTCOMES = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def episode(**more: torch.Tensor) -> Episode:
    return Episode(OUTCOMES, MASK, torch.tensor([0, 0]), **more)


def test_opd_is_the_gap_of_each_token_and_nothing_of_the_next():
    gap = torch.tensor([[0.5, -0.25, 9.0], [1.0, 9.0, 9.0]])
    found = ESTIMATORS["opd"](episode(teacher_gap_NT=gap), Settings())
    torch.testing.assert_close(found.advantages_NT, torch.tensor([[0.5, -0.25, 0.0], [1.0, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="teacher"):
        ESTIMATORS["opd"](episode(), Settings())


def test_prime_sums_process_and_outcome_rloo_before_it_whitens():
    """Responses of means .3 and .4, two in the group: baseline .7, scale 2; outcomes 1 and 0 give ±1."""
    process = torch.tensor([[0.2, 0.4, 9.0], [0.4, 9.0, 9.0]])
    found = ESTIMATORS["prime"](episode(process_rewards_NT=process), Settings())
    first, second = 2 * 0.2 - 0.7, 2 * 0.4 - 0.7 + 1
    returns = torch.tensor([first + second, second, 2 * 0.4 - 0.7 - 1])
    torch.testing.assert_close(found.returns_NT[MASK == 1], returns)
    whitened = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    torch.testing.assert_close(found.advantages_NT[MASK == 1], whitened)
    with pytest.raises(ValueError, match="process"):
        ESTIMATORS["prime"](episode(), Settings())


def test_prime_without_process_rewards_in_the_sum_is_whitened_rloo():
    process = torch.tensor([[0.2, 0.4, 9.0], [0.4, 9.0, 9.0]])
    found = ESTIMATORS["prime"](episode(process_rewards_NT=process), Settings(process_coef=0.0))
    torch.testing.assert_close(found.returns_NT[MASK == 1], torch.tensor([1.0, 1.0, -1.0]))


def test_gpg_may_count_advantages_in_place_of_scores():
    same = Episode(torch.tensor([[1.0], [1.0], [1.0], [0.0]]), torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))
    by_scores = ESTIMATORS["gpg"](same, Settings()).advantages_NT[:, 0]
    by_advantages = ESTIMATORS["gpg"](same, Settings(gpg_count="advantages")).advantages_NT[:, 0]
    torch.testing.assert_close(by_scores, torch.tensor([0, 0, 0.5, -0.5]) * 4 / 3)
    torch.testing.assert_close(by_advantages, torch.tensor([0, 0, 0.5, -0.5]) * 4 / 2)


def test_tokens_of_high_covariance_are_chosen():
    log_probs, advantages = torch.tensor([-1.0, -2.0, -3.0, -6.0]), torch.tensor([2.0, 0.0, -1.0, -5.0])
    found = covariance(log_probs, advantages)  # means -3 and -1
    torch.testing.assert_close(found, torch.tensor([6.0, 1.0, 0.0, 12.0]))
    assert highest(found, 0.5).tolist() == [1, 0, 0, 1]
    assert highest(found, 0.0).tolist() == [0, 0, 0, 1]  # at least one
    draws = torch.tensor([0.9, 0.1, 0.0, 0.5])
    assert drawn_between(found, 0.25, 0.5, 20, draws).tolist() == [0, 1, 0, 0]  # 0.0 lies below the band
    assert drawn_between(found, 0.99, 5, 7, draws).tolist() == [1, 0, 0, 0]  # no more than there are
    assert drawn_between(found, 0.5, 100, 101, draws).tolist() == [0, 0, 0, 0]


def test_losses_that_select_tokens():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, a, mask = torch.tensor([[-1.1, -1.9]]), torch.tensor([[1.5, -2.0]]), torch.ones(1, 2)
    ratio = (log_probs.detach() - old).exp()
    chosen = ClipSettings(selected_NT=torch.tensor([[1.0, 0.0]]), ppo_kl_coef=0.3)
    clipped = LOSSES["clip_cov"](log_probs, old, a, mask, chosen).loss_NT
    torch.testing.assert_close(clipped.detach(), torch.stack([torch.tensor(0.0), -(a * ratio)[0, 1]])[None])
    held = LOSSES["kl_cov"](log_probs, old, a, mask, chosen).loss_NT
    torch.testing.assert_close(held.detach(), -a * ratio + torch.tensor([[0.3 * 0.1, 0.0]]))
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match="whole mini-batch"):
            LOSSES[name](log_probs, old, a, mask, ClipSettings())


def test_the_gradient_of_ppo_kl_is_that_of_the_kl_from_old_to_new():
    """In expectation over the old policy, against the exact divergence of two distributions."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    old = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    new = logits.log_softmax(-1)
    zero, mask = torch.zeros(1, 6, dtype=torch.float64), torch.ones(1, 6, dtype=torch.float64)
    loss = LOSSES["ppo_kl"](new[None], old[None], zero, mask, ClipSettings(ppo_kl_coef=1.0)).loss_NT[0]
    (estimated,) = torch.autograd.grad((old.exp() * loss).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((old.exp() * (old - new)).sum(), logits)
    torch.testing.assert_close(estimated, exact)
    assert LOSSES["importance_sampling"] is LOSSES["reinforce"]
