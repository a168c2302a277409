"""Operators in processes of their own: one that hangs or dies is recorded, and the others go on."""

from __future__ import annotations

from dtorch.testing.opdb.pool import sweep
from dtorch.testing.opdb.record import Record
from dtorch.testing.opdb.settings import Settings
from tests.testing.opdb.entries import answers


def swept(names: list[str], limit_s: float) -> dict[str, Record]:
    """The records of operators that end as they are named."""
    records: dict[str, Record] = {}
    sweep(names, Settings(limit_s=limit_s), 2, answers, lambda r: records.update({r.op: r}))
    return records


def test_a_process_that_dies_is_a_crash() -> None:
    records = swept(["dies", "fine", "well"], limit_s=60.0)
    assert {name: r.status for name, r in records.items()} == {"dies": "crash", "fine": "done", "well": "done"}
    (failure,) = records["dies"].failures
    assert (failure.kind, failure.case, failure.text) == ("crash", "forward:float32:3:0:R", "the process ended with 3")
    assert records["dies"].verdict == "crash"


def test_a_process_that_hangs_is_killed() -> None:
    records = swept(["hangs"], limit_s=2.0)
    assert records["hangs"].status == records["hangs"].verdict == "timeout"
    assert records["hangs"].failures[0].case in ("forward:float32:3:0:R", "")
