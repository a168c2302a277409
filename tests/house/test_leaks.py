"""The leak check itself: what it reports, and what it lets pass."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.leaks import leaks, running


@contextmanager
def _waiting_thread(name: str) -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_thread_is_a_leak_while_it_runs() -> None:
    before = running()
    with _waiting_thread("forgotten"):
        assert leaks(before, grace_s=0.0) == ["thread 'forgotten'"]
    assert leaks(before) == []


def test_a_child_process_is_a_leak_while_it_runs() -> None:
    before = running()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert leaks(before, grace_s=0.0) == [f"process {child.pid}"]
    assert leaks(before) == []
