"""From rewards to advantages per token: pairing by prompt occurrence, holes, and missing rewards."""

from dataclasses import replace

import pytest
import torch

from miniverl.config import RunError
from miniverl.controller.episodes import episodes, learnable
from tests.tiny_models import rollout


def test_groups_are_prompt_occurrences_and_rewards_sit_on_the_last_trained_token():
    rows = [
        replace(rollout([1], [4, 5, 6], [1, 0, 1]), uid="a#0", reward=1.0),
        replace(rollout([1], [4]), uid="a#1", reward=0.75),
        replace(rollout([1], [4, 5, 6, 7]), uid="a#0", reward=0.0),
    ]
    found = episodes(rows)
    assert found.group_N.tolist() == [0, 1, 0]  # the same text under another uid is another group
    assert found.mask_NT.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    expected = [[0, 1, 0, 0], [0.75, 0, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(found.token_rewards_NT, torch.tensor(expected, dtype=torch.float32))


def test_a_rollout_without_a_reward_is_named_not_zero():
    with pytest.raises(ValueError, match="b#3/0"):
        episodes([replace(rollout([1], [4]), uid="b#3")])


def test_failed_rewards_leave_the_batch_and_lone_survivors_with_them():
    """ADV-02, ADV-03: no row is a silent 0, and no group baseline is taken over one response."""
    rows = [
        replace(rollout([1], [4]), uid=uid, sample=k, reward=reward)
        for k, (uid, reward) in enumerate([("a", 1.0), ("a", None), ("b", 0.0), ("b", 0.5), ("c", None)])
    ]
    assert [(r.uid, r.sample) for r in learnable(rows, grouped=False)] == [("a", 0), ("b", 2), ("b", 3)]
    assert [(r.uid, r.sample) for r in learnable(rows, grouped=True)] == [("b", 2), ("b", 3)]
    with pytest.raises(RunError, match="none of the step's 1 responses"):
        learnable(rows[4:], grouped=False)
