"""A cluster of several hosts: the same numbers, and each thing that can happen to a host, a link or a process."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dtorch.cluster.keys import Keys
from tests.cluster.console import Answer, Console
from tests.cluster.network import COMMAND, Host, Network, eventually

NOTICED_S = 3.0
"""From the fault to the exception, as the documentation says. The rest is this machine's, which may be slow."""

SLOW_S = 5.0
JOIN = "import torch, dtorch\nfrom dtorch import Shard, Replicate, init_device_mesh\ndtorch.init('tcp://10.77.0.1', workers={})"
USE = """
mesh = init_device_mesh("cpu", {devices}, mesh_dim_names=("tp",))
x = dtorch.Tensor(torch.arange(7.0), device_mesh=mesh).redistribute(placements=[Shard(0)])
result = (x @ x).item()
"""
WAIT = """
import itertools
for _ in itertools.count():
    y = (x[:, None] * x).redistribute(placements=[Replicate()]).to_torch()
"""


@dataclass(kw_only=True)
class Cluster:
    """A controller on one host, agents with two workers each on two, and a program on a fourth."""

    network: Network
    folder: Path
    head: Host
    a: Host
    b: Host
    programs: Host
    processes: dict[str, psutil.Process] = field(default_factory=dict)

    def start_controller(self) -> None:
        """Start the controller."""
        self._start(self.head, "controller", "--listen", f"{self.head.address}:7717")

    def start_agent(self, host: Host) -> None:
        """Start the agent of a host."""
        self._start(host, "agent", "--controller", self.head.address, "--devices", "cpu:2")

    def _start(self, host: Host, *arguments: str) -> None:
        command = [*COMMAND, *arguments, "--key", str(self.folder / "key")]
        self.processes[host.name] = host.start(command, self.folder / host.name)

    def console(self) -> Console:
        """A program."""
        return Console(self.programs, self.folder / "key", self.folder / "client")

    def told(self) -> str:
        """What all have logged."""
        return "\n".join(f"-- {log.name}\n{log.read_text()}" for log in sorted(self.folder.iterdir()) if log.name != "key")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network, folder = Network(), tmp_path_factory.mktemp("hosts")
    try:
        hosts = {field: network.host(name) for field, name in NAMES.items()}
        Keys.generate().write(folder / "key")
        cluster = Cluster(network=network, folder=folder, **hosts)
        cluster.start_controller()
        for host in (cluster.a, cluster.b):
            cluster.start_agent(host)
        yield cluster
        print(cluster.told())
    finally:
        network.close()


NAMES = {"head": "head", "a": "alpha", "b": "beta", "programs": "desk"}


@pytest.fixture(scope="module")
def program(cluster: Cluster) -> Iterator[Console]:
    """A program whose session has all workers."""
    console = cluster.console()
    try:
        console.run(JOIN.format(4), 110)
        yield console
    finally:
        console.end()


def lost_by(program: Console, fault: Callable[[], object]) -> Answer:
    """What a program hears that waits for a value when something happens."""
    program.run(USE.format(devices=4))
    program.begin(WAIT)
    # It may be anywhere in there.
    time.sleep(0.2)
    began_s = time.monotonic()
    fault()
    answer = program.answer()
    took_s = answer.at_s - began_s
    print(f"told after {took_s:.2f} s")
    assert took_s < NOTICED_S + SLOW_S
    return answer


def assert_lost(answer: Answer, *parts: str) -> None:
    """The program was told what it lost, in four parts."""
    assert re.search(r"^dtorch\.core\.errors\.WorkerLost: ", answer.error, re.M), answer.error
    for part in (*parts, "  rule:  ", "  where: the last instructions were", "  to do: "):
        assert part in answer.error, answer.error


def test_the_same_numbers_as_plain_pytorch(program: Console) -> None:
    program.run("from tests.cluster.across import differences\nresult = differences()")


HOLD = """
import ctypes
def held(x):
    ctypes.PyDLL(None).sleep(0 if x.is_meta else 4)
    return x + 1
hold = dtorch.local_map(held, [[Shard(0)]], [Shard(0)])
"""


def test_who_holds_pythons_lock_is_not_lost(program: Console) -> None:
    program.run(USE.format(devices=4) + HOLD + "\nassert hold(x).to_torch().tolist() == (torch.arange(7.0) + 1).tolist()")
    program.run(USE.format(devices=4) + "ctypes.PyDLL(None).sleep(4)\nassert x.to_torch().tolist() == torch.arange(7.0).tolist()")


def test_a_host_that_is_cut_off(cluster: Cluster, program: Console) -> None:
    workers, agent = cluster.b.workers(), cluster.processes["beta"]
    lost = lost_by(program, cluster.b.cut)
    assert_lost(lost, "(process ", "on beta), which hosts cpu:", "has been silent for")
    # What is cut off ends itself.
    eventually(lambda: not agent.is_running() and not any(worker.is_running() for worker in workers))
    assert "the controller has been silent" in (cluster.folder / "beta").read_text()
    # The session was begun with all four.
    program.run("from dtorch.cluster import connection\nconnection.START_S = 1.0")
    assert_too_few(program.fail("dtorch.session().reset()"), "2 workers were there within 1 s, of 4")
    assert_too_few(program.fail("dtorch.session().reset()"), "2 workers were there within 1 s, of 4")
    program.run("connection.START_S = 60.0")
    cluster.b.heal()
    cluster.start_agent(cluster.b)
    program.run("dtorch.session().reset()" + USE.format(devices=4))


def assert_too_few(answer: Answer, text: str) -> None:
    """A session could not begin."""
    for part in (text, "  rule:  a session begins when", "  where: the cluster at tcp://10.77.0.1", "  to do: "):
        assert part in answer.error, answer.error


def test_whoever_asked_for_all_goes_on_with_those_that_are_left(cluster: Cluster, program: Console) -> None:
    program.run("dtorch.shutdown()\n" + JOIN.format(None))
    assert_lost(lost_by(program, cluster.b.cut), "on beta)")
    program.run("dtorch.session().reset()" + USE.format(devices=2))
    cluster.b.heal()
    eventually(lambda: not cluster.b.processes())
    before = introduced(cluster)
    cluster.start_agent(cluster.b)
    eventually(lambda: introduced(cluster) > before)
    program.run("dtorch.session().reset()" + USE.format(devices=4))


def introduced(cluster: Cluster) -> int:
    """How often the controller has heard of an agent's workers."""
    return len(re.findall(r"agent \S+ is there, with workers", (cluster.folder / "head").read_text()))


FAULTS = {"a worker killed": signal.SIGKILL, "a worker stopped": signal.SIGSTOP}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_is_lost_and_another_takes_its_place(fault: str, cluster: Cluster, program: Console) -> None:
    program.run("dtorch.shutdown()\n" + JOIN.format(None))
    before = {worker.pid for worker in cluster.b.workers()}
    victim = min(before)
    lost = lost_by(program, lambda: os.kill(victim, FAULTS[fault]))
    assert_lost(lost, f"(process {victim} on beta)")
    # All that there are includes who is just being started.
    program.run("dtorch.session().reset()" + USE.format(devices=4))
    assert len(cluster.b.workers()) == 2 and before - {victim} <= {worker.pid for worker in cluster.b.workers()}


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_is_lost_and_takes_its_workers_with_it(fault: signal.Signals, cluster: Cluster, program: Console) -> None:
    program.run("dtorch.shutdown()\n" + JOIN.format(None))
    workers, agent = cluster.b.workers(), cluster.processes["beta"]
    lost = lost_by(program, lambda: agent.send_signal(fault))
    assert_lost(lost, "on beta)")
    program.run("dtorch.session().reset()" + USE.format(devices=2))
    eventually(lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers))
    if fault == signal.SIGSTOP:
        # It learns that it was given up.
        agent.resume()
    eventually(lambda: not cluster.b.processes())
    cluster.start_agent(cluster.b)
    program.run("dtorch.shutdown()\n" + JOIN.format(4) + USE.format(devices=4))


def test_a_program_is_killed_and_the_next_has_all_workers(cluster: Cluster, program: Console) -> None:
    program.run("dtorch.shutdown()")
    killed = cluster.console()
    try:
        killed.run(JOIN.format(4) + USE.format(devices=4), 110)
        killed.begin(WAIT)
        killed.process.kill()
        killed.process.wait()
        # Until that is noticed the cluster is in use.
        gone = rf"the client client-desk-{killed.process.pid}-0 has been silent for .* its session ends"
        eventually(lambda: re.search(gone, (cluster.folder / "head").read_text()))
    finally:
        killed.end()
    program.run(JOIN.format(4) + USE.format(devices=4))


def test_a_program_is_cut_off_and_comes_back(cluster: Cluster, program: Console) -> None:
    assert_lost(lost_by(program, cluster.programs.cut), "the controller at tcp://10.77.0.1:7717 has been silent for")
    cluster.programs.heal()
    program.run("dtorch.session().reset()" + USE.format(devices=4))


def test_a_controller_is_killed_and_all_end(cluster: Cluster, program: Console) -> None:
    assert_lost(lost_by(program, cluster.processes["head"].kill), "the controller at tcp://10.77.0.1:7717 has been silent for")
    eventually(lambda: not (cluster.head.processes() or cluster.a.processes() or cluster.b.processes()))
    program.run("from dtorch.cluster import connection\nconnection.ANSWER_S = 1.0")
    assert "no answer from tcp://10.77.0.1:7717 within 1 s" in program.fail("dtorch.session().reset()").error
    # Another in its place, and agents that were started before it.
    program.run("connection.ANSWER_S = 60.0")
    for host in (cluster.a, cluster.b):
        cluster.start_agent(host)
    cluster.start_controller()
    program.run("dtorch.session().reset()" + USE.format(devices=4), 110)
