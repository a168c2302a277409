"""A status as text."""

from __future__ import annotations

import pytest

from dtorch.observability.status import Counters, MemberStatus, Status, WorkerStatus
from dtorch.observability.table import told, told_nbytes

STATUS = Status(
    role="controller",
    name="tcp://h:1",
    host="h",
    pid=10,
    epoch=3,
    running=True,
    client=MemberStatus(name="c", host="h2", pid=11, heard_s=0.25),
    agents=[MemberStatus(name="a", host="h3", pid=12)],
    workers=[
        WorkerStatus(
            name="a.0.0",
            host="h3",
            number=0,
            pid=13,
            devices="devices 0, 2, ...",
            state="busy",
            busy_s=1.5,
            memory_nbytes=3 << 29,
            batches=9,
            queue=4,
            operator="aten::mm",
            heard_s=0.5,
        ),
        WorkerStatus(name="a.10.0", host="h3"),
    ],
    counters=Counters(messages=7, nbytes=2048, batches=5, dropped={"messages": 1, "malformed (health)": 0}),
)

TEXT = """\
controller tcp://h:1 on h (process 10): session 3, 2 workers
client c on h2 (process 11), heard 0.2 s ago
agent a on h3 (process 12), heard -

worker  name    host  process  devices    state        memory  queue  last operator  heard
     0  a.0.0   h3         13  0, 2, ...  busy 1.5 s  1.5 GiB      4  aten::mm       0.5 s ago
     -  a.10.0  h3          -  -          starting          -      0  -              -

messages: 7 (2 KiB), batches: 5, dropped: 1 messages"""


def test_a_table() -> None:
    assert told(STATUS) == TEXT


def test_without_workers_there_is_a_head() -> None:
    lines = told(Status(role="controller", name="x", host="h", pid=1)).splitlines()
    assert lines[0].endswith("no session, 0 workers") and lines[2].startswith("worker") and lines[-1].endswith("dropped: none")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (5 << 20, "5.0 MiB"), (1 << 50, "1024.0 TiB")]
)
def test_bytes_in_a_unit_that_fits(nbytes: int, text: str) -> None:
    assert told_nbytes(nbytes) == text
