"""The recorded numbers of verl 0.9.1, and that the check itself would notice."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miniverl.algos import advantages
from tests.golden import check_file

FILES = sorted((Path(__file__).parent.parent / "golden").glob("*.json"))
CHECKER = Path(__file__).parent.parent / "golden.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_number_agrees(path):
    rows = list(check_file(path))
    assert len(rows) == 57
    assert [row for row in rows if not row.agrees] == []


def test_a_scaled_estimate_disagrees(monkeypatch):
    def scaled(episode, settings):
        found = advantages.gae(episode, settings)
        return replace(found, advantages_NT=found.advantages_NT * 1.001)

    monkeypatch.setitem(advantages.ESTIMATORS, "gae", scaled)
    bad = [row.name for row in check_file(FILES[0]) if not row.agrees]
    assert bad == ["verl_0.json advantages gae"]


def test_the_command_prints_disagreements_and_exits_1(tmp_path):
    recorded = json.loads(FILES[0].read_text())
    recorded["kl"]["k9"] = recorded["kl"].pop("k1")
    recorded["policy_losses"]["vanilla token-mean"]["loss"] += 1e-3
    recorded["advantages"]["grpo"]["advantages"][0][0] = float("nan")
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(recorded))
    done = subprocess.run(
        [sys.executable, str(CHECKER), str(path), str(tmp_path / "none.json")], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "54 rows agree, 4 disagree"
    assert [any(word in line for line in lines) for word in ("k9", "vanilla token-mean", "grpo", "none")] == [
        True
    ] * 4
