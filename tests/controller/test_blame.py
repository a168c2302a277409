"""From a failure to the one that it goes back to."""

from __future__ import annotations

from dtorch.controller.blame import REMEMBERED, Blame
from dtorch.core.program import Failure, Reply


def failure(sequence: int, cause: int = -1) -> Failure:
    return Failure(sequence, f"operator {sequence}", 1, "cpu:0", "none", "no", "", cause)


def test_a_chain_is_followed_to_its_beginning() -> None:
    blame, first = Blame(), failure(5)
    blame.hear(1, Reply(None, [failure(4), first], [(9, 1, 5), (8, 1, 4)]))
    blame.hear(2, Reply(None, [], [(9, 1, 9), (12, 1, 9)]))
    blame.hear(0, Reply(None, [], [(12, 2, 12)]))
    assert blame.first(failure(12, cause=2)) == blame.first(failure(9, cause=1)) == blame.first(failure(5, cause=1)) == first
    assert blame.first(failure(8, cause=1)).sequence == 4
    assert blame.first(failure(5, cause=0)) == failure(5, cause=0)


def test_a_ring_has_an_end() -> None:
    blame = Blame()
    blame.hear(0, Reply(None, [], [(1, 1, 1)]))
    blame.hear(1, Reply(None, [], [(1, 0, 1)]))
    assert blame.first(failure(1, cause=1)) == failure(1, cause=1)


def test_what_is_long_ago_is_forgotten() -> None:
    blame = Blame()
    for sequence in range(REMEMBERED + 1):
        blame.hear(0, Reply(None, [failure(sequence)]))
    assert blame.first(failure(0, cause=0)).caused and not blame.first(failure(1, cause=0)).caused
