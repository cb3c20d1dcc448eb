"""Checkpoints: whole or not there, verified, pruned without losing the last or the best; locked."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miniverl.checkpoint import Checkpoint, checkpoints, in_use, locked, prune, write_checkpoint, write_json
from miniverl.config import ConfigError, RunError

ROOT = Path(__file__).parents[1]


def writer(name: str, content: bytes) -> Callable[[str], None]:
    return lambda directory: _fill(Path(directory) / name, content)


def _fill(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def saved(directory: Path, step: int) -> Checkpoint:
    writers = [writer("weights.safetensors", b"w" * (step + 1)), writer("critic/rng.safetensors", b"r")]
    return write_checkpoint(directory, step, {"step": step, "position": 4 * step}, writers)


def steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(directory)]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_missing_and_existing_directories(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b" / "checkpoints"
    assert checkpoints(directory) == []
    first = saved(directory, 3)
    assert first.path == directory / "step_000003"
    assert first.verify().state() == {"step": 3, "position": 12}
    saved(directory, 12)
    (directory / ".unfinished_000020").mkdir()
    (directory / ".unfinished_000020" / "left over").write_text("by a kill")
    (directory / "step_000007").mkdir()  # without a manifest
    (directory / "notes.txt").write_text("mine")
    assert steps(directory) == [3, 12]
    saved(directory, 20)
    assert steps(directory) == [3, 12, 20]
    assert names(first.path) == {"weights.safetensors", "critic", "state.json", "manifest.json"}


def test_same_step_again_replaces_the_old_one(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    write_checkpoint(tmp_path, 2, {"step": 2, "again": True}, [writer("other", b"new")])
    (only,) = checkpoints(tmp_path)
    assert only.verify().state()["again"]
    assert names(only.path) == {"other", "state.json", "manifest.json"}


def test_manifest_names_every_file(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 1)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 1)
    assert set(manifest["files"]) == {"weights.safetensors", "critic/rng.safetensors", "state.json"}
    by_coreutils = "b84ff8057ee3a7f87deac4ae29ac59292f02e6c28f987031648011018384d888"  # printf ww | sha256sum
    assert manifest["files"]["weights.safetensors"] == by_coreutils


@pytest.mark.parametrize("name", ["weights.safetensors", "critic/rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "delete", "cut", "empty"])
def test_damage_is_named(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint = saved(tmp_path, 5)
    path = checkpoint.path / name
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        content[len(content) // 2] ^= 0b100
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-1] if damage == "cut" else b"")
    with pytest.raises(ConfigError) as caught:
        checkpoint.verify()
    text = str(caught.value)
    assert name in text and str(checkpoint.path) in text and "trainer.resume" in text
    assert ("is missing" in text) == (damage == "delete")
    assert "\n" not in text


@pytest.mark.parametrize("content", ["", '{"format": 1, "st', "{}"])
def test_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    checkpoint = saved(tmp_path, 5)
    (checkpoint.path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        checkpoint.verify()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_interrupted_writer_leaves_no_checkpoint(tmp_path: Path, stage: int) -> None:
    saved(tmp_path, 1)

    def interrupt(directory: str) -> None:
        (Path(directory) / "half").write_text("a part")
        raise KeyboardInterrupt

    writers = [writer("a", b"a"), writer("b", b"b")]
    writers.insert(stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, {"step": 2}, writers)
    assert steps(tmp_path) == [1]
    saved(tmp_path, 2).verify()
    assert not (tmp_path / "step_000002" / "half").exists()


DIE = """
import os, sys
from pathlib import Path
from miniverl.checkpoint import prune, write_checkpoint

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

def work(target, limit):
    seen = 0
    def watch(event, facts):
        nonlocal seen
        seen += event in EVENTS
        if seen > limit:
            os._exit(9)
    sys.addaudithook(watch)
    write = lambda path: [Path(path, name).write_text(name) for name in ("weights", "rng")]
    for step in (4, 6):  # 4 is there already: written again after going back to 2
        write_checkpoint(target, step, {"new": True}, [write])
        prune(target, step, 2, {2: 0.9})
    os._exit(0)

for limit, target in enumerate(sys.argv[1:]):
    child = os.fork() or work(Path(target), limit)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_killed_at_any_point_every_checkpoint_is_whole(tmp_path: Path) -> None:
    """The process dies before its n-th look at or change to a file, for every n until it gets through."""
    targets = [tmp_path / f"{limit}" for limit in range(70)]
    for step in (2, 4):
        write_checkpoint(tmp_path / "before", step, {"new": False}, [writer("weights", b"old")])
    for target in targets:
        shutil.copytree(tmp_path / "before", target)
    done = subprocess.run(
        [sys.executable, "-c", DIE, *map(str, targets)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    statuses = [int(line) for line in done.stdout.split()]
    assert set(statuses) == {0, 9}, done.stderr
    assert statuses == sorted(statuses, reverse=True)
    assert statuses.count(9) > 20
    found = [{c.step: c.verify().state()["new"] for c in checkpoints(target)} for target in targets]
    assert all(states[2] is False for states in found), "the best one is never lost"
    assert {2: False, 4: False} in found and {2: False, 4: True} in found
    assert found[-1] == {2: False, 4: True, 6: True}


@pytest.mark.parametrize(
    ("there", "newest", "last", "scores", "left"),
    [
        ([2, 4, 6, 8], 8, 2, {}, [6, 8]),
        ([2, 4, 6, 8], 8, 1, {2: 0.5, 4: 0.9, 6: 0.1}, [4, 8]),
        ([2, 4, 6, 8], 8, 2, {8: 0.9, 2: 0.1}, [6, 8]),
        ([2, 4, 6, 8], 8, 1, {3: 0.9, 4: 0.5, 6: 0.4}, [4, 8]),  # no checkpoint of the very best
        ([2, 4, 6, 8], 8, 1, {0: 0.9}, [8]),
        ([2], 2, 1, {}, [2]),
        ([2], 2, 5, {0: 1.0}, [2]),
        ([2, 4, 6, 8], 4, 2, {8: 0.9}, [2, 4]),  # gone back to 2 and written 4 again
        ([2, 4, 6, 8], 4, 1, {2: 0.9, 8: 1.0}, [2, 4]),
    ],
)
def test_prune(
    tmp_path: Path, there: list[int], newest: int, last: int, scores: dict[int, float], left: list[int]
) -> None:
    for step in there:
        saved(tmp_path, step)
    (tmp_path / ".unfinished_000003").mkdir()
    prune(tmp_path, newest, last, scores)
    assert steps(tmp_path) == left
    assert names(tmp_path) == {f"step_{step:06d}" for step in left}


def test_full_disk_leaves_the_earlier_ones(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)

    def fill(directory: str) -> None:
        (Path(directory) / "part").write_text("fits")
        os.symlink("/dev/full", Path(directory) / "weights")  # the kernel's own full device
        (Path(directory) / "weights").write_bytes(b"w" * 100_000)

    with pytest.raises(RunError) as caught:
        write_checkpoint(tmp_path, 2, {"step": 2}, [writer("a", b"a"), fill])
    text = str(caught.value)
    assert os.strerror(errno.ENOSPC) in text and str(tmp_path) in text and "step 2" in text
    assert "\n" not in text
    assert names(tmp_path) == {"step_000001"}
    first.verify()


def test_unwritable_place_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="could not be written"):
        saved(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="cannot be written to"), locked(tmp_path / "file" / "run"):
        pass


def test_lock_names_its_holder(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    assert not in_use(run_dir)
    with locked(run_dir):
        assert in_use(run_dir)
        with pytest.raises(ConfigError) as caught, locked(run_dir):
            pass
        assert f"process {os.getpid()}" in str(caught.value)
        assert str(run_dir) in str(caught.value)
        assert in_use(run_dir), "asking does not take it away"
    assert not in_use(run_dir)
    with locked(run_dir):
        pass


def test_lock_dies_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom miniverl.checkpoint import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid}"), locked(tmp_path):
            pass
        assert in_use(tmp_path)
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while in_use(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_write_json_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": "ä"})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ä"}
    write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert names(tmp_path) == {"result.json"}
