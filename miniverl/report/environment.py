"""What a run ran on: versions, CPU, GPUs, commit. Enough to explain a number, nothing that names a person.

No user or host name, no path, no environment variable is read into it, so that a report can be passed on.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import miniverl

PACKAGES = (
    "miniverl", "torch", "transformers", "tokenizers", "safetensors", "peft", "bitsandbytes", "ray", "numpy",
    "pyarrow", "pydantic", "hydra-core", "vllm", "sglang",
)


def describe_environment() -> dict[str, object]:
    """Python, platform, packages, CPU, memory (bytes), GPUs and commit, as plain JSON values."""
    import torch

    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": _packages(),
        "cpu": {"model": _cpu_model(), "logical_cores": os.cpu_count(), "usable_cores": _usable_cores(),
                "torch_threads": torch.get_num_threads()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "git": _git(Path(miniverl.__file__).resolve().parent.parent),
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    # Linux only: a container or taskset may allow fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count()


def _gpus() -> list[dict[str, object]]:
    import torch

    if not torch.cuda.is_available():
        return []
    all_properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in all_properties
    ]


def _git(checkout: Path) -> dict[str, object] | None:
    """Commit of the checkout that this code runs from; None for an installed package, or without git."""
    if not (checkout / ".git").exists():  # else git would answer for a repository further up
        return None
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=checkout, capture_output=True, check=True, timeout=20).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.decode().strip(), "changed": bool(changes.strip())}
