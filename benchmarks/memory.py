"""The most memory that a process takes for SmolLM2's prefill, with dtorch and without.

Each side runs in a process of its own, from start to end: imports, reading the weights from a file that holds exactly
them (so that loading is not the peak), putting them on a one-device mesh where it is dtorch's turn, and some prefills.
Only dtorch's side imports dtorch. The figure is the ratio of the peaks of the whole processes, not of what they add to
the weights: resident set on a CPU, allocated memory on a GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from . import prefill, smollm2
from .figure import Figure
from .setting import Setting
from .timing import middle_half

RUNS = 3
TIMEOUT_S = 600
MIB = 1 << 20
SIDES = ("benchmarks.prefill_plain", "benchmarks.prefill_mesh")


def figures(setting: Setting) -> Iterator[Figure]:
    """Peak memory, to eager."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        torch.save((smollm2.plain(setting.device), smollm2.prompt(prefill.TOKENS, setting.device)), file)
        weights = file.stat().st_size
        peaks = [[_peak_of(side, file, setting) for side in SIDES] for _ in range(setting.times(3, 1))]
    ratios = [ours / plain for plain, ours in peaks]
    plain, ours = (statistics.median(side) for side in zip(*peaks, strict=True))
    yield Figure(
        name="memory.prefill",
        title=f"peak memory of the prefill of {prefill.TOKENS} tokens, one-device mesh, to eager",
        measured=statistics.median(ratios),
        limit=1.02,
        spread=middle_half(ratios),
        peer="0.97x (DTorch, published)",
        notes=(
            f"{plain / MIB:.0f} MiB -> {ours / MIB:.0f} MiB, of which {weights / MIB:.0f} MiB are weights",
            f"peaks of whole processes that load the weights, place them and run {RUNS} prefills",
        ),
    )


def _peak_of(side: str, file: Path, setting: Setting) -> int:
    """Bytes at the peak of a new process."""
    command = [sys.executable, "-m", side, str(file), setting.device, str(setting.threads), str(RUNS)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    return int(done.stdout)
