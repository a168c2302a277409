"""What a test left running: threads and child processes that were not there before it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import psutil
from zmq.utils.garbage import GarbageCollectorThread

GRACE_S = 2.0
# One helper process of the standard library serves every multiprocessing child until the interpreter ends.
STDLIB_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, kw_only=True)
class Running:
    """The threads and child processes of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]


def running() -> Running:
    """What runs now. The standard library's own helper processes are left out."""
    return Running(threads=_threads(), children=_children())


def leaks(before: Running, *, grace_s: float = GRACE_S) -> list[str]:
    """Names of what runs now, did not run before, and does not end within ``grace_s`` seconds.

    Args:
        before: what ran earlier.
        grace_s: how long threads and processes that are about to end are waited for.
    """
    return _still_running(_threads() - before.threads, grace_s) + _still_existing(_children() - before.children, grace_s)


def _threads() -> frozenset[threading.Thread]:
    # A dummy stands for a thread of C++ (autograd's) that merely ran Python once; nobody here started it. The other is one of
    # pyzmq's own for the whole process, which lets go of memory that was sent without a copy.
    passed = (threading._DummyThread, GarbageCollectorThread)
    return frozenset(t for t in threading.enumerate() if not isinstance(t, passed))


def _children() -> frozenset[psutil.Process]:
    try:
        # Milliseconds cheaper than psutil's walk over all processes, and most tests have no child at all.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    return frozenset(p for p in psutil.Process().children() if not _is_helper(p))


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(name in " ".join(process.cmdline()) for name in STDLIB_HELPERS)
    except psutil.Error:
        return False


def _still_running(threads: frozenset[threading.Thread], grace_s: float) -> list[str]:
    deadline = time.monotonic() + grace_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(f"thread {t.name!r}" for t in threads if t.is_alive())


def _still_existing(processes: frozenset[psutil.Process], grace_s: float) -> list[str]:
    _, alive = psutil.wait_procs(list(processes), timeout=grace_s)
    return sorted(f"process {p.pid}" for p in alive)
