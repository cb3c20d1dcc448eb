"""Stops before a machine without an NVIDIA GPU downloads gigabytes of CUDA libraries. Standard library only.

`python requirements/check_torch.py torch==VERSION [INDEX_URL]` asks pip what it would fetch, without fetching
it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

CUDA = re.compile(r"(nvidia|cuda|triton)", re.IGNORECASE)


def cuda_packages(requires_dist: list[str]) -> list[str]:
    """Those requirements of a wheel that bring CUDA, extras aside."""
    return [line for line in requires_dist if CUDA.match(line) and "extra ==" not in line]


def would_install(requirement: str, index: str) -> list[dict]:
    """pip's own report of what it would install (nothing, if it is there already)."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-"]
    source = ["--index-url", index] if index else []
    done = subprocess.run([*pip, *source, requirement], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip finds no {requirement}{f' at {index}' if index else ''}: {done.stderr.strip()}")
    return json.loads(done.stdout)["install"]


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def main(requirement: str, index: str = "") -> None:
    if has_nvidia():
        return
    for item in would_install(requirement, index):
        found = cuda_packages(item["metadata"].get("requires_dist", []))
        if found:
            sys.exit(
                f"pip would install a build of {requirement} that brings {len(found)} CUDA packages "
                f"({found[0]}, …), and this machine shows no NVIDIA GPU. Take the CPU build: run make again "
                "with TORCH_INDEX=URL, where URL is the index URL that "
                "https://pytorch.org/get-started/locally shows for your system "
                "with Compute Platform CPU. If you do want CUDA here (a GPU to come), install torch into "
                ".venv yourself first."
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
