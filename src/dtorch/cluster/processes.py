"""What a process of this machine looks like from outside, to tell slow from dead where it cannot speak for itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

SAMPLE_S = 0.02
BUSY = 0.2
"""Share of the time that a busy process computes. Threads that wait for Python's lock wake all the time, but for less."""

Look = Literal["gone", "stopped", "busy", "idle"]


def looks(pid: int) -> Look | None:
    """What a process is at; takes 20 ms.

    A process that computes, or waits for a disk, may hold Python's lock and be unable to beat: ``"busy"``. ``"stopped"`` is by
    a signal or a debugger; ``"gone"`` also means ended and not yet waited for. A number may be of another process by now:
    who started it holds it until it waits for it.

    Returns:
        None where it cannot be seen: only Linux tells.
    """
    if not sys.platform.startswith("linux") or not Path("/proc/self/stat").exists():
        return None
    try:
        began_s, states = _computed_s(pid), _states(pid)
        time.sleep(SAMPLE_S)
        share, later = (_computed_s(pid) - began_s) / SAMPLE_S, _states(pid)
    except (FileNotFoundError, ProcessLookupError, OSError):
        return "gone"
    if states[0] in "ZX" or later[0] in "ZX":
        return "gone"
    if later[0] in "Tt":
        return "stopped"
    always = any(state in "RD" for state in states) and any(state in "RD" for state in later)
    return "busy" if always or share >= BUSY else "idle"


def resident_nbytes(pid: int) -> int:
    """What of a process is in memory; 0 where that cannot be seen."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def _computed_s(pid: int) -> float:
    """Processor time of all its threads. Linux makes the number of a process' clock from its own."""
    return time.clock_gettime((~pid << 3) | 2)


def _states(pid: int) -> list[str]:
    """The letter of each thread's state, the first thread's first."""
    folder = Path(f"/proc/{pid}")
    stats = [folder / "stat", *sorted(folder.glob("task/*/stat"))]
    # A name in parentheses comes before, with whatever in it. A thread may end meanwhile, the process too.
    return [text.rpartition(")")[2].split()[0] for text in _texts(stats)]


def _texts(files: list[Path]) -> list[str]:
    texts = [files[0].read_text()]
    for file in files[1:]:
        try:
            texts.append(file.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return texts
