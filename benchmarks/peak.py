"""The most memory that this process has taken. Imports nothing of dtorch, so that plain PyTorch can be measured with it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_nbytes(device: str) -> int:
    """Bytes at the peak: allocated on a GPU, else resident in memory."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident_nbytes()


def peak_resident_nbytes() -> int:
    """The most bytes that this process has had resident.

    Linux's ``VmHWM`` comes first: ``ru_maxrss`` of a process begins with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
