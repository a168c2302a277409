"""Tests do not vanish unseen: each folder collects at least as many as expected_counts.json says."""

from __future__ import annotations

import json

import pytest

from tests.update_counts import COUNTS, count_by_folder

HOW = "if that is meant, run `python -m tests.update_counts` and commit the result"


def shortfalls(collected: dict[str, int], expected: dict[str, int]) -> list[str]:
    """What is missing of the expected counts, and which folders are not guarded yet."""
    few = [f"{f}: {collected.get(f, 0)} tests, expected {n}" for f, n in expected.items() if collected.get(f, 0) < n]
    return few + [f"{f}: not guarded yet" for f in collected if f not in expected]


def whole_suite_is_collected(config: pytest.Config) -> bool:
    """Whether nothing on the command line picks a part of the suite."""
    options = config.option
    narrowed = options.keyword or options.markexpr or options.deselect or options.ignore or options.ignore_glob or options.lf
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not narrowed


def test_no_test_has_vanished(request: pytest.FixtureRequest) -> None:
    expected = json.loads(COUNTS.read_text(encoding="utf-8"))
    collected = count_by_folder(item.path for item in request.session.items)
    # A part of the suite tells nothing about the rest.
    missing = shortfalls(collected, expected) if whole_suite_is_collected(request.config) else []
    assert not missing, f"{'; '.join(missing)}; {HOW}"


def test_shortfalls_are_named() -> None:
    assert shortfalls({"a": 2, "b": 1}, {"a": 2, "b": 1}) == []
    assert shortfalls({"a": 3}, {"a": 2}) == []
    assert shortfalls({"a": 1, "c": 1}, {"a": 2, "b": 1}) == [
        "a: 1 tests, expected 2",
        "b: 0 tests, expected 1",
        "c: not guarded yet",
    ]
