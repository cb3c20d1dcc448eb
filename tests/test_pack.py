"""Rollouts laid end to end, cut into micro-batches and shards, and put together again."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniverl.data.responses import dataset_rollout
from miniverl.pack import balance, micro_batches, pack
from miniverl.types import (
    Batch,
    HiddenTargets,
    OutcomeTargets,
    PolicyTargets,
    Prompt,
    TopKTargets,
    ValueTargets,
)
from tests.tiny_models import ragged_batch, rollout

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12)


def sequences(batch: Batch) -> list[tuple[int, list[int], list[int]]]:
    """(row, ids, mask) of each sequence."""
    sizes = batch.lengths_N.tolist()
    ids, masks = batch.token_ids_S.split(sizes), batch.mask_S.split(sizes)
    return [(r, i.tolist(), m.tolist()) for r, i, m in zip(batch.rows, ids, masks, strict=True)]


def test_prompt_then_response_and_only_the_response_trained():
    batch = pack([rollout([5, 6], [7, 8, 9], [1, 0, 1]), rollout([1, 2, 3], []), rollout([4], [4])])
    assert sequences(batch) == [
        (0, [5, 6, 7, 8, 9], [0, 0, 1, 0, 1]),
        (1, [1, 2, 3], [0, 0, 0]),
        (2, [4, 4], [0, 1]),
    ]
    assert batch.trained_tokens == 3
    assert batch.trained_per_row() == [2, 0, 1]
    assert len(batch) == 3


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one rollout"):
        pack([])


@given(lengths, st.data())
def test_a_selection_keeps_ids_masks_rows_targets_and_the_denominator(sizes, data):
    batch = ragged_batch(sizes)
    trained = int(batch.mask_S.sum())
    # Each trained token's target is its own position in the batch, so that a wrong cut shows.
    where = torch.arange(len(batch.mask_S))[batch.mask_S == 1]
    for targets in (
        HiddenTargets(where[:, None].double()),
        TopKTargets(where[:, None].repeat(1, 2), where[:, None].repeat(1, 2).double()),
        PolicyTargets(*[where.double()] * 6),
        ValueTargets(where.double(), where.double()),
        OutcomeTargets(where.double(), where.double()),
    ):
        whole = replace(batch, targets=targets)
        index = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
        part = whole.select(index)
        assert sequences(part) == [sequences(whole)[i] for i in index]
        assert part.trained_tokens == trained
        starts = np.cumsum([0, *(p + r for p, r in sizes)])
        expected = [w for i in index for w in where.tolist() if starts[i] <= w < starts[i + 1]]
        kept = part.targets
        assert kept is not None
        for field in fields(kept):
            column = getattr(kept, field.name)
            assert (column[:, 0] if column.dim() == 2 else column).tolist() == expected


@given(lengths, st.integers(18, 60))
def test_micro_batches_hold_every_sequence_once_within_the_padded_budget(sizes, budget):
    batch = ragged_batch(sizes)
    pieces = micro_batches(batch, budget)
    assert sorted(s for piece in pieces for s in sequences(piece)) == sequences(batch)
    for piece in pieces:
        assert len(piece) * int(piece.lengths_N.max()) <= budget
        assert piece.trained_tokens == batch.trained_tokens


def test_a_sequence_above_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"12 tokens exceeds trainer\.micro_batch_tokens=11"):
        micro_batches(ragged_batch([(3, 2), (6, 6)]), 11)


def test_no_sequences_make_no_micro_batches():
    assert micro_batches(ragged_batch([(3, 2)]).select([]), 10) == []


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 7))
def test_shares_cover_all_items_in_order_and_are_about_even(loads, workers):
    shares = balance(loads, workers)
    assert len(shares) == workers
    assert sorted(i for share in shares for i in share) == list(range(len(loads)))
    assert all(share == sorted(share) for share in shares)
    if len(loads) >= workers:
        assert all(shares)
    sums = [sum(loads[i] for i in share) for share in shares]
    # The emptiest worker took each item, so no two differ by more than the largest one.
    assert max(sums) - min(sums) <= max(loads, default=0)


def test_a_truncated_rollout_keeps_its_arrays_equally_long():
    whole = rollout([1, 2], list(range(10)), [1, 0] * 5)
    cut = whole.truncated(8)
    assert [len(a) for a in (cut.response_ids, cut.mask, cut.log_probs)] == [8, 8, 8]
    assert cut.response_ids.tolist() == list(range(8)) and cut.mask.tolist() == [1, 0] * 4
    assert (cut.finish, whole.finish) == ("length", "stop")
    assert whole.truncated(10) is whole
    assert len(cut) == 10


def test_per_token_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="8 response tokens, 10 mask entries and 8 log-probs"):
        rollout([1], list(range(8)), [1] * 10)


def test_a_dataset_response_is_cut_with_its_mask_and_has_no_log_probs():
    prompt = Prompt("a#0", (1, 2), "", reference_ids=(5, 6, 7, 8), reference_mask=(1, 0, 1, 1))
    r = dataset_rollout(prompt, 3, version=7, max_response_length=3)
    assert r.response_ids.tolist() == [5, 6, 7] and r.mask.tolist() == [1, 0, 1]
    assert np.isnan(r.log_probs).all() and len(r.log_probs) == 3
    assert (r.sample, r.version, r.finish, r.source) == (3, (7, 7), "length", "dataset")
    with pytest.raises(ValueError, match="has no dataset response"):
        dataset_rollout(Prompt("b#0", (1,), ""), 0, 0, 3)
