"""A status as text, for people."""

from __future__ import annotations

from collections.abc import Callable

from .status import Status, WorkerStatus

GAP = "  "


def told(status: Status) -> str:
    """The text of a status: who tells, a line a worker, and what has passed."""
    return "\n".join([*_head(status), "", *_table(status.workers), "", _passed(status)])


def told_nbytes(nbytes: int) -> str:
    """A number of bytes in a unit that fits it."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"


def _head(status: Status) -> list[str]:
    session = f"session {status.epoch}" if status.running else "no session"
    lines = [f"{status.role} {status.name} on {status.host} (process {status.pid}): {session}, {len(status.workers)} workers"]
    if status.client is not None:
        client = status.client
        lines.append(f"client {client.name} on {client.host} (process {client.pid}), heard {_ago(client.heard_s)}")
    lines += [f"agent {a.name} on {a.host} (process {a.pid}), heard {_ago(a.heard_s)}" for a in status.agents]
    return lines


def _table(workers: list[WorkerStatus]) -> list[str]:
    rows = [[title for title, _, _ in COLUMNS], *([cell(worker) for _, _, cell in COLUMNS] for worker in workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (zip(row, widths, COLUMNS, strict=True) for row in rows)
    return [GAP.join(f"{text:{side}{width}}" for text, width, (_, side, _) in row).rstrip() for row in aligned]


def _passed(status: Status) -> str:
    counters = status.counters
    dropped = ", ".join(f"{n} {reason}" for reason, n in counters.dropped.items() if n) or "none"
    messages = f"messages: {counters.messages} ({told_nbytes(counters.nbytes)})"
    return f"{messages}, batches: {counters.batches}, dropped: {dropped}"


def _state(worker: WorkerStatus) -> str:
    return f"busy {worker.busy_s:.1f} s" if worker.state == "busy" and worker.busy_s else worker.state


def _ago(heard_s: float | None) -> str:
    return "-" if heard_s is None else f"{heard_s:.1f} s ago"


COLUMNS: list[tuple[str, str, Callable[[WorkerStatus], str]]] = [
    ("worker", ">", lambda w: "-" if w.number is None else str(w.number)),
    ("name", "<", lambda w: w.name),
    ("host", "<", lambda w: w.host),
    ("process", ">", lambda w: "-" if w.pid is None else str(w.pid)),
    ("devices", "<", lambda w: w.devices.removeprefix("devices ") or "-"),
    ("state", "<", _state),
    ("memory", ">", lambda w: told_nbytes(w.memory_nbytes) if w.memory_nbytes else "-"),
    ("queue", ">", lambda w: str(w.queue)),
    ("last operator", "<", lambda w: w.operator or "-"),
    ("heard", "<", lambda w: _ago(w.heard_s)),
]
