"""Sessions on a real Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import psutil
import pytest

from tests.cluster.network import ENVIRONMENT, WAIT_S, eventually

# Ray leaves files of its own to the garbage collector, and processes that it has ended unwaited for.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore:subprocess .* running:ResourceWarning")

MARK = f"DTORCH_TEST_{os.getpid()}"
"""In the environment of the nodes, by which what runs there is told from what else runs on this machine."""

BEGIN = """
import os, signal, sys
import ray, torch, dtorch
from dtorch import Shard, init_device_mesh
from tests.cluster.across import differences
"""
USE = """
mesh = init_device_mesh("cpu", {})
x = dtorch.Tensor(torch.arange(7.0), device_mesh=mesh).redistribute(placements=[Shard(0)])
assert (x @ x).item() == 91
"""
FREE = """
import time
deadline = time.monotonic() + 60
while ray.available_resources().get("CPU") != 4:
    assert time.monotonic() < deadline, ray.available_resources()
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """The cluster, with a server for clients elsewhere."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 2, "include_dashboard": False, "ray_client_server_port": port}
    os.environ[MARK] = "1"
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2)
        cluster.client_address = f"ray://127.0.0.1:{port}"
        yield cluster
    finally:
        cluster.shutdown()
        del os.environ[MARK]


def commands() -> list[psutil.Process]:
    """Controllers, agents and workers on the nodes."""
    return [process for process in psutil.process_iter() if _is_command(process)]


def _is_command(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
        return MARK in process.environ() and ("-m dtorch" in line or "dtorch.process" in line)
    except psutil.Error:
        return False


def run(nodes: Any, source: str) -> subprocess.CompletedProcess[str]:
    """Run a program on a machine of the cluster."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + source],
        env={**ENVIRONMENT, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )


def test_the_same_numbers_as_plain_pytorch_and_nothing_is_left(nodes: Any) -> None:
    ran = run(nodes, "ray.init()\ndtorch.init('ray', workers=4, spread=True)\ndifferences()\ndtorch.shutdown()\n" + FREE)
    assert ran.returncode == 0, ran.stderr
    assert not commands()


@pytest.mark.timeout(400)
def test_a_program_elsewhere(nodes: Any) -> None:
    source = f"dtorch.init({nodes.client_address!r}, workers=2)" + USE.format(2) + "dtorch.shutdown()\n"
    for _ in range(5):
        ran = run(nodes, source + "assert not ray.is_initialized()")
        # Ray's server forks beside gRPC's threads, and what it starts is at times left with sockets that are closed.
        if "Starting Ray client server failed" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr
    eventually(lambda: not commands())


def test_all_that_is_free_is_used_and_ends_with_the_program_that_is_killed(nodes: Any) -> None:
    ran = run(nodes, "dtorch.init('ray')" + USE.format(4) + "os.kill(os.getpid(), signal.SIGKILL)")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    eventually(lambda: not commands())
    ran = run(nodes, "ray.init()\n" + FREE)
    assert ran.returncode == 0, ran.stderr


LOSES = """
ray.init()
dtorch.init("ray", workers=4)
{use}
print("on", flush=True)
try:
    while True:
        (x + 1).to_torch()
except dtorch.WorkerLost as error:
    print("lost", flush=True)
dtorch.session().reset()
{use}
dtorch.shutdown()
print("done", flush=True)
"""


def heard(out: IO[str], word: str) -> None:
    """A program says something; what Ray says on its output in between is passed over."""
    for line in out:
        if line == f"{word}\n":
            return
    raise AssertionError(f"the program has ended without {word!r}")


def test_a_node_is_lost_and_another_takes_its_place(nodes: Any) -> None:
    second = next(node for node in nodes.list_all_nodes() if node is not nodes.head_node)
    program = subprocess.Popen(
        [sys.executable, "-c", BEGIN + LOSES.format(use=USE.format(4))],
        env={**ENVIRONMENT, "RAY_ADDRESS": nodes.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    try:
        heard(program.stdout, "on")
        nodes.remove_node(second, allow_graceful=False)
        heard(program.stdout, "lost")
        third = nodes.add_node(num_cpus=2)
        heard(program.stdout, "done")
        assert program.wait(WAIT_S) == 0
        nodes.remove_node(third)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("dtorch.cluster.ray.RESERVED_S = 2.0\ndtorch.init('ray', workers=99)", "99 CPUs that Ray could not reserve within 2 s"),
        ("dtorch.init('ray://127.0.0.1:1')", "a Ray cluster runs there"),
    ],
)
def test_what_ray_cannot_give_is_told(source: str, said: str, nodes: Any) -> None:
    ran = run(nodes, source)
    assert ran.returncode == 1 and said in ran.stderr and "  to do: " in ran.stderr, ran.stderr
    assert not commands()
