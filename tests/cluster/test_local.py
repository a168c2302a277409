"""The worker processes of a host, and those that cannot be started."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtorch.cluster import local
from dtorch.cluster.local import MOST_FAILURES, LocalWorkers, launch, let_go
from dtorch.core.control import Task
from tests.cluster.peers import await_true

NOBODY = Task("tcp://127.0.0.1:1", "", "h", "127.0.0.1", {"cpu": 1}, "127.0.0.1:1", {})


def test_a_worker_that_fails_to_start_is_given_up_after_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    # It ends at once, for it is told nothing that it can read.
    monkeypatch.setattr(local, "WORKER", "dtorch.nothing")
    ended: list[tuple[str, str]] = []
    counts: list[int] = []
    workers = LocalWorkers([NOBODY], "host", lambda name, how: (ended.append((name, how)), counts.append(workers.count)))
    workers.start()
    try:
        await_true(lambda: workers.reap() or len(ended) == MOST_FAILURES)
    finally:
        workers.end()
    assert ended == [(f"host.0.{time}", "ended with status 1") for time in range(MOST_FAILURES)]
    assert counts == [1] * (MOST_FAILURES - 1) + [0]


def test_who_was_not_told_to_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_boot", lambda module: "import time; time.sleep(600)")
    workers = LocalWorkers([NOBODY] * 2, "host", lambda name, how: None)
    workers.start()
    began_s = time.monotonic()
    workers.end(told=["another.0.0"])
    assert time.monotonic() - began_s < local.END_S / 2


def test_a_process_starts_where_the_working_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.syspath_prepend("")
    gone.rmdir()
    monkeypatch.setattr(local, "_boot", lambda module: "import os, sys, dtorch; sys.exit(7 if os.getcwd() == os.sep else 1)")
    process = launch("", NOBODY)
    assert process.wait(60) == 7
    let_go(process)
