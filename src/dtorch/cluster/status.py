"""How a node's workers do, of what it knows of them: who has come, how far they are, and what the health service has heard."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from ..core.control import WorkerInfo
from ..observability.status import MemberStatus, State, Status, WorkerStatus
from .membership import BEAT_S, Beat, Standing
from .roster import Lease, Roster

OVERDUE_S = 2 * BEAT_S
"""After so much silence a worker is shown as silent; it is lost later."""

Standings = Mapping[str, Standing]


def alone() -> Status:
    """Of a session in this process alone."""
    name, host, pid = "embedded", socket.gethostname(), os.getpid()
    devices, nbytes = "all devices", resident_nbytes(pid)
    worker = WorkerStatus(name=name, host=host, number=0, pid=pid, devices=devices, state="idle", memory_nbytes=nbytes)
    return Status(role=name, name=name, host=host, pid=pid, epoch=1, running=True, workers=[worker])


def resident_nbytes(pid: int) -> int:
    """What of a process is in memory; 0 where that cannot be seen."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def members(standings: Standings, role: str) -> list[MemberStatus]:
    """Those of a role that are there."""
    return [member(s) for s in standings.values() if s.member.role == role]


def member(standing: Standing) -> MemberStatus:
    """One that is there."""
    who = standing.member
    return MemberStatus(name=who.name, host=who.host, pid=who.pid, heard_s=standing.silent_s)


def workers(roster: Roster, lease: Lease | None, own: Mapping[str, int], host: str, standings: Standings) -> list[WorkerStatus]:
    """All workers of a node.

    Args:
        own: those that it has started itself: names and process numbers.
        host: of these.
        standings: what the health service knows, by name; nothing where it is elsewhere.
    """
    come = {worker.name: (child, worker) for child, worker in roster.workers}
    found = [_come(child, worker, lease, standings.get(worker.name), worker.name in own) for child, worker in come.values()]
    # Those that have not come yet: who has started them knows them, and they may beat already.
    starting = {name: WorkerStatus(name=name, host=host, pid=pid) for name, pid in own.items()}
    starting |= {
        name: WorkerStatus(name=name, host=s.member.host, pid=s.member.pid, heard_s=s.silent_s)
        for name, s in standings.items()
        if s.member.role == "worker"
    }
    return found + [worker for name, worker in starting.items() if name not in come]


def _come(child: str, worker: WorkerInfo, lease: Lease | None, standing: Standing | None, here: bool) -> WorkerStatus:
    number = lease.number(worker.name) if lease is not None else None
    beat = (standing.beat if standing is not None else None) or Beat()
    sent, queue = lease.queue(number) if lease is not None and number is not None else (0, 0)
    return WorkerStatus(
        number=number,
        name=worker.name,
        host=worker.host,
        pid=worker.pid,
        devices=_devices(worker, lease, number),
        state=_state(lease, number, standing, bool(queue or beat.busy_s)),
        busy_s=beat.busy_s,
        memory_nbytes=beat.memory_nbytes or (resident_nbytes(worker.pid) if here else 0),
        batches=sent,
        queue=queue,
        operator=beat.operator,
        heard_s=None if standing is None else standing.silent_s,
    )


def _state(lease: Lease | None, number: int | None, standing: Standing | None, busy: bool) -> State:
    if lease is not None and number in lease.waited_for:
        return "starting"
    if standing is not None and standing.silent_s > OVERDUE_S:
        return "silent"
    return "busy" if busy else "idle"


def _devices(worker: WorkerInfo, lease: Lease | None, number: int | None) -> str:
    if lease is not None and number is not None:
        return lease.start.hosting.told(number)
    return ", ".join(f"{count} {kind}" for kind, count in worker.devices.items())
