"""Peak memory of tensors: by the allocator on CUDA, by the kernel's high-water mark on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections import Counter
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3
_AT_ONCE, _USUAL = 1 << 20, 1 << 25
ROUNDS = 3


class PeakMemory:
    """Measures from its construction (after imports, before models) until some call comes a fourth time.

    On a CPU the process holds more than its tensors: freed blocks that the C library keeps for reuse. While
    this measures, blocks of 1 MiB and more go back to the kernel at once, so that the high-water mark is that
    of tensors; that costs time, so it ends after the first rounds, when every buffer of a step has existed.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self._calls: Counter[str] = Counter()
        self._settled: int | None = None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self._baseline = torch.cuda.memory_allocated()
            return
        _return_blocks_from(_AT_ONCE)
        self._baseline = _resident("VmRSS")
        if _RESET.exists():
            # Some containers forbid it; the mark then covers the imports too.
            with contextlib.suppress(OSError):
                _RESET.write_text("5")  # the kernel's way of starting VmHWM anew

    def before(self, call: str) -> None:
        """Tell that a call is about to run."""
        self._calls[call] += 1
        if self._settled is None and not self.cuda and self._calls[call] > ROUNDS:
            self._settled = self.peak()
            _return_blocks_from(_USUAL)

    def peak(self) -> int:
        """Bytes over the baseline; 0 where the kernel offers no such number."""
        if self._settled is not None:
            return self._settled
        return (torch.cuda.max_memory_allocated() if self.cuda else _resident("VmHWM")) - self._baseline


def _return_blocks_from(size: int) -> None:
    """From this many bytes on, glibc maps a block of its own and unmaps it when freed; elsewhere a no-op."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def _resident(field: str) -> int:
    if not _STATUS.exists():
        return 0
    lines = (line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return next((int(line.split()[1]) * 1024 for line in lines), 0)
