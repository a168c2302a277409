"""What a process looks like from outside: gone, stopped, busy or idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from dtorch.cluster.processes import looks
from tests.cluster.peers import Peer, answer, await_true, compute, wait_for_lock

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")


@pytest.mark.parametrize(("work", "look"), [(compute, "busy"), (answer, "idle"), (wait_for_lock, "idle")])
def test_a_process_until_it_is_gone(work: Callable[..., None], look: str) -> None:
    peer = Peer(work)
    try:
        peer.told()
        await_true(lambda: looks(peer.pid) == look)
        peer.signal(signal.SIGSTOP)
        await_true(lambda: looks(peer.pid) == "stopped")
        peer.signal(signal.SIGCONT)
        await_true(lambda: looks(peer.pid) == look)
        peer.signal(signal.SIGKILL)
        await_true(lambda: looks(peer.pid) == "gone")
    finally:
        peer.end()


def test_who_has_ended_and_was_not_waited_for_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    await_true(lambda: looks(child.pid) == "gone")
    assert child.wait() == 0


def test_of_itself_and_of_others() -> None:
    assert looks(os.getpid()) in ("idle", "busy")
    assert looks(1) in ("idle", "busy", "stopped")  # it is another user's, perhaps


def test_elsewhere_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert looks(os.getpid()) is None
