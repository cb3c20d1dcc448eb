"""Interrupted and resumed runs end exactly where the straight one ends; what would not is refused."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from miniverl.checkpoint import Checkpoint, locked
from miniverl.metrics import read_metrics, read_samples
from tests.crash import (
    ROOT,
    SETTINGS,
    differing,
    finish,
    kill_in_mid_write,
    kill_somewhere,
    killed,
    left_behind,
    logged,
    refuse,
    saved_steps,
    start,
    steps_logged,
    write_models,
    write_rows,
    writing,
)

SEED = int(os.environ.get("CRASH_SEED", time.time_ns() % 10**6))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def job(home: Path) -> list[str]:
    """Eight steps over ten rows, i.e. three epochs, half of the responses the dataset's."""
    return [*write_models(home), *SETTINGS, *write_rows(home / "rows.jsonl")]


@pytest.fixture(scope="module")
def straight(home: Path, job: list[str]) -> Path:
    """The job, never interrupted, started as a user starts it."""
    finish([*job, "trainer.run_dir=straight"], home, cold=True)
    return home / "straight"


def test_straight_run_is_what_it_should_be(straight: Path, home: Path) -> None:
    found = left_behind(straight)
    assert steps_logged(straight) == list(range(1, 9))
    assert [row["step"] for row in found["metrics"] if "val/accuracy" in row] == [0, 3, 6, 8]
    assert found["checkpoints"] == [6, 8]
    assert found["state"]["position"] == 8 * 4
    assert [step for step, _ in found["state"]["history"]] == [0, 3, 6, 8]
    before, after = (
        load_file(path / "model.safetensors") for path in (home / "student", straight / "export")
    )
    assert any((before[name] != after[name]).any() for name in before)
    losses = [row["actor/distillation_loss"] for row in found["metrics"] if "actor/lr" in row]
    assert len(set(losses)) == 8
    assert losses[-1] < losses[0]


def test_learning_rate_and_weight_version_by_hand(straight: Path) -> None:
    rows = [row for row in logged(straight) if "actor/lr" in row]
    cosine = [0.5 * (1 + math.cos(math.pi * i / 5)) for i in range(6)]
    assert [row["actor/lr"] for row in rows] == pytest.approx([3e-3 * f for f in [0.5, 1.0, *cosine]])
    assert [row["training/weight_version"] for row in rows] == list(range(8))


def test_killed_anywhere_and_resumed_equals_straight(straight: Path, home: Path, job: list[str]) -> None:
    rng = random.Random(SEED)
    print(f"CRASH_SEED={SEED}")
    run_dir, command = home / "killed", [*job, "trainer.run_dir=killed"]
    killed(command, home, at=".unfinished_000002/state.json")
    assert writing(run_dir)
    assert saved_steps(run_dir) == []
    for kill in range(5):
        running = start(command, home)
        if kill % 2 == 0:
            kill_in_mid_write(running, run_dir)
        else:
            kill_somewhere(running, run_dir, rng)
        for step in saved_steps(run_dir):
            Checkpoint(run_dir / "checkpoints" / f"step_{step:06d}", step).verify()
    finish(command, home)
    assert differing(left_behind(straight), left_behind(run_dir)) == []
    assert steps_logged(run_dir) == list(range(1, 9))
    assert not writing(run_dir)


def test_first_rollout_after_resume_is_of_the_resumed_weights(
    straight: Path, home: Path, job: list[str]
) -> None:
    command = [*job, "trainer.run_dir=third", "trainer.save_every=3"]
    killed(command, home, at="step_000005.parquet")
    finish(command, home)
    fourth = next(row for row in logged(home / "third") if row["step"] == 4)
    assert fourth["training/weight_version"] == 3
    assert left_behind(home / "third")["export"] == left_behind(straight)["export"]


def test_prompts_come_in_the_order_of_a_straight_run(straight: Path) -> None:
    """Each epoch of ten rows sees every row once, over the borders of steps and checkpoints; two rows with
    the same text stay two groups."""
    rows = [row for row in read_samples(straight) if row["source"] != "held-out"]
    groups = [row["uid"] for row in rows if row["sample"] == 0]
    assert len(rows) == 2 * len(groups) == 64
    assert len(set(groups)) == 32
    for epoch in range(3):
        numbers = [str(uid).rpartition("#") for uid in groups[10 * epoch : 10 * epoch + 10]]
        assert {number[2] for number in numbers} == {str(epoch)}
        assert len({number[0] for number in numbers}) == 10
    texts = [row["prompt"] for row in rows if row["sample"] == 0][:10]
    assert len(set(texts)) == 9


def test_sigterm_saves_and_ends_well(straight: Path, home: Path, job: list[str]) -> None:
    command = [*job, "trainer.run_dir=term"]
    running = start(command, home, at="step_000005.parquet", number=signal.SIGTERM)
    assert running.wait() == 0, running.text
    assert not running.result["finished"]
    assert running.result["steps"] == 5
    assert saved_steps(home / "term") == [4, 5]
    assert steps_logged(home / "term") == [1, 2, 3, 4, 5]
    assert not (home / "term" / "export").exists()
    assert finish(command, home).result["finished"]
    assert differing(left_behind(straight), left_behind(home / "term")) == []


def test_last_step_is_always_saved_and_never_repeated(home: Path, job: list[str]) -> None:
    command = [*job, "trainer.run_dir=five", "trainer.steps=5", "trainer.keep_best=false"]
    finish(command, home)
    assert saved_steps(home / "five") == [4, 5]
    before = left_behind(home / "five")
    assert finish(command, home).result["steps"] == 5
    assert differing(before, left_behind(home / "five")) == []


def test_checkpoints_hold_no_pickle(straight: Path) -> None:
    for directory in (straight / "checkpoints").iterdir():
        names = {path.name for path in directory.iterdir()}
        assert names == {
            "manifest.json",
            "state.json",
            "weights.safetensors",
            "optimizer.safetensors",
            "counters.safetensors",
            "actor.safetensors",
        }
        for path in directory.iterdir():
            if path.suffix == ".safetensors":
                load_file(path)
            else:
                assert path.read_bytes()[:1] == b"{"
    parameters = load_file(straight / "checkpoints" / "step_000008" / "weights.safetensors")
    moments = load_file(straight / "checkpoints" / "step_000008" / "optimizer.safetensors")
    assert set(moments) == {f"{m}/{name}" for m in ("exp_avg", "exp_avg_sq", "step") for name in parameters}
    assert {float(value) for name, value in moments.items() if name.startswith("step/")} == {8.0}


def test_resume_from_a_path(straight: Path, home: Path, job: list[str]) -> None:
    finish([*job, "trainer.run_dir=whole", "trainer.keep_last=9"], home)
    second = home / "whole" / "checkpoints" / "step_000002"
    # Into another directory, from an early checkpoint; the source is not touched.
    finish([*job, "trainer.run_dir=branch", f"trainer.resume={second}"], home)
    branch = left_behind(home / "branch")
    assert steps_logged(home / "branch") == list(range(3, 9))
    assert set(differing(left_behind(straight), branch)) <= {"metrics", "samples"}
    assert saved_steps(home / "whole") == [2, 4, 6, 8]
    # In place, from an early checkpoint: the later ones are written anew, and never taken for the newest.
    command = [*job, f"trainer.resume={second}", "trainer.keep_best=false"]
    killed(command, home, at="step_000005.parquet")
    assert saved_steps(home / "whole") == [2, 4]
    finish([*job, "trainer.run_dir=whole"], home)
    assert differing(left_behind(straight), left_behind(home / "whole")) == []
    # A run directory as the path means its newest checkpoint.
    again = finish([*job, f"trainer.resume={home / 'whole'}"], home)
    assert again.result["steps"] == 8
    assert "going on after step 8" in again.text
    said = refuse([*job, f"trainer.resume={home / 'nothing'}"], home)
    assert "trainer.resume=" in said and "no whole checkpoint" in said


def test_a_copied_checkpoint_goes_on_in_a_fresh_directory(straight: Path, home: Path, job: list[str]) -> None:
    source = straight / "checkpoints" / "step_000006"
    target = home / "elsewhere" / "deep" / "kept"
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    result = finish([*job, f"trainer.resume={target}"], home).result
    assert Path(result["run_dir"]).parts[:2] == ("runs", "gkd_quick")
    assert left_behind(home / result["run_dir"])["export"] == left_behind(straight)["export"]


def test_what_would_not_go_on_exactly_is_refused(straight: Path, home: Path, job: list[str]) -> None:
    here = [*job, "trainer.run_dir=straight"]
    before = left_behind(straight)
    said = refuse([*here, "trainer.resume=never"], home)
    assert "trainer.run_dir=straight" in said and "trainer.resume=auto" in said
    said = refuse([*here, "optim.lr=1e-3"], home)
    assert "optim.lr was 0.003 and is 0.001" in said
    said = refuse([*here, "trainer.steps=12"], home)
    assert "trainer.steps was 8 and is 12" in said and "optim.schedule=cosine" in said
    assert differing(before, left_behind(straight)) == []


def test_changed_data_are_refused(straight: Path, home: Path, job: list[str]) -> None:
    rows = home / "rows.jsonl"
    text = rows.read_text()
    lines = text.splitlines(keepends=True)
    before = left_behind(straight)
    try:
        for changed in (lines + lines[:1], [lines[1], lines[0], *lines[2:]]):
            rows.write_text("".join(changed))
            said = refuse([*job, "trainer.run_dir=straight"], home)
            assert "the training data changed" in said and "step_000008" in said
    finally:
        rows.write_text(text)
    assert differing(before, left_behind(straight)) == []


def test_damaged_checkpoint_is_named(home: Path, job: list[str]) -> None:
    command = [*job, "trainer.run_dir=damaged", "trainer.steps=4", "trainer.keep_best=false"]
    finish(command, home)
    last = home / "damaged" / "checkpoints" / "step_000004"
    weights = bytearray((last / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (last / "weights.safetensors").write_bytes(weights)
    said = refuse(command, home)
    assert "weights.safetensors does not match" in said and str(last.relative_to(home)) in said
    finish([*command, "trainer.resume=damaged/checkpoints/step_000002"], home)


def test_more_steps_with_a_constant_rate(home: Path, job: list[str]) -> None:
    constant = [*job, "optim.schedule=constant", "eval.every=0"]
    finish([*constant, "trainer.run_dir=short", "trainer.steps=4"], home)
    finish([*constant, "trainer.run_dir=short", "trainer.steps=6"], home)
    finish([*constant, "trainer.run_dir=long", "trainer.steps=6"], home)
    short, long = left_behind(home / "short"), left_behind(home / "long")
    assert short["export"] == long["export"] and short["tensors"] == long["tensors"]
    assert steps_logged(home / "short") == list(range(1, 7))


def test_same_command_without_a_run_dir(tmp_path: Path, job: list[str]) -> None:
    """It goes on with what is unfinished, starts anew after what is finished, and is not stopped by a run of
    another version."""
    other = tmp_path / "runs" / "gkd_quick" / "99999999-000000" / "checkpoints" / "step_000001"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text('{"format": 1, "step": 1, "files": {}}')
    (other / "state.json").write_text('{"config": {"key_of_another_version": 1}}')
    killed(job, tmp_path, at="step_000005.parquet")
    first, _ = sorted((tmp_path / "runs" / "gkd_quick").iterdir())
    result = finish(job, tmp_path).result
    assert tmp_path / result["run_dir"] == first
    assert steps_logged(first) == list(range(1, 9))
    again = finish(job, tmp_path).result
    assert tmp_path / again["run_dir"] != first
    assert left_behind(tmp_path / again["run_dir"])["export"] == left_behind(first)["export"]


def test_a_second_run_in_the_same_directory_is_refused(home: Path, job: list[str]) -> None:
    command = [*job, "trainer.run_dir=shared", "trainer.steps=100000", "trainer.keep_best=false"]
    first = start(command, home)
    try:
        assert first.until(lambda: bool(saved_steps(home / "shared")))
        said = refuse(command, home)
        assert f"process {first.pid}" in said and "trainer.run_dir=shared" in said
        assert not first.over
    finally:
        first.kill()
    with locked(home / "shared"):  # the dead run holds nothing
        said = refuse(command, home)
    assert f"process {os.getpid()}" in said


def test_evaluation_has_its_own_length_and_temperature(home: Path, job: list[str]) -> None:
    command = [*job, "trainer.steps=2", "eval.max_response_length=20", "eval.temperature=0"]
    held_out = []
    for seed in (0, 1):
        finish([*command, f"trainer.run_dir=eval{seed}", f"trainer.seed={seed}"], home)
        rows = read_samples(home / f"eval{seed}", [0])
        held_out.append([(row["uid"], row["response"]) for row in rows])
        assert {row["source"] for row in rows} == {"held-out"}
        lengths = [int(str(row["response_tokens"])) for row in rows]
        trained = [int(str(row["response_tokens"])) for row in read_samples(home / f"eval{seed}", [1])[:8]]
        assert max(lengths) == 20 and max(trained) == 12
    assert held_out[0] == held_out[1], "greedy does not depend on the seed"


def test_supervised_run_resumes_exactly(home: Path, job: list[str]) -> None:
    sft = [*job, "algo=sft", "rollout.n=1", "algo.lam=1"]
    finish([*sft, "trainer.run_dir=sft"], home)
    command = [*sft, "trainer.run_dir=sft_killed"]
    killed(command, home, at=".unfinished_000006/manifest.json")
    assert saved_steps(home / "sft_killed") == [2, 4]
    finish(command, home)
    assert differing(left_behind(home / "sft"), left_behind(home / "sft_killed")) == []


@pytest.mark.parametrize("algo", ["dpo", "kto"])
def test_preference_run_resumes_exactly(home: Path, job: list[str], algo: str) -> None:
    """The reference is the student that the run started from, not the one that it went on from."""
    rows = [
        {"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a), "r": str(a), "label": a % 2}
        for a in range(10)
    ]
    file = home / "preferences.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # the last setting of a key wins
    command = [*job, f"algo={algo}", "rollout.n=1", "algo.lam=1", f"data.train_files=[{file}]"]
    command += ["data.response_key=r"]
    finish([*command, f"trainer.run_dir={algo}"], home)
    killed([*command, f"trainer.run_dir={algo}_killed"], home, at=".unfinished_000006/manifest.json")
    finish([*command, f"trainer.run_dir={algo}_killed"], home)
    assert differing(left_behind(home / algo), left_behind(home / f"{algo}_killed")) == []
    losses = [row["actor/preference_loss"] for row in logged(home / algo) if "actor/lr" in row]
    start = math.log(2) if algo == "dpo" else 0.5
    assert losses[0] == pytest.approx(start, abs=1e-6) and min(losses) < start - 1e-3


def test_pretraining_run_resumes_exactly(home: Path, job: list[str]) -> None:
    file = home / "texts.jsonl"
    texts = [f"{a}+{b}={a + b}" * (1 + a % 3) for a in range(4) for b in range(8)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [*job, "algo=pretrain", "rollout.n=1", "algo.lam=1", f"data.train_files=[{file}]"]
    command += ["data.row_tokens=24"]
    straight = finish([*command, "trainer.run_dir=pretrain"], home)
    assert "32 texts were packed into" in straight.text
    killed([*command, "trainer.run_dir=pretrain_killed"], home, at=".unfinished_000006/manifest.json")
    finish([*command, "trainer.run_dir=pretrain_killed"], home)
    assert differing(left_behind(home / "pretrain"), left_behind(home / "pretrain_killed")) == []
    rows = [row for row in logged(home / "pretrain") if "actor/lr" in row]
    assert rows[-1]["actor/nll_loss"] < rows[0]["actor/nll_loss"]
    assert all(0.8 < row["packing/fill"] <= 1 < row["packing/documents_per_row"] for row in rows)


def test_offline_distillation_resumes_exactly_from_scoring_or_training(home: Path, job: list[str]) -> None:
    command = [*job, "algo=kd", "rollout.n=1", "algo.lam=1", "algo.teacher_top_k=5"]
    first = finish([*command, "trainer.run_dir=kd", "algo.cache_dir=targets"], home)
    assert "scoring 9 sequences into targets" in first.text, "two of ten rows are alike"
    again = [*command, "trainer.run_dir=kd_killed", "algo.cache_dir=other"]
    killed(again, home, at="other/.")
    assert [path.suffix for path in (home / "other").iterdir()] != [".safetensors"]
    assert saved_steps(home / "kd_killed") == []
    killed(again, home, at=".unfinished_000006/manifest.json")
    assert saved_steps(home / "kd_killed") == [2, 4]
    last = finish(again, home)
    assert "the teacher is not loaded" in last.text
    assert differing(left_behind(home / "kd"), left_behind(home / "kd_killed")) == []
    # the cache may lie elsewhere when a run goes on
    finish([*command, "trainer.run_dir=kd", "algo.cache_dir=other"], home)
    losses = [row["actor/distillation_loss"] for row in logged(home / "kd") if "actor/lr" in row]
    assert losses[-1] < losses[0]


def test_a_full_disk_ends_the_run_in_one_paragraph(tmp_path: Path, job: list[str]) -> None:
    """On a file system of our own where we may mount one, else under a limit on the size of a file."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    command = [*job, f"trainer.run_dir={small / 'run'}", "trainer.keep_last=9"]
    try:
        if mounted:
            said = refuse(command, tmp_path, status=1)
            assert "No space left on device" in said
        else:
            limited = 'ulimit -f 100; exec "$0" -m miniverl.main +experiment=gkd_quick "$@"'
            done = subprocess.run(
                ["bash", "-c", limited, sys.executable, *command],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 1
            said = done.stderr
        assert said.count("\n") <= 1 and "arlier checkpoints are intact" in said
        for step in saved_steps(small / "run"):
            Checkpoint(small / "run" / "checkpoints" / f"step_{step:06d}", step).verify()
        assert not mounted or saved_steps(small / "run")
        assert read_metrics(small / "run" / "metrics.jsonl")
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
