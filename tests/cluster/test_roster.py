"""Who is there, and who is being started anew."""

from __future__ import annotations

from dtorch.cluster.roster import Roster
from dtorch.core.control import WorkerInfo


def workers(*names: str) -> list[WorkerInfo]:
    return [WorkerInfo(name, "h", 1, "127.0.0.1") for name in names]


def test_workers_that_have_ended_are_missing_until_their_host_says_what_it_has() -> None:
    roster = Roster()
    roster.set("b", workers("b.0.0", "b.1.0"))
    roster.set("a", workers("a.0.0"))
    assert [worker.name for _, worker in roster.workers] == ["b.0.0", "b.1.0", "a.0.0"] and roster.missing == 0
    roster.remove("b.0.0")
    roster.remove("b.0.0")
    assert [worker.name for _, worker in roster.workers] == ["b.1.0", "a.0.0"] and roster.missing == 1
    # Another in its place.
    roster.set("b", workers("b.1.0", "b.0.1"))
    assert [worker.name for _, worker in roster.workers] == ["b.0.1", "b.1.0", "a.0.0"] and roster.missing == 0
    # Or none any more.
    roster.remove("b.0.1")
    roster.set("b", workers("b.1.0"))
    assert roster.missing == 0


def test_of_a_host_that_is_gone_nobody_is_missing() -> None:
    roster = Roster()
    roster.set("a", workers("a.0.0", "a.1.0"))
    roster.remove("a.0.0")
    roster.remove("a")
    assert roster.missing == 0 and roster.workers == [] and roster.children == []
