"""The state machine of membership, with a clock that the test moves."""

from __future__ import annotations

import msgspec
import pytest

from dtorch.cluster.membership import (
    MOST_ENDED,
    Beat,
    BeatArrived,
    BrokenOff,
    Change,
    Departed,
    Introduced,
    Joined,
    Left,
    Looked,
    Lost,
    Member,
    Membership,
    Refused,
)

BEAT_S, DEAD_S = 0.5, 2.0
LOOK_S = BEAT_S / 2


def member(name: str = "w0", incarnation: int = 1, pid: int = 7) -> Member:
    return Member(name=name, role="worker", incarnation=incarnation, host="h", pid=pid, devices=("cpu:0",))


def cut_off(membership: Membership, one: Member | None = None) -> None:
    """A member comes, of which all that is heard is what is said to be."""
    one = one or member()
    membership.handle(Introduced(one))
    assert membership.handle(BrokenOff(one)) == []


class Clock:
    """Looks at the membership as time goes by."""

    def __init__(self, membership: Membership) -> None:
        self.membership, self.now_s = membership, 100.0
        self.look()

    def look(self) -> list[Change]:
        return self.membership.handle(Looked(self.now_s))

    def pass_on(self, seconds: float, *beating: Member, step_s: float = LOOK_S) -> list[Change]:
        changes: list[Change] = []
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            for one in beating:
                changes += self.membership.handle(BeatArrived(one, Beat()))
            changes += self.look()
        return changes


@pytest.fixture
def membership() -> Membership:
    return Membership(BEAT_S, DEAD_S)


@pytest.fixture
def clock(membership: Membership) -> Clock:
    return Clock(membership)


def test_who_beats_stays(membership: Membership, clock: Clock) -> None:
    assert membership.handle(Introduced(member())) == [Joined(member())]
    assert clock.pass_on(100, member()) == []


def test_who_falls_silent_is_lost_once_and_in_time(membership: Membership, clock: Clock) -> None:
    one, other = member("a"), member("b")
    for m in (one, other):
        cut_off(membership, m)
    clock.pass_on(10, one, other)
    last = Beat(operator="aten::mm", instructions=5)
    membership.handle(BeatArrived(one, last))
    began_s, changes = clock.now_s, []
    while not changes:
        changes = clock.pass_on(LOOK_S, other)
    (lost,) = changes
    assert isinstance(lost, Lost) and (lost.member, lost.last, lost.why) == (one, last, "silent")
    assert DEAD_S <= lost.silent_s <= clock.now_s - began_s <= DEAD_S + 2 * LOOK_S <= 3.0
    assert clock.pass_on(10, other) == []
    assert [s.member for s in membership.standings()] == [other]


def test_who_never_beats_is_lost_too(membership: Membership, clock: Clock) -> None:
    cut_off(membership)
    (lost,) = clock.pass_on(DEAD_S + 2 * LOOK_S)
    assert isinstance(lost, Lost) and lost.last is None


def test_who_leaves_is_not_lost(membership: Membership, clock: Clock) -> None:
    membership.handle(Introduced(member()))
    assert membership.handle(Departed(member())) == [Left(member())]
    assert membership.handle(Departed(member())) == [] and clock.pass_on(10) == []


@pytest.mark.parametrize("away_s", [1, 2, 5, 3600])
@pytest.mark.parametrize("silent_before_s", [0, 1, 1.75])
def test_time_in_which_nobody_looked_is_no_silence(
    membership: Membership, clock: Clock, away_s: float, silent_before_s: float
) -> None:
    cut_off(membership)
    clock.pass_on(1, member())
    assert clock.pass_on(silent_before_s) == []
    clock.now_s += away_s
    assert clock.look() == []  # what has come meanwhile is not read yet
    membership.handle(BeatArrived(member(), Beat()))
    assert clock.pass_on(10, member()) == []


def test_who_is_dead_after_a_pause_is_found_out(membership: Membership, clock: Clock) -> None:
    cut_off(membership)
    clock.pass_on(1, member())
    clock.now_s += 60
    clock.look()
    (lost,) = clock.pass_on(DEAD_S)
    assert isinstance(lost, Lost) and lost.silent_s <= DEAD_S + BEAT_S


def test_a_machine_that_is_always_late_judges_too(membership: Membership, clock: Clock) -> None:
    cut_off(membership)
    assert clock.pass_on(20, member(), step_s=1.0) == []
    assert [type(c) for c in clock.pass_on(20, step_s=1.0)] == [Lost]


def test_who_is_known_to_live_is_spared_until_not(clock: Clock) -> None:
    lives, asked = True, []

    def spare(one: Member) -> bool:
        asked.append(one.name)
        return lives

    membership = Membership(BEAT_S, DEAD_S, spare)
    clock = Clock(membership)
    cut_off(membership)
    assert clock.pass_on(1, member()) == [] and asked == []
    assert clock.pass_on(10) == []
    assert 5 <= len(asked) <= 10  # not at each look: it may take some time
    assert clock.pass_on(1, member()) == []
    lives = False
    (lost,) = clock.pass_on(DEAD_S + 2 * LOOK_S)
    assert isinstance(lost, Lost) and lost.silent_s < DEAD_S + LOOK_S


def test_who_answers_pings_lives_until_not(membership: Membership, clock: Clock) -> None:
    membership.handle(Introduced(member()))
    assert clock.pass_on(100) == []
    # Of another process with its name, whose connection has ended late.
    membership.handle(BrokenOff(member(incarnation=0)))
    assert clock.pass_on(10) == []
    membership.handle(BrokenOff(member()))
    assert membership.handle(Introduced(member())) == [] and clock.pass_on(10) == []
    membership.handle(BrokenOff(member()))
    (lost,) = clock.pass_on(LOOK_S)
    assert isinstance(lost, Lost) and lost.silent_s >= 10


def test_one_process_may_come_again(membership: Membership, clock: Clock) -> None:
    cut_off(membership)
    clock.pass_on(1.5)
    assert membership.handle(Introduced(member())) == []
    assert clock.pass_on(1.5) == []


def test_a_restarted_one_supersedes(membership: Membership, clock: Clock) -> None:
    membership.handle(Introduced(member()))
    last = Beat(operator="aten::mm")
    membership.handle(BeatArrived(member(), last))
    again = member(incarnation=2, pid=8)
    assert membership.handle(Introduced(again)) == [Lost(member(), 0.0, last, "superseded"), Joined(again)]
    # What the old one still says is nothing.
    assert membership.handle(BeatArrived(member(), Beat(operator="late"))) == []
    assert membership.handle(Departed(member())) == []
    (standing,) = membership.standings()
    assert standing.member == again and standing.beat is None
    (refused,) = membership.handle(Introduced(member()))
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("other", [member(pid=8), member(incarnation=0), msgspec.structs.replace(member(), host="other")])
def test_another_of_the_name_is_refused(membership: Membership, other: Member) -> None:
    membership.handle(Introduced(member()))
    (refused,) = membership.handle(Introduced(other))
    assert isinstance(refused, Refused) and "another name" in refused.why
    assert [s.member for s in membership.standings()] == [member()]


@pytest.mark.parametrize("how", ["lost", "left"])
def test_who_was_given_up_does_not_come_back(membership: Membership, clock: Clock, how: str) -> None:
    cut_off(membership)
    if how == "lost":
        clock.pass_on(10)
    else:
        membership.handle(Departed(member()))
    assert membership.handle(BeatArrived(member(), Beat())) == []
    (refused,) = membership.handle(Introduced(member()))
    assert isinstance(refused, Refused) and "start anew" in refused.why
    assert membership.handle(Introduced(member(incarnation=2))) == [Joined(member(incarnation=2))]


def test_what_is_known_of_the_gone_is_bounded(membership: Membership) -> None:
    for n in range(MOST_ENDED + 10):
        membership.handle(Introduced(member(str(n))))
        membership.handle(Departed(member(str(n))))
    assert len(membership._ended) == MOST_ENDED and membership.standings() == []
