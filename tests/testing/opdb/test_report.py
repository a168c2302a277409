"""Results on disk, against a recorded result, and in words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import dtorch
from dtorch.testing.opdb import baseline, report
from dtorch.testing.opdb.record import Failure, Record
from dtorch.testing.opdb.settings import Settings
from dtorch.testing.opdb.store import Store

SETTINGS = Settings(samples=2)
GROUP = "forward:float32"


def record(op: str, *kinds: str, way: str = "rule", text: str = "seen") -> Record:
    """A record with one case of each kind."""
    made = Record(op, ways=Counter({way: 1}))
    for number, kind in enumerate(kinds):
        case = f"{GROUP}:3:{number}:S0"
        made.add(GROUP, None if kind == "right" else Failure(kind, case, text))
    return made


def test_a_sweep_goes_on_from_what_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    store.add(record("add", "right", "refused"))
    assert Store(tmp_path, SETTINGS).records == {"add": record("add", "right", "refused")}
    with pytest.raises(dtorch.UsageError, match="another directory"):
        Store(tmp_path, Settings(samples=3))


WORSE = [
    (["right"], ["right"], 0),
    (["right"], ["layout"], 0),
    (["refused"], ["right"], 0),
    (["wrong value"], ["refused"], 0),
    (["right"], ["refused"], 1),
    (["refused"], ["wrong value"], 1),
    (["refused"], ["refused", "gradient refused"], 1),
    (["right", "wrong value"], ["wrong value", "gradient wrong"], 2),
]


@pytest.mark.parametrize(("before", "now", "count"), WORSE)
def test_what_is_worse_than_recorded(tmp_path: Path, before: list[str], now: list[str], count: int) -> None:
    file = tmp_path / "recorded.json"
    baseline.write(file, SETTINGS, [record("add", *before)])
    assert len(baseline.regressions(file, SETTINGS, [record("add", *now)])) == count
    assert len(baseline.regressions(file, SETTINGS, [record("new", *now)])) == (
        2 if "wrong" in str(now) else "refused" in str(now)
    )


def test_a_worse_way_and_a_process_that_ends_are_regressions(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    baseline.write(file, SETTINGS, [record("add", "right", way="program"), record("sub", "right")])
    assert baseline.regressions(file, SETTINGS, [record("add", "right", way="rule")]) == []
    (text,) = baseline.regressions(file, SETTINGS, [record("add", "right", way="replicated")])
    assert "planned by replicated, recorded program" in text
    ended = Record("sub", status="timeout", failures=[Failure("timeout", "x", "y")])
    assert len(baseline.regressions(file, SETTINGS, [ended])) == 1


def test_only_equal_settings_compare(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    baseline.write(file, SETTINGS, [])
    with pytest.raises(dtorch.UsageError, match="equal settings"):
        baseline.regressions(file, Settings(seed=1), [])


def test_the_summary_counts_operators_by_their_worst_case() -> None:
    records = [
        record("a", "right"),
        record("b", "right", "wrong value", way="replicated"),
        record("c", "refused"),
        Record("d", status="crash", failures=[Failure("crash", "", "")]),
        Record("e"),
    ]
    numbers = report.summary(records)
    assert numbers["verdicts"] == {"right": 1, "wrong": 1, "refused": 1, "crash": 1, "not run": 1}
    assert (numbers["sharded operators"], numbers["with replicated fallback"]) == (3, 1)
    lines = report.table(records).splitlines()
    assert lines[3] == "| b | wrong | 1 | 1 |  |  |  |  |  | replicated | replicated 1 |  | 0.0 |"


def test_failures_are_grouped_by_what_they_have_in_common() -> None:
    records = [
        record("a", "refused", text="size 3 of [4, 5]"),
        record("b", "refused", text="size 7 of [1]"),
        record("c", "wrong value"),
    ]
    text = report.failures(records, SETTINGS)
    assert text.index("## wrong value: 1 operators, 1 cases") < text.index("## refused: 2 operators, 2 cases")
    assert "python -m dtorch.testing.opdb --only c --case forward:float32:3:0:S0" in text
