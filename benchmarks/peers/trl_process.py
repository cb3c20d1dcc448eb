"""TRL as a peer: its environment, made on first use, and a process that takes one GKD step when told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import OUT, ROOT

SCRIPT = Path(__file__).with_name("trl_gkd.py")
REQUIREMENTS = ROOT / "requirements" / "bench_trl.txt"
INSTALL_DEADLINE_S = 900.0


def trl_python() -> Path:
    """The interpreter of TRL's environment: TRL_VENV, or benchmarks/out/trl-venv (installed where it is not).

    TORCH_INDEX is the index to take torch from, as in the Makefile.
    Raises:
        RuntimeError: it could not be installed.
    """
    if given := os.environ.get("TRL_VENV"):
        return Path(given) / "bin" / "python"
    venv = OUT / "trl-venv"
    python, stamp = venv / "bin" / "python", venv / "stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == REQUIREMENTS.read_text(encoding="utf-8"):
        return python
    print(f"installing TRL into {venv} …", flush=True)
    torch_pin = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX", "")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _do(sys.executable, "-m", "venv", "--clear", venv)
    _do(python, ROOT / "requirements" / "check_torch.py", torch_pin, index)
    _do(*pip, *(["--index-url", index] if index else []), torch_pin)
    _do(*pip, "-r", REQUIREMENTS)
    stamp.write_text(REQUIREMENTS.read_text(encoding="utf-8"), encoding="utf-8")
    return python


class TrlSteps:
    """A running GKDTrainer, loaded and waiting.

    Raises:
        RuntimeError: it ended; the message holds the last lines of its log.
    """

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.log = OUT / f"trl-{name}.log"
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(trl_python()), str(SCRIPT), *arguments, "--out", str(OUT / f"trl-{name}")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            )
        self._await("READY")
        self.steps: list[dict[str, Any]] = []

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(json.loads(self._await("STEP ")))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _await(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        tail = " | ".join(self.log.read_text(encoding="utf-8").splitlines()[-4:])
        raise RuntimeError(f"the TRL process ended: {tail}")


def _do(*command: str | Path) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=INSTALL_DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise RuntimeError(f"TRL's environment could not be made ({' '.join(map(str, command[:6]))}): {said}")
