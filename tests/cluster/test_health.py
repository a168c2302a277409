"""The health service and its members, in one process."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dtorch
from dtorch.cluster.beating import HealthMember
from dtorch.cluster.health import HealthServer
from dtorch.cluster.keys import Keys
from dtorch.cluster.membership import Beat, Joined, Left, Lost
from dtorch.cluster.pulse import REFUSED, VERSION, Word
from dtorch.core.errors import UsageError
from tests.cluster.peers import QUICK, WAIT_S, Heard, await_true, member

KEYS = Keys.generate()


class House:
    """A service and members that end with the test."""

    def __init__(self) -> None:
        self.changes = Heard()
        self.server = HealthServer(KEYS, on_event=self.changes, **QUICK)
        self.members: list[HealthMember] = []

    def enter(self, name: str = "w0", *, keys: Keys = KEYS, address: str = "", incarnation: int = 1, **more: Any) -> HealthMember:
        who = member(name, incarnation=incarnation)
        self.members.append(HealthMember(keys, address or self.server.address, who, **{**QUICK, **more}))
        return self.members[-1]

    def close(self) -> None:
        for one in self.members:
            one.close()
        self.server.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def test_a_member_joins_beats_and_leaves(house: House) -> None:
    status = Beat(operator="aten::mm", instructions=2**40, memory_nbytes=2**35, busy_s=0.25)
    one = house.enter(status=lambda: status)
    assert one.await_answer(WAIT_S) and house.changes.next(Joined).member == member()
    await_true(lambda: house.server.standings()[0].beat == status)
    one.close()
    assert house.changes.next(Left).member == member() and house.server.standings() == []
    one.close()
    assert house.changes.of(Lost) == []


def test_a_word_reaches_its_member_once(house: House) -> None:
    words, others = Heard(), Heard()
    house.enter("a", on_word=words)
    house.enter("b", on_word=others)
    house.changes.next(Joined), house.changes.next(Joined)
    for text in ("reset", "end"):
        house.server.say("a", text, "because")
    house.server.say("nobody", "end")
    assert [(w.text, w.detail) for w in (words.next(Word), words.next(Word))] == [("reset", "because"), ("end", "because")]
    house.server.say("b", "last")
    assert others.next(Word).text == "last" and len(words.all) == 2 and len(others.all) == 1


def test_many_members_on_one_thread(house: House) -> None:
    before = threading.active_count()
    for n in range(64):
        house.enter(f"w{n}", beat_s=0.5, dead_s=10.0)
    joined = {house.changes.next(Joined).member.name for _ in range(64)}
    assert len(joined) == 64 and threading.active_count() == before
    await_true(lambda: all(s.beat is not None for s in house.server.standings()))
    for one in house.members:
        one.close()
    assert {house.changes.next(Left).member.name for _ in range(64)} == joined and not house.changes.of(Lost)


@pytest.mark.parametrize("part", ["certificate", "hub"])
def test_who_has_another_key_is_not_let_in(house: House, part: str) -> None:
    stranger = Keys.generate()
    if part == "certificate":
        # Trusts the service, but shows a certificate of its own: the same name, another key.
        stranger = msgspec.structs.replace(stranger, certificate=stranger.certificate + KEYS.certificate)
    silence = Heard()
    outside = house.enter("stranger", keys=stranger, on_silence=silence)
    assert silence.next(float) >= QUICK["dead_s"] and not outside.await_answer(0)
    house.enter("w0")
    assert house.changes.next(Joined).member.name == "w0" and len(house.changes.all) == 1


def test_who_shows_no_certificate_is_not_let_in(house: House) -> None:
    import grpc

    credentials = grpc.ssl_channel_credentials(KEYS.certificate.encode())
    options = [("grpc.ssl_target_name_override", "dtorch"), ("grpc.enable_http_proxy", 0)]
    for channel in (
        grpc.secure_channel(house.server.address, credentials, options),
        grpc.insecure_channel(house.server.address, options),
    ):
        with channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(1.0)
    assert house.changes.all == []


def test_a_second_of_the_name_is_refused_and_told_why(house: House) -> None:
    house.enter("w0", incarnation=2)
    house.changes.next(Joined)
    words = Heard()
    house.enter("w0", incarnation=1, on_word=words)
    word = words.next(Word)
    assert word.text == REFUSED and "another name" in word.detail and house.server.dropped["refused"] == 1
    assert len(house.changes.of(Joined)) == 1 and not house.changes.of(Lost)


def test_a_restarted_one_supersedes(house: House) -> None:
    words = Heard()
    house.enter("w0", on_word=words)
    house.changes.next(Joined)
    house.enter("w0", incarnation=2)
    assert house.changes.next(Lost).why == "superseded" and house.changes.next(Joined).member.incarnation == 2
    assert words.next(Word).text == REFUSED


def test_a_version_that_is_not_ours_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.cluster.beating.VERSION", 7)
    words = Heard()
    house.enter(on_word=words)
    word = words.next(Word)
    assert word.text == REFUSED and "version 7" in word.detail and f"version {VERSION}" in word.detail
    assert house.changes.all == []


def test_callbacks_that_fail_end_nothing(house: House, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> Any:
        raise ZeroDivisionError("of the callback")

    other = HealthServer(KEYS, on_event=fail, spare=fail, **QUICK)
    one = house.enter(address=other.address, status=fail, on_word=fail, on_silence=fail)
    assert one.await_answer(WAIT_S)
    await_true(lambda: other.standings() and other.standings()[0].beat == Beat())
    other.say("w0", "word")
    await_true(lambda: one._heard_word)
    other.close()
    await_true(lambda: one._silence.silent_s > QUICK["dead_s"])
    assert "of the callback" in caplog.text


def test_an_end_from_a_callback(house: House) -> None:
    made: list[HealthMember] = []
    ended = Heard()

    def end(word: Word) -> None:
        made[0].close()
        ended(word)

    made.append(house.enter(on_word=end))
    house.changes.next(Joined)
    house.server.say("w0", "end")
    ended.next(Word)
    assert house.changes.next(Left).member.name == "w0"


def test_a_service_that_follows_is_found(house: House) -> None:
    words, silence = Heard(), Heard()
    house.enter(on_word=words, on_silence=silence)
    house.changes.next(Joined)
    house.server.say("w0", "first")
    assert words.next(Word).text == "first"
    house.server.close()
    silence.next(float)
    changes = Heard()
    house.server = HealthServer(KEYS, house.server.address, changes, **QUICK)
    changes.next(Joined)
    house.server.say("w0", "second")
    assert words.next(Word).text == "second"
    assert len(silence.all) == 1


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", "203.0.113.1:1", ":1"])
def test_where_it_cannot_listen(address: str) -> None:
    with pytest.raises(UsageError, match="give another HOST:PORT"):
        HealthServer(KEYS, address)


def test_two_services_do_not_share_a_port(house: House) -> None:
    with pytest.raises(UsageError, match="free port"):
        HealthServer(KEYS, house.server.address)


class Cut:
    """A link between members and a service which can be cut without a sign: nothing passes, and nobody is told."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._listener = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._epoch, self.connections = 0, 0
        self._start(self._accept)

    def cut(self) -> None:
        """What is connected now is cut off; new connections pass."""
        self._epoch += 1

    def cut_for_good(self) -> None:
        """So are new ones."""
        self.cut()
        shut(self._listener)

    def close(self) -> None:
        for one in (self._listener, *self._open):
            shut(one)
        for thread in self._threads:
            thread.join(WAIT_S)
        for one in (self._listener, *self._open):
            one.close()

    def _start(self, work: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
                self._open.append(ours)
                theirs = socket.create_connection(self._to)
            except OSError:
                return
            self._open.append(theirs)
            self.connections += 1
            for source, sink in ((ours, theirs), (theirs, ours)):
                self._start(self._pass_on, source, sink, self._epoch)

    def _pass_on(self, source: socket.socket, sink: socket.socket, epoch: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if epoch == self._epoch:
                    sink.sendall(data)
        if epoch == self._epoch:
            shut(sink)


def shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def test_a_cut_link_is_replaced_in_time(house: House) -> None:
    words, silence = Heard(), Heard()
    # Limits wide enough for a busy machine, and a word that is said while the link is cut.
    settings: dict[str, Any] = {"beat_s": 0.3, "dead_s": 6.0}
    server = HealthServer(KEYS, on_event=house.changes, **settings)
    link = Cut(server.address)
    one = house.enter(address=link.address, on_word=words, on_silence=silence, **settings)
    assert one.await_answer(WAIT_S)
    for cut in range(3):
        link.cut()
        for n in range(5):
            server.say("w0", f"{cut}.{n}")
        assert [words.next(Word).text for _ in range(5)] == [f"{cut}.{n}" for n in range(5)]
    assert link.connections == 4 and not silence.all
    assert len(house.changes.of(Joined)) == 1 and not house.changes.of(Lost)
    one.close()
    server.close()
    link.close()


def test_a_link_that_stays_cut_is_noticed_at_both_ends(house: House) -> None:
    link = Cut(house.server.address)
    silence = Heard()
    house.enter(address=link.address, on_silence=silence)
    house.changes.next(Joined)
    link.cut_for_good()
    assert house.changes.next(Lost).why == "silent"
    silence.next(float)
    house.members[0].close()
    link.close()


def _resources() -> Counter[str]:
    """Threads, also those that are not Python's, and open files, by name."""
    gc.collect()
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names["thread " + (task / "comm").read_text().strip()] += 1
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names[os.readlink(file).partition(":")[0]] += 1
    return names


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux tells")
def test_closing_is_quick_and_leaves_nothing() -> None:
    before = _resources()
    for n in range(5):
        house = House()
        for m in range(4):
            assert house.enter(f"w{m}", incarnation=n).await_answer(WAIT_S)
        if n % 2:
            house.server.close()  # first, so members have nobody to tell
        for one in (*house.members, house.server):
            began_s = time.monotonic()
            one.close()
            assert time.monotonic() - began_s < 5.0  # a second at most, were the machine idle
        del house, one
    # Threads of gRPC's own end in their time.
    deadline_s = time.monotonic() + WAIT_S
    while left := _resources() - before:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


QUIET = """
import os, time
from tests.cluster.peers import *
keys = Keys.generate()
server = HealthServer(keys, **QUICK)
one = HealthMember(keys, server.address, member(), **QUICK)
assert one.await_answer(WAIT_S)
if os.fork() == 0:
    one.close(), server.close()  # of the parent: nothing to do
    os._exit(0)
assert os.wait()[1] == 0
stranger = HealthMember(Keys.generate(), server.address, member("s"), **QUICK)
time.sleep(0.5)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[2]), str(Path(dtorch.__file__).parents[1])))
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_nothing_is_printed_and_nothing_hangs_at_the_end() -> None:
    done = run(QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_without_a_cluster_does_not_load_it() -> None:
    code = "import sys, dtorch, dtorch.cluster.keys, dtorch.cluster.health, dtorch.cluster.beating, dtorch.cli\n"
    done = run(code + "print([name for name in ('grpc', 'cryptography') if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_a_long_wait_for_the_service_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.cluster.beating.QUIET_S", 0.05)
    one = HealthMember(KEYS, "127.0.0.1:1", member(), **QUICK)
    try:
        assert not one.await_answer(0.1)
    finally:
        one.close()
    assert "no answer yet from 127.0.0.1:1; waiting for it" in caplog.text


def test_who_is_patient_waits_longer_for_the_service(house: House) -> None:
    told: dict[str, list[float]] = {"patient": [], "not": []}
    for name, more in (("patient", {"patience_s": 3 * QUICK["dead_s"]}), ("not", {})):
        assert house.enter(name, on_silence=told[name].append, **more).await_answer(WAIT_S)
    house.server.close()
    await_true(lambda: told["patient"])
    assert told["not"][0] < 3 * QUICK["dead_s"] <= told["patient"][0]
