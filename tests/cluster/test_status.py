"""Asking a controller how things are: over gRPC, by command, and over HTTP."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtorch import UsageError
from dtorch.cli import main
from dtorch.cluster.agent import Agent
from dtorch.cluster.asking import ask
from dtorch.cluster.beating import HealthMember
from dtorch.cluster.head import Controller
from dtorch.cluster.health import HealthServer
from dtorch.cluster.keys import Keys
from dtorch.cluster.membership import Beat, Member, Standing
from dtorch.cluster.metrics import exposed
from dtorch.cluster.roster import Lease, Roster
from dtorch.cluster.showing import ANEW, redraw
from dtorch.cluster.status import OVERDUE_S, workers
from dtorch.core.control import Start, WorkerInfo
from dtorch.core.hosting import Hosting
from dtorch.core.program import Barrier, Fetch
from dtorch.observability.status import Status
from dtorch.observability.table import told
from dtorch.transport.relay import Relay
from tests.cluster.peers import WAIT_S, await_true
from tests.transport.runners import Gated, Recorder
from tests.transport.test_trunk import Cluster
from tests.worker.plans import ONE


def free_ports() -> int:
    """A port that is free, and so is the next."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(free_ports())
    yield made
    made.end()


def status(cluster: Cluster) -> Status:
    return ask(cluster.keys, cluster.controller.health.address)


def test_workers_queues_and_counters(cluster: Cluster) -> None:
    gated = Gated()
    cluster.worker(0, gated)
    cluster.worker(1, Recorder())
    trunk, _ = cluster.client(workers=2)
    who = Member(name="test.0.0", role="worker", incarnation=1, host="here", pid=1)
    beat = Beat(operator="aten::mm", memory_nbytes=1 << 20, busy_s=1.25)
    with closing(HealthMember(cluster.keys, cluster.controller.health.address, who, lambda: beat)):
        replies = trunk.request(0, [((0, 1), [Barrier(), Fetch(5, ONE, [])])])
        trunk.submit(1, [((0,), [])])
        replies[1].result(WAIT_S)
        await_true(lambda: status(cluster).workers[0].busy_s)
        now = status(cluster)
        one, other = now.workers
        assert (one.number, one.name, one.state, one.queue, one.batches) == (0, "test.0.0", "busy", 2, 2)
        assert (one.operator, one.memory_nbytes, one.devices) == ("aten::mm", 1 << 20, "devices 0, 2, ...")
        assert one.heard_s is not None and one.heard_s < 2
        assert (other.number, other.state, other.queue, other.batches, other.heard_s) == (1, "idle", 0, 1, None)
        assert (now.role, now.epoch, now.running, now.counters.batches) == ("controller", 1, True, 2)
        assert now.counters.messages >= 8 and now.counters.nbytes > 100
        gated.gate.set()
        replies[0].result(WAIT_S)
        await_true(lambda: status(cluster).workers[0].queue == 0)
        trunk.close()
        cluster.trunks.remove(trunk)
        await_true(lambda: not status(cluster).running)
        assert [w.number for w in status(cluster).workers] == [None, None]


def test_what_a_node_knows_of_a_worker_makes_its_state() -> None:
    roster, names = Roster(), ["h.0.0", "h.1.0", "h.2.0"]
    infos = [WorkerInfo(name, "h", n, "a") for n, name in enumerate(names)]
    for info in infos:
        roster.set(info.name, [info])
    lease = Lease(1, Start(infos[:2], Hosting(2), 1), {0: names[0], 1: names[1]})
    lease.waited_for.remove(1)
    silent = Standing(Member(name=names[1], role="worker", incarnation=1, host="h", pid=1), 2.0)
    silent.silent_s = OVERDUE_S + 0.1
    beats = Standing(Member(name="h.4.0", role="worker", incarnation=1, host="h", pid=44), 2.0)
    found = workers(roster, lease, {"h.3.0": 33, names[2]: 2}, "h", {names[1]: silent, "h.4.0": beats})
    assert [(w.name, w.state, w.number) for w in found] == [
        (names[0], "starting", 0),
        (names[1], "silent", 1),
        (names[2], "idle", None),
        ("h.3.0", "starting", None),
        ("h.4.0", "starting", None),
    ]
    assert [w.pid for w in found[3:]] == [33, 44]


def test_who_has_another_key_is_told_nothing(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"(?s)no status from the controller.*to do:"):
        ask(Keys.generate(), cluster.controller.health.address)


def test_a_controller_that_is_held_up_or_of_another_kind_is_told() -> None:
    keys, asked = Keys.generate(), threading.Event()

    def never() -> Future[bytes]:
        asked.set()
        return Future()

    with closing(HealthServer(keys, status=never, dead_s=0.2, beat_s=0.1)) as server:
        with pytest.raises(UsageError, match="has not answered"):
            ask(keys, server.address)
        assert asked.is_set()
    odd: Future[bytes] = Future()
    odd.set_result(b"\xc1")
    with closing(HealthServer(keys, status=lambda: odd)) as server, pytest.raises(UsageError, match="cannot be read"):
        ask(keys, server.address)
    with closing(HealthServer(keys)) as server, pytest.raises(UsageError, match="UNIMPLEMENTED"):
        ask(keys, server.address)


def test_the_command(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.worker(0, Recorder())
    cluster.client(workers=1)
    key = str(cluster.keys.write(tmp_path / "key"))
    where = cluster.relay.address.removeprefix("tcp://")
    assert main(["status", "--controller", where, "--key", key]) == 0
    text = capsys.readouterr().out
    assert "session 1, 1 workers" in text and "test.0.0" in text
    assert main(["status", "--controller", where, "--key", key, "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["workers"][0]["name"] == "test.0.0"
    head = told(msgspec.json.decode(out, type=Status)).splitlines()[0]
    assert head == text.splitlines()[0]


def test_nobody_there_ends_with_2_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = str(Keys.generate().write(tmp_path / "key"))
    for command in ("status", "top"):
        assert main([command, "--controller", f"127.0.0.1:{free_ports()}", "--key", key]) == 2
        assert "to do:" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_top_draws_until_interrupted(out: io.StringIO) -> None:
    left = iter(range(2))

    def rest() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redraw(lambda: Status(role="controller", name="n", host="h", pid=1), False, out, rest)
    assert out.getvalue().count("no session") == 3 and out.getvalue().count(ANEW) == 3 * out.isatty()


def read(port: int) -> dict[tuple[str, str], float]:
    """Values by name and by the labels' values that tell one from the other."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, " ".join(s.labels.get(k, "") for k in ("name", "state", "reason")).strip()): s.value for s in samples}


def test_metrics(cluster: Cluster) -> None:
    cluster.worker(0, Recorder())
    trunk, _ = cluster.client(workers=1)
    trunk.request(0, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S)
    port = free_ports()
    with exposed(f"127.0.0.1:{port}") as expose:
        assert read(port) == {("dtorch_up", ""): 0.0}
        expose(lambda: cluster.relay.ask(cluster.controller.status))
        values = read(port)
        expected = {
            ("dtorch_up", ""): 1.0,
            ("dtorch_batches_total", ""): 1.0,
            ("dtorch_session", ""): 1.0,
            ("dtorch_dropped_total", "messages"): 0.0,
            ("dtorch_worker_queue_batches", "test.0.0"): 0.0,
            ("dtorch_worker_state", "test.0.0 idle"): 1.0,
            ("dtorch_worker_state", "test.0.0 silent"): 0.0,
            ("dtorch_worker_info", "test.0.0"): 1.0,
        }
        assert expected.items() <= values.items() and values["dtorch_messages_total", ""] >= 4
        for address in (f"127.0.0.1:{port}", "nowhere", "127.0.0.1:99999"):
            with pytest.raises(UsageError, match="to do"), exposed(address):
                pass


def test_without_an_address_there_are_no_metrics() -> None:
    code = """
import sys, dtorch, dtorch.cluster.commands
from dtorch.cluster.metrics import exposed
from dtorch.cluster.roster import Lease, Roster
with exposed(None): pass
assert not [m for m in sys.modules if m.startswith(("prometheus_client", "grpc"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_an_address_that_is_in_use_ends_the_commands_with_2(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, taken = str(cluster.keys.write(tmp_path / "key")), cluster.relay.address.removeprefix("tcp://")
    for command in (["controller"], ["agent", "--controller", taken]):
        assert main([*command, "--key", key, "--metrics", taken]) == 2
        assert "--metrics" in capsys.readouterr().err


def test_an_agent_tells_what_it_knows(cluster: Cluster) -> None:
    keys = cluster.keys
    relay = Relay(keys.lock, "tcp://127.0.0.1:*", (cluster.relay.address, "h-1", keys.line))
    agent = Agent(relay, keys, cluster.controller.health.address, "h-1", [], "127.0.0.1")
    thread = threading.Thread(target=relay.run, args=(agent, lambda: None))
    thread.start()
    await_true(lambda: status(cluster).agents)
    own = relay.ask(agent.status).result(WAIT_S)
    assert (own.role, own.running, own.workers) == ("agent", False, []) and status(cluster).agents[0].name == "h-1"
    relay.call(agent.close)
    thread.join(WAIT_S)
    relay.close()
    agent._member.close()


def test_a_node_made_by_nobody_has_no_workers() -> None:
    keys = Keys.generate()
    relay = Relay(keys.lock, "tcp://127.0.0.1:*")
    controller = Controller(relay, keys, "127.0.0.1:0")
    assert controller.status().workers == [] and controller.status().client is None
    controller.health.close()
    relay.close()
