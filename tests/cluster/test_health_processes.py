"""The health service and members in processes that are killed, frozen, busy, and held up."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtorch.cluster.beating import HealthMember
from dtorch.cluster.health import HealthServer
from dtorch.cluster.keys import Keys
from dtorch.cluster.membership import Beat, Joined, Left, Lost
from dtorch.cluster.pulse import REFUSED
from tests.cluster.peers import (
    AGAIN,
    QUICK,
    Heard,
    Peer,
    await_true,
    beat_from,
    compute,
    die_in_silence,
    hold,
    member,
    serve_from,
    sort,
)


class House:
    """A service here, and processes; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys.generate()
        self.path = str(self.keys.write(folder / "key"))
        self.changes = Heard()
        self.servers: list[HealthServer] = []
        self.peers: list[Peer] = []

    def serve(self, **settings: object) -> HealthServer:
        self.servers.append(HealthServer(self.keys, on_event=self.changes, **{**QUICK, **settings}))
        return self.servers[-1]

    def start(self, target: Callable[..., None], *args: str) -> Peer:
        self.peers.append(Peer(target, self.path, *args))
        return self.peers[-1]

    def join(self, name: str) -> Peer:
        peer = self.start(beat_from, self.servers[-1].address, name)
        assert self.changes.next(Joined).member.name == name
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        for server in self.servers:
            server.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def test_a_killed_worker_is_lost_and_the_others_stay(house: House) -> None:
    server = house.serve()
    killed, stays = house.join("killed"), house.join("stays")
    await_true(lambda: all(s.beat is not None for s in server.standings()))
    killed.signal(signal.SIGKILL)
    lost = house.changes.next(Lost)
    assert (lost.member.name, lost.member.pid, lost.why) == ("killed", killed.pid, "silent")
    assert lost.silent_s >= QUICK["dead_s"] and lost.last == Beat(operator="aten::mm")
    stays.tell(None)
    assert house.changes.next(Left).member.name == "stays"
    assert stays.status() == 0


def test_a_frozen_worker_is_lost_and_does_not_come_back(house: House) -> None:
    house.serve()
    frozen = house.join("frozen")
    frozen.signal(signal.SIGSTOP)
    assert house.changes.next(Lost).member.name == "frozen"
    frozen.signal(signal.SIGCONT)
    # It does not hold the service for dead, for it was itself away; it is told that it is out.
    assert frozen.told() == ("word", REFUSED)


def test_a_killed_service_is_noticed(house: House) -> None:
    serving = house.start(serve_from)
    peer = house.start(beat_from, serving.told(), "w0")
    assert serving.told() == "Joined"
    serving.signal(signal.SIGKILL)
    assert peer.told() == "silence"


def test_workers_of_a_killed_client_end_themselves(house: House) -> None:
    serving = house.start(serve_from)
    address = serving.told()
    orphans = [house.start(die_in_silence, address, f"w{n}") for n in range(2)]
    assert [serving.told() for _ in orphans] == ["Joined"] * 2
    serving.signal(signal.SIGKILL)
    assert [peer.status() for peer in orphans] == [3, 3]


def test_a_service_that_was_frozen_blames_nobody(house: House) -> None:
    serving = house.start(serve_from)
    address = serving.told()
    peers = [house.start(beat_from, address, f"w{n}") for n in range(2)]
    assert [serving.told() for _ in peers] == ["Joined"] * 2
    serving.signal(signal.SIGSTOP)
    # Both have waited longer than silence may last.
    assert [peer.told() for peer in peers] == ["silence"] * 2
    serving.signal(signal.SIGCONT)
    for peer in peers:
        peer.tell(AGAIN)
        assert peer.told() == AGAIN
        peer.tell(None)
    assert [serving.told() for _ in peers] == ["Left"] * 2


def test_a_service_that_could_not_run_python_blames_nobody(house: House) -> None:
    serving = house.start(serve_from)
    peer = house.start(beat_from, serving.told(), "w0")
    assert serving.told() == "Joined"
    serving.tell((hold, 3))
    assert (serving.told(), serving.told()) == ("holds", "held")
    # It has waited all the while, and beats again.
    peer.tell(AGAIN)
    assert (peer.told(), peer.told()) == ("silence", AGAIN)
    peer.tell(None)
    assert serving.told() == "Left"


def test_a_worker_in_a_long_kernel_beats(house: House) -> None:
    house.serve(beat_s=0.2, dead_s=2.0)
    busy, n, took_s = house.join("busy"), 2**24, 0.0
    while took_s < 4.0:
        busy.tell((sort, n))
        took_s, n = busy.told(), 2 * n
    assert not house.changes.of(Lost)


def test_who_cannot_run_python_lives_until_it_is_stopped(house: House) -> None:
    server = house.serve()
    held, computing, idle = (house.join(name) for name in ("held", "computing", "idle"))
    held.tell((hold, 60))
    computing.tell((compute,))
    await_true(lambda: [s.silent_s > 3 * QUICK["dead_s"] for s in server.standings()] == [True, True, False])
    assert not house.changes.of(Lost)
    for peer in (computing, held):
        peer.signal(signal.SIGSTOP)
        assert house.changes.next(Lost).member.name == ("computing" if peer is computing else "held")
    idle.tell(None)
    assert house.changes.next(Left).member.name == "idle"


def test_a_member_that_leaves_a_frozen_service_leaves_no_thread(house: House) -> None:
    # The session of the other tests may have one of its own.
    before = set(threading.enumerate())
    gc.disable()
    try:
        for pause_s in (0.3, 0.6):
            serving, silence = house.start(serve_from), threading.Event()
            one = HealthMember(house.keys, serving.told(), member("one"), on_silence=lambda _, at=silence: at.set(), **QUICK)
            assert serving.told() == "Joined"
            threading.Event().wait(pause_s)
            serving.signal(signal.SIGSTOP)
            assert silence.wait(60)
            # In the middle of an attempt to connect again.
            threading.Event().wait(pause_s)
            one.close()
            await_true(lambda: not [t for t in set(threading.enumerate()) - before if "poll" in t.name])
    finally:
        gc.enable()
