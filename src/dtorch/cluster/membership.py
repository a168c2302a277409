"""Who is there: a state machine without I/O. Beats and looks at the clock come in, who joined, left or was lost goes out.

Slow is not dead: who is silent, for a thread of its own holds Python's lock, but whose connection answers, lives. And who
cannot look cannot judge. Silence is the sum of the times between looks, and of a longer time than
looks are apart only that much counts: whoever held this process up may have held up the beats as well. After such a time
nobody is judged before one more look, so that what has come meanwhile is read first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import msgspec

BEAT_S = 0.5
DEAD_S = 2.0
LOOKS_A_BEAT = 2
MOST_ENDED = 10_000
"""Of how many that are gone it is known that they may not come back."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that takes part.

    Attributes:
        name: nobody else's at the same time.
        incarnation: higher each time that a member of this name is started anew.
        devices: what it hosts, for people to read.
    """

    name: Name
    role: Literal["worker", "agent", "client", "controller"]
    incarnation: int
    host: Name
    pid: int
    devices: tuple[Name, ...] = ()


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a member does.

    Attributes:
        operator: the last that it began.
        instructions: how many it has done.
        memory_nbytes: what of it is in memory.
        busy_s: for how long it has been at what it does now; 0 when idle.
    """

    operator: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    instructions: int = 0
    memory_nbytes: int = 0
    busy_s: float = 0.0


class Introduced(msgspec.Struct, frozen=True):
    """A process said who it is: for the first time, or again because its connection broke."""

    member: Member


class BeatArrived(msgspec.Struct, frozen=True):
    """A member lives."""

    member: Member
    beat: Beat


class BrokenOff(msgspec.Struct, frozen=True):
    """Nothing answers at the other end of a member's connection, until it is introduced again."""

    member: Member


class Departed(msgspec.Struct, frozen=True):
    """A member said that it ends."""

    member: Member


class Looked(msgspec.Struct, frozen=True):
    """It is ``now_s`` on a clock that never goes back."""

    now_s: float


class Joined(msgspec.Struct, frozen=True):
    """There is one more member."""

    member: Member


class Left(msgspec.Struct, frozen=True):
    """A member ended in order."""

    member: Member


class Lost(msgspec.Struct, frozen=True):
    """A member is gone: it fell silent, or another process has taken its name.

    Attributes:
        silent_s: how long nothing was heard of it, as far as anyone was listening.
        last: what it told last; None if it never did.
    """

    member: Member
    silent_s: float
    last: Beat | None
    why: Literal["silent", "superseded"]


class Refused(msgspec.Struct, frozen=True):
    """Who was introduced may not take part."""

    member: Member
    why: str


Happened = Introduced | BeatArrived | BrokenOff | Departed | Looked
Change = Joined | Left | Lost | Refused


class Attention:
    """How much time went by between looks, as far as one could look."""

    def __init__(self, beat_s: float) -> None:
        self.every_s = beat_s / LOOKS_A_BEAT
        self._last_s: float | None = None
        self._longest_s = 2 * self.every_s
        self._was_away = False

    def look(self, now_s: float) -> tuple[float, bool]:
        """The time since the look before that counts, and whether it may be judged by it."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        away, self._last_s = gap_s > self._longest_s, now_s
        # Twice in a row is a machine that is always late: it shall judge too.
        judges, self._was_away = not away or self._was_away, away
        return min(gap_s, self._longest_s), judges


class Silence:
    """How long nothing was heard of someone.

    Args:
        dead_s: after how much silence it is held to be gone.
    """

    def __init__(self, dead_s: float) -> None:
        self.silent_s = 0.0
        self._dead_s, self._judged_at_s, self._heard = dead_s, dead_s, True

    def heard(self) -> None:
        """Something was heard since the last look."""
        self._heard = True

    def pass_on(self, gap_s: float) -> None:
        """At a look, ``gap_s`` after the one before."""
        if self._heard:
            self.silent_s, self._judged_at_s, self._heard = 0.0, self._dead_s, False
        else:
            self.silent_s += gap_s

    def judge_anew(self) -> None:
        """Whoever was spared is not any more."""
        self._judged_at_s = self._dead_s

    def is_final(self, spare: Callable[[], bool] = lambda: False) -> bool:
        """Whether it has lasted too long; where ``spare`` says that this one lives, the question is put again later."""
        if self.silent_s < self._judged_at_s:
            return False
        if spare():
            self._judged_at_s = self.silent_s + self._dead_s / 2
            return False
        return True


class Standing(Silence):
    """What is known of a member.

    Attributes:
        beat: what it told last.
        connected: its connection answers.
    """

    def __init__(self, member: Member, dead_s: float) -> None:
        super().__init__(dead_s)
        self.member = member
        self.beat: Beat | None = None
        self.connected = True

    def introduced(self) -> None:
        """It has a connection."""
        self.connected = True
        self.heard()

    def broken_off(self) -> None:
        """It has none any more: whether it is lost need not wait for the next time that the question is put."""
        self.connected = False
        self.judge_anew()


class Membership:
    """Who is there.

    Args:
        beat_s: how often members are to be heard.
        dead_s: after how much silence one is lost.
        spare: asked before a member is lost to silence; True when it is known to live, so it is asked again later.
    """

    def __init__(self, beat_s: float, dead_s: float, spare: Callable[[Member], bool] = lambda member: False) -> None:
        self._dead_s, self._spare = dead_s, spare
        self._attention = Attention(beat_s)
        self._there: dict[str, Standing] = {}
        self._ended: dict[str, int] = {}

    def standings(self) -> list[Standing]:
        """All that are there, for others to read."""
        return list(self._there.values())

    def handle(self, event: Happened) -> list[Change]:
        """What follows from an event."""
        match event:
            case Introduced(member):
                return self._introduce(member)
            case BeatArrived(member, beat):
                standing = self._standing(member)
                if standing is not None:
                    standing.beat = beat
                    standing.heard()
                return []
            case BrokenOff(member):
                standing = self._standing(member)
                if standing is not None:
                    standing.broken_off()
                return []
            case Departed(member):
                return [] if self._standing(member) is None else [Left(self._end(member.name).member)]
            case Looked(now_s):
                return self._judge(*self._attention.look(now_s))

    def _standing(self, member: Member) -> Standing | None:
        """Of this very process: not of another that has or had its name."""
        standing = self._there.get(member.name)
        return standing if standing is not None and _one_process(standing.member, member) else None

    def _introduce(self, member: Member) -> list[Change]:
        there, name = self._there.get(member.name), member.name
        if there is None:
            ended = self._ended.get(name)
            if ended is not None and member.incarnation <= ended:
                return [Refused(member, f"incarnation {member.incarnation} of {name!r} has left or was lost: start anew")]
            return self._join(member)
        if _one_process(there.member, member):
            there.introduced()
            return []
        if member.incarnation <= there.member.incarnation:
            taken = f"process {there.member.pid} on {there.member.host!r}"
            return [Refused(member, f"{name!r} is {taken}, of incarnation {there.member.incarnation}: give another name")]
        self._end(name)
        return [Lost(there.member, there.silent_s, there.beat, "superseded"), *self._join(member)]

    def _join(self, member: Member) -> list[Change]:
        self._there[member.name] = Standing(member, self._dead_s)
        return [Joined(member)]

    def _end(self, name: str) -> Standing:
        standing = self._there.pop(name)
        self._ended.pop(name, None)
        self._ended[name] = standing.member.incarnation
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        return standing

    def _judge(self, gap_s: float, judges: bool) -> list[Change]:
        standings = self.standings()
        for standing in standings:
            standing.pass_on(gap_s)
        return [self._lose(s) for s in standings if judges and s.is_final(partial(self._lives, s))]

    def _lives(self, standing: Standing) -> bool:
        return standing.connected or self._spare(standing.member)

    def _lose(self, standing: Standing) -> Lost:
        self._end(standing.member.name)
        return Lost(standing.member, standing.silent_s, standing.beat, "silent")


def _one_process(one: Member, other: Member) -> bool:
    return (one.name, one.incarnation, one.host, one.pid) == (other.name, other.incarnation, other.host, other.pid)
