"""From rewards to advantages per token: pairing by prompt occurrence, holes, and missing rewards."""

from dataclasses import replace

import pytest
import torch

from miniverl.controller.signals import episodes
from tests.tiny_models import rollout


def test_groups_are_prompt_occurrences_and_rewards_sit_on_the_last_trained_token():
    rows = [
        replace(rollout([1], [4, 5, 6], [1, 0, 1]), uid="a#0", rewards={"x": 1.0}),
        replace(rollout([1], [4]), uid="a#1", rewards={"x": 0.5, "y": 0.25}),
        replace(rollout([1], [4, 5, 6, 7]), uid="a#0", rewards={"x": 0.0}),
    ]
    found = episodes(rows)
    assert found.group_N.tolist() == [0, 1, 0]  # the same text under another uid is another group
    assert found.mask_NT.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    expected = [[0, 1, 0, 0], [0.75, 0, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(found.token_rewards_NT, torch.tensor(expected, dtype=torch.float32))


def test_a_rollout_without_a_reward_is_named_not_zero():
    with pytest.raises(ValueError, match="b#3/0"):
        episodes([replace(rollout([1], [4]), uid="b#3")])
