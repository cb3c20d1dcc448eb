"""Example 01 and the framework are the same experiment: same seed, same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 3


def last_result(arguments: list[str]) -> dict[str, object]:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT "))


def test_one_file_gives_the_losses_of_the_framework(tmp_path: Path) -> None:
    alone = last_result(["examples/01_whole_loop_in_one_file.py", str(STEPS)])["losses"]
    last_result(["-m", "miniverl.main", "+experiment=gkd_quick", f"trainer.steps={STEPS}", "eval.every=0",
                 "eval.size=1", f"trainer.run_dir={tmp_path}", "trainer.sinks=[jsonl]",
                 "trainer.report=false"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    name = "actor/distillation_loss"
    framework = [line[name] for line in lines if name in line]
    assert len(framework) == STEPS
    assert framework == pytest.approx(alone, rel=1e-5)
    assert framework[0] != pytest.approx(framework[1], rel=1e-3)  # else the comparison would show nothing
