"""The same runs on Ray: equal numbers, deaths in one paragraph, nothing left behind, nobody disturbed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miniverl.config import ConfigError, PlacementConfig, RunError
from miniverl.controller.pool import RayPool
from tests.crash import (
    SETTINGS,
    Toy,
    differing,
    family,
    finish,
    gone,
    left_behind,
    ray_host,
    start,
    steps_logged,
    write_models,
    write_rows,
)

RAY = "placement=one_gpu"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def job(home: Path) -> list[str]:
    return [*write_models(home), *SETTINGS, *write_rows(home / "rows.jsonl")]


@pytest.fixture(scope="module")
def straight(home: Path, job: list[str]) -> Path:
    """In one process, without Ray."""
    finish([*job, "trainer.run_dir=straight"], home)
    return home / "straight"


@pytest.fixture
def foreign() -> Iterator[str]:
    """Somebody else's Ray on this machine, its address in RAY_ADDRESS's form."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    before = {p.pid for p in psutil.process_iter()}
    subprocess.run([*ray, "start", *head], env=environment, check=True, capture_output=True)
    yield f"127.0.0.1:{port}"
    # `ray stop` would stop every Ray of this machine.
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.pid not in before and (f":{port}" in words or f"server_port={port}" in words):
            process.kill()


def test_ray_gives_the_numbers_of_one_process(
    straight: Path, home: Path, job: list[str], foreign: str, tmp_path: Path
) -> None:
    """Invariance of placement; on a machine with another Ray, whose address the environment names, and with
    the token file that makes Ray ask for authentication."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64)
    environment = {"HOME": str(tmp_path), "RAY_ADDRESS": foreign}
    port = foreign.rpartition(":")[2]

    def foreign_processes() -> set[int]:
        return {
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if any(port in word for word in p.info["cmdline"] or []) and p.pid != os.getpid()
        }

    others = foreign_processes()
    assert others
    running = start([*job, "trainer.run_dir=ray", RAY], home, environment)
    seen: set[psutil.Process] = set()
    while not running.over:
        seen |= set(family(running.pid)) if psutil.pid_exists(running.pid) else set()
        time.sleep(0.2)
    assert running.wait() == 0, running.text
    assert "SIGTERM handler" not in running.text
    assert gone(list(seen))
    assert not {p.pid for p in seen} & others
    assert foreign_processes() == others
    assert differing(left_behind(straight), left_behind(home / "ray")) == []


def test_dead_host_is_named_and_the_run_goes_on_later(straight: Path, home: Path, job: list[str]) -> None:
    command = [*job, "trainer.run_dir=dead", RAY]
    running = start(command, home, at="step_000005.parquet", number=signal.SIGSTOP)
    samples = home / "dead" / "samples"
    assert running.until(lambda: (samples / "step_000005.parquet.tmp").exists())
    relatives = family(running.pid)
    host = ray_host(running.pid)
    assert host is not None
    host.kill()
    os.kill(running.pid, signal.SIGCONT)
    begin = time.monotonic()
    assert running.wait(60) == 1, running.text
    assert time.monotonic() - begin < 60
    assert "Ray host" in running.complaint and "died" in running.complaint
    assert "actor+rollout+teacher" in running.complaint
    assert "the same command goes on" in running.complaint
    assert gone(relatives)
    assert not (home / "dead" / "result.json").exists()
    # Then the driver itself is shot; Ray's processes go with it (its agents, a minute later).
    second = start(command, home, at="step_000007.parquet", number=signal.SIGSTOP)
    assert second.until(lambda: (samples / "step_000007.parquet.tmp").exists())
    relatives = [process for process in family(second.pid) if "Agent" not in process.name()]
    assert ray_host(second.pid) in relatives
    second.kill()
    assert gone(relatives)
    # Without Ray, to the end.
    finish([*job, "trainer.run_dir=dead"], home)
    assert differing(left_behind(straight), left_behind(home / "dead")) == []
    assert steps_logged(home / "dead") == list(range(1, 9))


@pytest.fixture(scope="module")
def pool() -> Iterator[RayPool]:
    before = set(family(os.getpid()))
    pool = RayPool(PlacementConfig(kind="one_gpu", call_timeout_s=30), "cpu", "miniverl-test", ("toy",))
    pool.build("toy", Toy)
    yield pool
    relatives = [process for process in family(os.getpid()) if process not in before]
    assert any("raylet" in " ".join(process.cmdline()) for process in relatives)
    pool.close()
    pool.close()
    assert gone(relatives)


def call(pool: RayPool, method: str, *args: object) -> object:
    return pool.wait([pool.call(0, "toy", method, args, {})], f"toy.{method}")[0]


def test_calls_run_elsewhere_and_answer_in_order(pool: RayPool) -> None:
    assert call(pool, "pid") not in (None, os.getpid())
    handles = [pool.call(0, "toy", "add", (i,), {"b": 10}) for i in range(5)]
    assert pool.wait(handles[::-1], "sums") == [14, 13, 12, 11, 10]
    assert call(pool, "environment", "OMP_NUM_THREADS") == "1"
    assert pool.peak_memory_bytes()[0] >= 0


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("config", ConfigError, "optim.lr=7 is too much."),
        ("run", RunError, "the gradient is gone."),
        ("disk", OSError, "[Errno 28] No space left on device"),
    ],
)
def test_errors_for_the_user_arrive_as_themselves(
    pool: RayPool, kind: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call(pool, "fail", kind)
    assert type(caught.value) is error
    assert str(caught.value) == text


def test_a_bug_keeps_its_traceback(pool: RayPool) -> None:
    with pytest.raises(KeyError) as caught:
        call(pool, "fail", "bug")
    assert "a bug" in str(caught.value) and "crash.py" in str(caught.value)


def test_waiting_ends_and_names_the_call(pool: RayPool) -> None:
    patient = pool.placement
    pool.placement = replace(patient, call_timeout_s=1)
    try:
        with pytest.raises(RunError, match=r"toy\.sleep") as caught:
            call(pool, "sleep", 3)
    finally:
        pool.placement = patient
    assert "1 s" in str(caught.value) and "placement.call_timeout_s" in str(caught.value)
    assert call(pool, "add", 1, 2) == 3


def test_more_cpus_than_there_are_is_refused_at_once() -> None:
    begin = time.time()
    with pytest.raises(ConfigError) as caught:
        RayPool(PlacementConfig(kind="one_gpu", num_cpus=10_000), "cpu", "miniverl-much", ("toy",))
    assert time.time() - begin < 10
    assert "placement.num_cpus=10000" in str(caught.value)
    assert f"{os.cpu_count()} cores" in str(caught.value)
    assert not [p for p in family(os.getpid()) if p.create_time() > begin], "nothing was started"
