"""A worker as a process, told by its standard input what it is.

It ends when it is told to, or when its standard input does, for then whoever started it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from ..communication.processes import ProcessPeers
from ..core import control, program
from ..core.control import Hello, Start, Task, WorkerInfo
from ..core.grid import Here
from ..transport.line import Line
from ..transport.wire import Key
from .executor import Executor

PATIENCE_S = 600.0


def main() -> None:
    """Be a worker."""
    # Ctrl-C at a terminal goes to all processes there. It is the client's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    threading.Thread(target=_end_with_parent, name="dtorch-parent", daemon=True).start()
    info = WorkerInfo(task.name, task.host, os.getpid(), task.address, task.devices)
    hello = Hello("worker", task.name, [control.VERSION, program.VERSION], [info])
    key = Key(task.hub_public.encode(), task.member_public.encode(), task.member_secret.encode())

    def open_session(number: int, epoch: int, start: Start) -> Executor:
        torch.set_num_threads(start.threads)
        place = str(Path(task.rendezvous) / f"session-{epoch}")
        peers = ProcessPeers(number, len(start.workers), place, PATIENCE_S)
        return Executor(here=Here(start.hosting, number), others=peers)

    Line(task.parent, hello, key, open_session).serve()


def _end_with_parent() -> None:
    # Below Python's buffer, which could not be closed while a thread reads.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)
