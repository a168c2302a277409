"""Ranks do their jobs, and one that fails holds nobody up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import ranks as module
from benchmarks.ranks import ranks


def job(rank: int, workers: int, fails: int | None) -> Callable[[str], Any]:
    """Of a rank: fails as it is made, where it is to."""
    if rank == fails:
        raise SystemExit(3)
    return lambda name: (name, rank, workers)


def test_all_run_and_the_first_answers() -> None:
    with ranks(2, 1, job, None) as made:
        assert made.answer("what") == ("what", 0, 2)
        assert made.run(times=3) > 0


def test_a_rank_that_fails_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.2)
    with pytest.raises((EOFError, ConnectionError)), ranks(2, 1, job, 1) as made:
        made.run()
