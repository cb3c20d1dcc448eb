"""What is told of the machine, and what must not be."""

import getpass
import json
import os
import subprocess
from pathlib import Path

import torch

from miniverl.report import describe_environment
from miniverl.report.environment import _git


def test_it_is_plain_json_and_true():
    told = json.loads(json.dumps(describe_environment()))
    assert told["packages"]["torch"] == torch.__version__
    assert told["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert told["memory_bytes"] > 2**28
    assert len(told["gpus"]) == torch.cuda.device_count()


def test_it_tells_nothing_private(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    told = json.dumps(describe_environment())
    assert "s3cr3t-value" not in told and str(Path.home()) not in told and os.uname().nodename not in told
    assert getpass.getuser() == "root" or getpass.getuser() not in told


def test_commit_of_a_checkout_and_none_elsewhere(tmp_path):
    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path, text=True).strip()

    git("init", "-q")
    assert _git(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    (tmp_path / "inner").mkdir()
    git("add", "a")
    git("commit", "-q", "-m", "m")
    assert _git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "a").write_text("2")
    assert _git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": True}
    assert _git(tmp_path / "inner") is None  # an installed package inside someone else's repository
