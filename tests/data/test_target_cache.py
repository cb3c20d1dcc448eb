"""Teacher targets on disk: what comes back is what was written, and nothing that is stale or broken does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from miniverl.config import RunError
from miniverl.data import target_cache
from miniverl.data.target_cache import TargetCache, write
from miniverl.types import Rollout, TopKTargets
from tests.tiny_models import rollout

SETTINGS = {"teacher": "files abc", "top_k": 2, "temperature": 1.0}
ROWS = [
    rollout([1, 2], [3, 4, 5], [1, 0, 1]),
    rollout([1, 2, 3], [4, 6], [1, 1]),
    rollout([7], [8], [0]),
    rollout([9], [9, 9, 9]),
]


def targets_of(rollouts) -> TopKTargets:
    """Numbers that name their sequence and token, so that a wrong place shows."""
    rows = [
        100.0 * int(np.concatenate([r.prompt_ids, r.response_ids]).sum()) + t
        for r in rollouts
        for t in range(int(r.mask.sum()))
    ]
    values = torch.tensor(rows).double()[:, None].repeat(1, 2)
    return TopKTargets(values.long(), -values)


def filled(directory, rows=ROWS, settings=SETTINGS) -> TargetCache:
    cache = TargetCache(directory, settings, rows)
    for part in cache.missing(pytest.fail):
        write(part, targets_of(part.rollouts))
    return cache


def reopened(directory, rows=ROWS, settings=SETTINGS):
    """The parts that another run would have to score, and what it is told about damage."""
    told: list[str] = []
    cache = TargetCache(directory, settings, rows)
    return cache, cache.missing(told.append), told


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(target_cache, "PART", 3)


def test_what_was_written_comes_back_bit_for_bit_in_any_order(tmp_path):
    filled(tmp_path)
    cache, missing, told = reopened(tmp_path)
    assert len(cache.parts) == 2 and missing == [] and told == []
    order = [ROWS[3], ROWS[2], ROWS[0], ROWS[3], ROWS[1]]
    found, expected = cache.targets(order), targets_of(order)
    assert found.ids_MK.dtype == torch.long and found.log_probs_MK.dtype == torch.float64
    assert torch.equal(found.ids_MK, expected.ids_MK)
    assert torch.equal(found.log_probs_MK, expected.log_probs_MK)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors"] * 2


def test_a_sequence_that_occurs_twice_is_scored_once(tmp_path):
    twice = [*ROWS, *[replace(r, uid="again#3", sample=5, version=(7, 7)) for r in ROWS]]
    assert [len(part.rollouts) for part in TargetCache(tmp_path, SETTINGS, twice).parts] == [3, 1]
    filled(tmp_path)
    assert reopened(tmp_path, twice)[1] == []


@pytest.mark.parametrize(
    ("change", "scored"),
    [
        (lambda rows: [*rows, rollout([5], [6])], 1),  # the last part only
        (lambda rows: [replace(rows[0], response_ids=np.array([3, 4, 6])), *rows[1:]], 3),
        (lambda rows: [replace(rows[0], mask=np.array([1, 1, 1])), *rows[1:]], 3),
        (lambda rows: [replace(rows[0], prompt_ids=np.array([1, 3])), *rows[1:]], 3),
        (lambda rows: [rows[0], rollout([1, 2, 3, 4], [6]), *rows[2:]], 3),
    ],
)
def test_changed_rows_are_scored_anew_and_others_are_not(tmp_path, change, scored):
    filled(tmp_path)
    _, missing, told = reopened(tmp_path, change(ROWS))
    assert told == []
    assert sum(len(part.rollouts) for part in missing) == {1: 2, 3: 3}[scored]


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_other_settings_or_another_teacher_share_nothing(tmp_path, key):
    filled(tmp_path)
    changed: dict[str, object] = {**SETTINGS, key: "other"}
    assert len(reopened(tmp_path, settings=changed)[1]) == 2
    filled(tmp_path, settings=changed)
    assert reopened(tmp_path)[1] == reopened(tmp_path, settings=changed)[1] == []


def spoil(content: bytes, how: str) -> bytes:
    if how == "flip":
        return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    return {"cut": content[: len(content) // 2], "empty": b"", "other": b"not safetensors at all"}[how]


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "other"])
def test_a_damaged_file_is_named_and_scored_anew(tmp_path, how):
    cache = filled(tmp_path)
    path = cache.parts[0].path
    path.write_bytes(spoil(path.read_bytes(), how))
    again, missing, told = reopened(tmp_path)
    assert missing == again.parts[:1]
    assert len(told) == 1 and str(path) in told[0] and "3 sequences are scored anew" in told[0]
    write(missing[0], targets_of(missing[0].rollouts))
    assert torch.equal(again.targets(ROWS).ids_MK, targets_of(ROWS).ids_MK)


def test_a_whole_file_under_the_name_of_another_is_found_out(tmp_path):
    first, second = (part.path for part in filled(tmp_path).parts)
    first.write_bytes(second.read_bytes())
    _, missing, told = reopened(tmp_path)
    assert [part.path for part in missing] == [first]
    assert f"it was written as {second.stem}" in told[0]


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    part = TargetCache(tmp_path, SETTINGS, ROWS).parts[0]

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(part, targets_of(part.rollouts))
    assert list(tmp_path.iterdir()) == []


def test_targets_that_do_not_fit_the_part_are_refused(tmp_path):
    part = TargetCache(tmp_path, SETTINGS, ROWS).parts[0]
    with pytest.raises(ValueError, match="3 rows of targets for 4 trained tokens"):
        write(part, targets_of(ROWS[3:]))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_goes_during_the_run_ends_it_in_one_paragraph(tmp_path):
    cache = filled(tmp_path)
    cache.parts[1].path.unlink()
    with pytest.raises(RunError, match=r"cannot be read any more .* starting again scores what is missing"):
        cache.targets(ROWS)


def test_a_sequence_that_was_not_asked_for_is_an_error(tmp_path):
    unknown: Rollout = rollout([1], [1])
    with pytest.raises(KeyError):
        filled(tmp_path).targets([unknown])


def test_no_pickle(tmp_path):
    """Plain safetensors, whose facts anybody can read."""
    path = filled(tmp_path).parts[0].path
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {"ids_MK", "log_probs_MK"}
        assert file.metadata()["key"] == path.stem
