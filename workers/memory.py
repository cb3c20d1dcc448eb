"""How much memory a process took at its peak, over a baseline: the device's allocator on CUDA, the kernel on
CPU."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures from its construction, i.e. after imports and before models."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self._baseline = torch.cuda.memory_allocated()
        else:
            self._baseline = _resident("VmRSS")
            if _RESET.exists():
                _RESET.write_text("5")  # the kernel's way of starting VmHWM anew

    def peak(self) -> int:
        """Bytes over the baseline; 0 where the kernel offers no such number."""
        return (torch.cuda.max_memory_allocated() if self.cuda else _resident("VmHWM")) - self._baseline


def _resident(field: str) -> int:
    if not _STATUS.exists():
        return 0
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
