"""Members and services for tests of health: in this process, and in processes that can be killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from dtorch.cluster.beating import HealthMember
from dtorch.cluster.health import HealthServer
from dtorch.cluster.keys import Keys
from dtorch.cluster.membership import Beat, Member

WAIT_S = 60.0
"""For what surely comes: only a test that fails waits so long."""

QUICK: dict[str, Any] = {"beat_s": 0.1, "dead_s": 1.0}

CONTEXT: Any = multiprocessing.get_context("forkserver")

C = TypeVar("C")

AGAIN = "again"
"""Told to a process with a member: to tell the same when the service answers."""


def member(name: str = "w0", *, incarnation: int = 1, pid: int | None = None) -> Member:
    """Who a member is."""
    return Member(name=name, role="worker", incarnation=incarnation, host="h", pid=pid or os.getpid(), devices=("cpu:0",))


class Heard:
    """What callbacks were told, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.all: list[Any] = []

    def __call__(self, what: Any) -> None:
        self.all.append(what)
        self._queue.put(what)

    def next(self, kind: type[C]) -> C:
        """The next of a kind; others before it are passed over."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            what = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if isinstance(what, kind):
                return what

    def of(self, kind: type[C]) -> list[C]:
        """All of a kind so far."""
        return [what for what in self.all if isinstance(what, kind)]


def await_true(condition: Callable[[], object]) -> None:
    """Wait for what surely comes true."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Peer:
    """A process that runs a function; its owner calls ``end``.

    Args:
        target: of some module. Its last argument is the end of a pipe, over which it tells and is told.
    """

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        CONTEXT.set_forkserver_preload([__name__])
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def told(self) -> Any:
        """The next that it tells."""
        assert self._pipe.poll(WAIT_S)
        return self._pipe.recv()

    def tell(self, what: Any) -> None:
        """Tell it something; None that it shall end."""
        self._pipe.send(what)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def status(self) -> int | None:
        """Wait for its end; its exit status."""
        self.process.join(WAIT_S)
        return self.process.exitcode

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


def beat_from(path: str, address: str, name: str, pipe: Connection) -> None:
    """A process with a member, which tells what happens to it, and does as it is told."""
    told: dict[str, Any] = {
        "status": lambda: Beat(operator="aten::mm"),
        "on_word": lambda word: pipe.send(("word", word.text)),
        "on_silence": lambda silent_s: pipe.send("silence"),
    }
    one = HealthMember(Keys.read(path), address, member(name), **told, **QUICK)
    assert one.await_answer(WAIT_S)
    _obey(pipe, one)
    one.close()


def serve_from(path: str, pipe: Connection) -> None:
    """A process with a service, which tells its address and then what changes, and does as it is told."""
    server = HealthServer(Keys.read(path), on_event=lambda change: pipe.send(type(change).__name__), **QUICK)
    pipe.send(server.address)
    _obey(pipe)
    server.close()


def die_in_silence(path: str, address: str, name: str, pipe: Connection) -> None:
    """A process with a member, that ends itself when the service falls silent."""
    HealthMember(Keys.read(path), address, member(name), on_silence=lambda silent_s: os._exit(3), **QUICK)
    pipe.poll(None)


def _obey(pipe: Connection, one: HealthMember | None = None) -> None:
    while (work := pipe.recv()) is not None:
        if work == AGAIN:
            assert one is not None
            one._answered.clear()
            pipe.send(AGAIN if one.await_answer(WAIT_S) else "no answer")
        else:
            function, *args = work
            function(pipe, *args)


def compute(pipe: Connection) -> None:
    """Hold Python's lock and compute, for longer than any test waits."""
    pipe.send("computes")
    re.match("(a+)+$", "a" * 100 + "b")


def hold(pipe: Connection, seconds: int) -> None:
    """Hold Python's lock and sleep."""
    pipe.send("holds")
    ctypes.PyDLL(None).sleep(seconds)
    pipe.send("held")


def sort(pipe: Connection, n: int) -> None:
    """Run one long kernel of PyTorch's."""
    began_s = time.monotonic()
    torch.randn(n).sort()
    pipe.send(time.monotonic() - began_s)
