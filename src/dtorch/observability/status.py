"""How a session does, as data: who is there, what each is at, and what has passed."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "idle", "busy", "silent"]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process.

    Attributes:
        number: its number in the session; None where it takes no part in one.
        pid: None as long as it is not known.
        state: ``starting`` until it has said that it is there and ready, ``silent`` when beats are overdue.
        busy_s: for how long it has been at the batch at hand, as it said last.
        memory_nbytes: what of it is in memory.
        batches: that were sent on to it in this session.
        queue: those of them that it has not done yet.
        operator: the last that it began, as it said last.
        heard_s: since when nothing has been heard of it; None where nobody listens.
    """

    name: str
    host: str
    number: int | None = None
    pid: int | None = None
    devices: str = ""
    state: State = "starting"
    busy_s: float = 0.0
    memory_nbytes: int = 0
    batches: int = 0
    queue: int = 0
    operator: str = ""
    heard_s: float | None = None


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An agent or a client."""

    name: str
    host: str
    pid: int
    heard_s: float | None = None


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What has passed since the process began, and by reason what was dropped."""

    messages: int = 0
    nbytes: int = 0
    batches: int = 0
    dropped: dict[str, int] = {}


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a session knows.

    Attributes:
        role: of who tells: ``controller`` or ``agent``; ``embedded`` for a session without other processes.
        epoch: how many sessions have begun.
        running: whether one is on.
    """

    role: str
    name: str
    host: str
    pid: int
    epoch: int = 0
    running: bool = False
    client: MemberStatus | None = None
    agents: list[MemberStatus] = []
    workers: list[WorkerStatus] = []
    counters: Counters = Counters()
