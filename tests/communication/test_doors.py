"""Who is let in at a worker's door."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from dtorch.communication import doors
from dtorch.communication.doors import SECRET_NBYTES, Door
from dtorch.communication.peers import PeerLost
from dtorch.communication.shared import new_memory

pytestmark = pytest.mark.skipif(not doors.host(), reason="workers share memory on Linux only")


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(1)
    yield door
    door.close()


def knock(door: Door, hello: bytes = b"", fds: int = 0) -> socket.socket:
    """Somebody connects, and says something or nothing."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect("\0" + door.sign.split(" ")[1])
    memory = [new_memory() for _ in range(fds)]
    if hello:
        socket.send_fds(link, [hello], memory)
    for fd in memory:
        os.close(fd)
    return link


def test_two_meet() -> None:
    first, second = Door(0), Door(1)
    here = first.pair(1, second.sign, 10, lambda: False)
    there = second.pair(0, first.sign, 10, lambda: False)
    assert here is not None and there is not None
    here.room(0, out=True)[0] = 7
    assert there.room(0, out=False)[0] == 7
    for each in (here, there, first, second):
        each.close()


@pytest.mark.parametrize("what", ["another secret", "no memory", "cut short"])
def test_who_does_not_know_the_secret_is_not_let_in(what: str, door: Door) -> None:
    secret, number = bytes.fromhex(door.sign.split(" ")[2]), struct.pack("!I", 0)
    hello = {"another secret": bytes(SECRET_NBYTES) + number, "no memory": secret + number, "cut short": secret}[what]
    before = len(os.listdir("/proc/self/fd"))
    with knock(door, hello, what != "no memory") as link:
        with pytest.raises(PeerLost):
            door.pair(0, door.sign, 0.2, lambda: False)
        assert link.recv(1) == b""
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_user_who_says_nothing_keeps_nobody_waiting(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with knock(door) as link:
        began = time.monotonic()
        with pytest.raises(PeerLost):
            door.pair(0, door.sign, 0.2, lambda: False)
        assert link.recv(1) == b"" and time.monotonic() - began < doors.HELLO_S / 2
