"""A worker as a process: the one place where a worker's parts are wired together.

It is told by its standard input what it is, and ends when it is told to, when its standard input does, for then whoever
started it is gone, or when the controller has fallen silent.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from .cluster.beating import HealthMember
from .cluster.keys import Keys
from .cluster.membership import Beat, Member
from .cluster.pulse import REFUSED, Word
from .cluster.status import resident_nbytes
from .communication.processes import ProcessPeers
from .core import control, program
from .core.control import Hello, Origin, Record, Sign, Start, Task, WorkerInfo
from .core.grid import Here
from .observability.logs import Outlet
from .transport.line import Line
from .transport.post import Post
from .worker.executor import Executor

PATIENCE_S = 600.0
"""How long a worker waits for another that beats."""

ALONE_S = 20.0
"""How long a worker may hear nothing of the controller: whoever started it notices sooner, and ends it."""

ORPHANED = 3
"""Exit status of a worker whose controller is gone."""


class Part:
    """A worker's part in a session: see ``transport.line.Part``."""

    def __init__(self, number: int, start: Start, address: str, keys: Keys, log: Callable[[Record], bool]) -> None:
        self._post = Post(number, address, keys.lock)
        self.peers = ProcessPeers(number, address, self._post, PATIENCE_S)
        # No signal interrupts a worker: all that is raised here is raised by an operator, or by a function of the user's.
        self.runner = Executor(here=Here(start.hosting, number), others=self.peers, failing=BaseException)
        self.sign = Sign(self.peers.sign, self._post.address)
        self._outlet = None if start.log_level is None else Outlet(_origin(number, start), start.log_level, log)

    def introduce(self, signs: list[Sign]) -> None:
        """How it finds the others."""
        self._post.introduce([sign.post for sign in signs])
        self.peers.introduce([sign.door for sign in signs])

    def close(self) -> None:
        """Release everything."""
        self.runner.close()
        if self._outlet is not None:
            self._outlet.close()


class Worker:
    """A worker process between its line, its executor and the health service."""

    def __init__(self, task: Task) -> None:
        self._task, self._keys = task, Keys(**task.keys)  # type: ignore[arg-type]
        self._epoch = 0
        self._part: Part | None = None
        info = WorkerInfo(task.name, task.host, os.getpid(), task.address, task.devices)
        hello = Hello("worker", task.name, [control.VERSION, program.VERSION], [info])
        os.register_at_fork(after_in_child=self._forked)
        self._line = Line(task.parent, hello, self._keys.line, self._take_part)

    def _forked(self) -> None:
        # By a function of the user's.
        if self._part is not None:
            self._part.runner.disown()

    def run(self) -> None:
        """Work until told to end."""
        devices = tuple(f"{kind}:{count}" for kind, count in self._task.devices.items())
        name, host = self._task.name, self._task.host
        who = Member(name=name, role="worker", incarnation=time.time_ns(), host=host, pid=os.getpid(), devices=devices)
        member = HealthMember(self._keys, self._task.health, who, self._status, self._told, self._silent, patience_s=ALONE_S)
        self._line.serve()
        member.close()

    def _take_part(self, number: int, epoch: int, start: Start) -> Part:
        torch.set_num_threads(start.threads)
        self._part, self._epoch = Part(number, start, self._task.address, self._keys, self._line.log), epoch
        return self._part

    def _told(self, word: Word) -> None:
        """A word from the controller, in the thread of the health service."""
        part = self._part
        if word.text == control.ABORT and word.detail == str(self._epoch) and part is not None:
            part.peers.abort()
        # What ends another worker is for who started that one.
        elif word.text == REFUSED or (word.text == control.KILL and word.detail == self._task.name):
            self._give_up(f"the controller has told it to end ({word.text}: {word.detail})")

    def _silent(self, silent_s: float) -> None:
        self._give_up(f"the controller has been silent for {silent_s:.1f} s")

    def _give_up(self, why: str) -> None:
        with suppress(OSError, ValueError):
            print(f"dtorch: worker {self._task.name} ends, for {why}", file=sys.stderr, flush=True)
        os._exit(ORPHANED)

    def _status(self) -> Beat:
        line, part = self._line, self._part
        since = line.busy_since
        return Beat(
            operator=part.runner.doing() if part is not None else "",
            instructions=line.count,
            # Only Linux tells what is in memory now; elsewhere the most that ever was.
            memory_nbytes=resident_nbytes(os.getpid()) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            busy_s=0.0 if since is None else time.monotonic() - since,
        )


def main() -> None:
    """Be a worker."""
    # Ctrl-C at a terminal goes to all processes there. It is the client's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    threading.Thread(target=_end_with_parent, name="dtorch-parent", daemon=True).start()
    worker = os.getpid()
    try:
        Worker(task).run()
    except BaseException as error:
        if os.getpid() == worker:
            raise
        # A child that a function has forked, and that did not end itself. Its end is not to touch what is the parent's.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    # A thread may be left that waits for a peer in C++, which the interpreter's end would not survive.
    os._exit(0)


def _origin(number: int, start: Start) -> Origin:
    worker, devices = start.workers[number], start.hosting.told(number)
    return Origin(title="worker", name=worker.name, host=worker.host, pid=worker.pid, worker=number, devices=devices)


def _end_with_parent() -> None:
    # Below Python's buffer, which could not be closed while a thread reads.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ORPHANED)
