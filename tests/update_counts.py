"""Rewrites expected_counts.json from what is collected now: ``python -m tests.update_counts``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COUNTS = TESTS / "expected_counts.json"


def count_by_folder(paths: Iterable[Path]) -> dict[str, int]:
    """Number of tests in each folder below tests/, given the file of each collected test."""
    return dict(sorted(Counter(path.parent.relative_to(TESTS).as_posix() for path in paths).items()))


class _Recorder:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.counts = count_by_folder(item.path for item in session.items)


def main() -> int:
    """Collects the whole suite and writes its counts; returns pytest's exit status, 0 when it collected cleanly."""
    recorder = _Recorder()
    status = pytest.main(["--collect-only", "-qq", str(TESTS)], plugins=[recorder])
    if status == 0:
        COUNTS.write_text(json.dumps(recorder.counts, indent=2) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
