"""What the processes of a session tell each other beside instructions: who is there, who takes part, and who is gone.

A message is a head and the frames of its body: one of the structs below, or a batch, or a reply.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .errors import ProtocolError, four_parts
from .hosting import Hosting

VERSION = 3
"""Of this page: raised with every change of what it says. ``program.VERSION`` is that of the instructions."""

# Towards the workers.
START, MEET, SUBMIT, REQUEST, END, CLOSE = "start", "meet", "submit", "request", "end", "close"
WELCOME, REFUSED, LOST, WAITING = "welcome", "no", "lost", "waiting"
# Away from them.
HELLO, READY, DONE, REPLY, GONE, LOG = "hello", "ready", "done", "reply", "gone", "log"
# Through the health service: to workers, that the session of this number has broken; to all, which worker is to end.
ABORT, KILL = "abort", "kill"


Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
WorkerName = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^.+\.[0-9]{1,6}\.[0-9]{1,9}$")]
"""A node, the place among its workers, and how often that was filled before."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What every message begins with.

    Attributes:
        kind: one of the names above.
        epoch: the session that it belongs to; what is left of an earlier one is dropped.
        workers: numbers of those it is for, or comes from; none for all.
        count: of DONE, how many batches have run since the session began; of WAITING, how many workers are there;
            of WELCOME, to which HELLO.
    """

    kind: Name
    epoch: Count = 0
    workers: list[Count] = []
    count: Count = 0


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker process. Its devices are counted by type; none are counted where it hosts as many as are asked for."""

    name: WorkerName
    host: Name
    pid: Count
    address: Name
    devices: dict[Name, Count] = {}


class Hello(msgspec.Struct, frozen=True):
    """Someone has come.

    Attributes:
        versions: of this page and of the instructions.
        workers: of an agent, those of its host; of a worker, itself.
        wanted: of a client, how many workers it needs; 0 for all that are there.
        counts: of a client, the devices of each worker, where they are not the workers' own.
        threads: of a client, how many threads operators are to use.
        log_level: of a client, of which records it wants all processes to send; None for none.
        asked: of a client, how often it has asked for a session; the welcome says which one it answers.
    """

    role: Literal["client", "agent", "worker"]
    name: Name
    versions: list[int]
    workers: list[WorkerInfo] = []
    wanted: Count = 0
    counts: dict[Name, list[Count]] = {}
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    log_level: Count | None = None
    asked: Count = 0


class Start(msgspec.Struct, frozen=True):
    """A session begins: who takes part, by number, and who hosts what."""

    workers: list[WorkerInfo]
    hosting: Hosting
    threads: int
    log_level: Count | None = None


class Sign(msgspec.Struct, frozen=True):
    """How the other workers find one: the sign of its door, and the address of its letter box."""

    door: str
    post: str


class Gone(msgspec.Struct, frozen=True):
    """A worker has ended, or is taken to have."""

    worker: Name
    how: Annotated[str, msgspec.Meta(max_length=4096)]


Title = Literal["worker", "agent", "controller"]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The process that a log record comes from.

    Attributes:
        worker: its number, of a worker.
        devices: what it hosts, for people.
    """

    title: Title
    name: Name
    host: Name
    pid: Count
    worker: Count | None = None
    devices: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record of ``logging``, with what it says written out.

    Attributes:
        name: of the logger.
        trace: the traceback of an exception.
        created_s: when, by the clock of its machine.
        dropped: how many before it were not sent.
    """

    origin: Origin
    level: Count
    name: str
    text: str
    trace: str = ""
    file: str = ""
    line: Count = 0
    function: str = ""
    thread: str = ""
    created_s: float = 0.0
    dropped: Count = 0


def check_versions(name: str, theirs: list[int], ours: list[int]) -> None:
    """Two parts that speak alike.

    Raises:
        ProtocolError: they do not; it names both.
    """
    if theirs != ours:
        given = f"{name} speaks versions {theirs} (messages, instructions)"
        rule = f"all parts of a cluster speak alike; this one speaks versions {ours}"
        raise ProtocolError(four_parts(given, rule, "where it joins", "install the same dtorch everywhere"))


class Task(msgspec.Struct, frozen=True):
    """What a worker process is told as it starts, by a line of JSON on its standard input.

    Attributes:
        parent: the address of whoever started it.
        health: that of the health service.
        keys: of the cluster, by name of the part.
    """

    parent: str
    name: str
    host: str
    address: str
    devices: dict[str, int]
    health: str
    keys: dict[str, str]
