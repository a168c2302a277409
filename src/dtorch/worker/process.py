"""A worker as a process, told by its standard input what it is.

It ends when it is told to, or when its standard input does, for then whoever started it is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from ..communication.processes import ProcessPeers
from ..core.grid import Here
from ..core.hosting import Hosting
from ..transport.sockets import Key, Line
from .executor import Executor

PATIENCE_S = 600.0


class Task(msgspec.Struct, frozen=True):
    """What a worker is told: one line of JSON."""

    address: str
    number: int
    hub_public: str
    worker_public: str
    worker_secret: str
    hosting: Hosting
    rendezvous: str
    threads: int


def main() -> None:
    """Be a worker."""
    # Ctrl-C at a terminal goes to all processes there. It is the client's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    threading.Thread(target=_end_with_parent, args=(task.rendezvous,), name="dtorch-parent", daemon=True).start()
    torch.set_num_threads(task.threads)
    peers = ProcessPeers(task.number, task.hosting.workers, task.rendezvous, PATIENCE_S)
    key = Key(task.hub_public.encode(), task.worker_public.encode(), task.worker_secret.encode())
    Line(task.address, task.number, key).serve(Executor(here=Here(task.hosting, task.number), others=peers))


def _end_with_parent(rendezvous: str) -> None:
    # Below Python's buffer, which could not be closed while a thread reads.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    # The directory is its starter's, who can no longer remove it.
    shutil.rmtree(Path(rendezvous).parent, ignore_errors=True)
    os._exit(1)
