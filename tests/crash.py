"""Runs in processes of their own that can be killed, and what a finished run left behind, for comparison.

`PYTHONPATH=. python tests/crash.py --kills 20 --seed 3` does by hand, for longer, what
tests/controller/test_crash.py does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import miniverl.controller.build  # noqa: F401  (preloaded, so that a run starts at once)
from miniverl.config import ConfigError, RunError
from miniverl.data import demo_tokenizer
from miniverl.main import main
from miniverl.metrics import read_metrics, read_samples

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "trainer.steps=8",
    "trainer.save_every=2",
    "trainer.prompts_per_step=4",
    "trainer.samples_per_step=100",
    "trainer.report=false",
    "trainer.sinks=[jsonl]",
    "rollout.n=2",
    "rollout.max_response_length=12",
    "optim.lr=3e-3",
    "optim.schedule=cosine",
    "optim.warmup_steps=2",
    "eval.every=3",
    "eval.size=6",
    "placement.device=cpu",
)
"""Eight steps on CPU: checkpoints at 2, 4, 6, 8, evaluations at 0, 3, 6, 8."""
FILES = ("data.source=files", "data.response_key=response", "data.answer_key=answer", "algo.lam=0.5")
CLOCK = ("timing_s/", "perf/time_per_step", "perf/throughput")
"""Metrics that no two runs share."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.crash"])


def write_models(directory: Path) -> tuple[str, str]:
    """Overrides for a tiny random student and teacher of the demo family."""
    for role, hidden, seed in (("student", 32, 1), ("teacher", 48, 2)):
        torch.manual_seed(seed)
        shape = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=2 * hidden,
            vocab_size=86,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            initializer_range=0.2,
        )
        LlamaForCausalLM(shape).save_pretrained(directory / role)
        demo_tokenizer.write(directory / role)
    return f"model.student.path={directory / 'student'}", f"model.teacher.path={directory / 'teacher'}"


def write_rows(path: Path, count: int = 10) -> tuple[str, ...]:
    """Overrides for a file of that many rows, of which the last repeats the first."""
    pairs = [(7 * i % 90 + 3, 11 * i % 80 + 5) for i in range(count - 1)]
    rows = [
        {"prompt": f"{a}+{b}=", "response": f"<think>{a}</think>{a + b}", "answer": str(a + b)}
        for a, b in [*pairs, pairs[0]]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (*FILES, f"data.train_files=[{path}]", f"data.eval_files=[{path}]")


@dataclass
class Running:
    """A run in a process of its own: that of `python -m miniverl.main`, or one forked from a warm parent."""

    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def over(self) -> bool:
        return self.process.poll() is not None if self._plain else not self.process.is_alive()

    @property
    def _plain(self) -> bool:
        return isinstance(self.process, subprocess.Popen)

    def wait(self, seconds: float = 120) -> int:
        """Its exit status, negative for a signal."""
        deadline = time.monotonic() + seconds
        while not self.over:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no end within {seconds} s:\n{self.text}")
            time.sleep(0.01)
        return self.process.returncode if self._plain else self.process.exitcode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait() if self._plain else self.process.join()

    def until(self, happened: Callable[[], bool], seconds: float = 120) -> bool:
        """Whether it happened before the run was over. Looks as often as it can."""
        deadline = time.monotonic() + seconds
        while not happened():
            if self.over:
                return happened()
            assert time.monotonic() < deadline, f"nothing within {seconds} s:\n{self.text}"
            time.sleep(0.0003)
        return True

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def result(self) -> dict[str, Any]:
        """What RESULT says."""
        (line,) = [line for line in self.text.splitlines() if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT "))

    @property
    def complaint(self) -> str:
        """The one paragraph of a run that was refused or failed."""
        lines = self.text.splitlines()
        assert "Traceback" not in self.text, self.text
        assert lines[-1].startswith("miniverl: "), self.text
        return lines[-1]


def start(
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    cold: bool = False,
    at: str = "",
    number: signal.Signals = signal.SIGKILL,
) -> Running:
    """Begin `python -m miniverl.main +experiment=gkd_quick ARGUMENTS` in `cwd`; cold: by that command
    itself.

    at: send it signal `number` the moment it opens or renames a file with this in its path (not cold).
    """
    log = Path(tempfile.mkstemp(dir=cwd, prefix=".log-")[1])
    command = ["+experiment=gkd_quick", *arguments]
    if cold:
        with open(log, "w") as file:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "miniverl.main", *command],
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdout=file,
                stderr=file,
            )
    else:
        facts = (command, cwd, log, dict(environment or {}), at, number)
        process = _context.Process(target=_child, args=facts)
        process.start()
    return Running(process, log)


def finish(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, cold: bool = False
) -> Running:
    """The same, to its end, which must be a good one."""
    running = start(arguments, cwd, environment, cold)
    status = running.wait()
    assert status == 0, running.text
    return running


def refuse(arguments: Sequence[str], cwd: Path, status: int = 2) -> str:
    """The paragraph with which it ends instead."""
    running = start(arguments, cwd)
    assert running.wait() == status, running.text
    return running.complaint


def killed(arguments: Sequence[str], cwd: Path, at: str) -> None:
    """A run that dies of SIGKILL the moment it opens or renames a file with `at` in its path."""
    running = start(arguments, cwd, at=at)
    assert running.wait() == -signal.SIGKILL, running.text


def _child(
    arguments: list[str], cwd: Path, log: Path, environment: dict[str, str], at: str, number: signal.Signals
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    os.environ.update(environment)
    if at:
        pending = [number]

        def watch(event: str, facts: tuple[object, ...]) -> None:
            if pending and event in ("open", "os.rename") and at in " ".join(map(str, facts)):
                os.kill(os.getpid(), pending.pop())

        sys.addaudithook(watch)
    sys.exit(main(arguments))


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def logged(run_dir: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def steps_logged(run_dir: Path) -> list[int]:
    """Training steps in metrics.jsonl, in file order."""
    return [int(row["step"]) for row in read_metrics(run_dir / "metrics.jsonl") if "actor/lr" in row]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step_*/manifest.json"))


def left_behind(run_dir: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was interrupted or where it ran."""
    last = run_dir / "checkpoints" / f"step_{saved_steps(run_dir)[-1]:06d}"
    state = json.loads((last / "state.json").read_text())
    return {
        "export": sha(run_dir / "export" / "model.safetensors"),
        "tensors": {path.name: sha(path) for path in sorted(last.glob("*.safetensors"))},
        "state": {key: state[key] for key in ("step", "position", "data", "tokens", "history")},
        "checkpoints": saved_steps(run_dir),
        "metrics": logged(run_dir),
        "samples": read_samples(run_dir),
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the parts of two `left_behind` that are not equal."""
    return [name for name in one if one[name] != other[name]]


def writing(run_dir: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run died."""
    return any((run_dir / "checkpoints").glob(".unfinished_*"))


def kill_in_mid_write(running: Running, run_dir: Path) -> bool:
    hit = running.until(lambda: writing(run_dir))
    if hit and not running.over:
        running.kill()
    return hit and writing(run_dir)


def kill_somewhere(running: Running, run_dir: Path, rng: random.Random) -> None:
    """SIGKILL during a write or a moment after some more steps; a run that is done first is left alone."""
    log = run_dir / "metrics.jsonl"
    if rng.random() < 0.4:
        kill_in_mid_write(running, run_dir)
        return
    lines = len(read_metrics(log)) + rng.randint(0, 2)
    if running.until(lambda: log.exists() and log.read_bytes().count(b"\n") > lines):
        time.sleep(rng.uniform(0, 0.08))
    if not running.over:
        running.kill()


def family(pid: int) -> list[psutil.Process]:
    """All that descends from a process."""
    return psutil.Process(pid).children(recursive=True)


def ray_host(pid: int) -> psutil.Process | None:
    """The Ray worker under `pid` that holds the roles; others are called ray::IDLE or ray::…Agent."""
    for process in family(pid):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and "IDLE" not in title and "Agent" not in title:
            return process
    return None


def gone(processes: Sequence[psutil.Process], seconds: float = 15) -> bool:
    """Whether all of them end within the time."""
    return not psutil.wait_procs(list(processes), timeout=seconds)[1]


class Toy:
    """A worker with nothing in it but ways to go wrong."""

    def pid(self) -> int:
        return os.getpid()

    def add(self, a: int, b: int) -> int:
        return a + b

    def environment(self, name: str) -> str:
        return os.environ[name]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self, kind: str) -> None:
        errors = {
            "config": ConfigError("optim.lr=7 is too much."),
            "run": RunError("the gradient is gone."),
            "disk": OSError(28, "No space left on device"),
            "bug": KeyError("a bug"),
        }
        raise errors[kind]


def soak() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given, overrides = parser.parse_known_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        common = [*write_models(home), *SETTINGS, *write_rows(home / "rows.jsonl"), "trainer.steps=40"]
        common += overrides
        finish([*common, "trainer.run_dir=straight"], home)
        for _ in range(given.kills):
            kill_somewhere(start([*common, "trainer.run_dir=killed"], home), home / "killed", rng)
        finish([*common, "trainer.run_dir=killed"], home)
        wrong = differing(left_behind(home / "straight"), left_behind(home / "killed"))
    print(f"seed {given.seed}, {given.kills} kills: {'differ in ' + ', '.join(wrong) if wrong else 'equal'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(soak())
