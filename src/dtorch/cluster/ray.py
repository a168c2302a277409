"""A cluster on Ray: CPUs are reserved as a placement group, and on each of its nodes an actor runs an agent for those there.

Actors only hold a command of dtorch by its standard input. So all ends with them, and they end with the program that made them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from ..core.control import Start
from ..core.errors import UsageError, WorkerLost, four_parts
from .connection import Connection
from .keys import Keys

RESERVED_S = 120.0
"""How long CPUs may take to be reserved. Where Ray has an autoscaler it may start machines meanwhile."""

END_S = 15.0

ANYWHERE = "ray"
SCHEME = "ray://"


def is_ray(address: str) -> bool:
    """Whether an address is of a Ray cluster: ``ray`` for the one that this machine belongs to, or ``ray://HOST:PORT``."""
    return address == ANYWHERE or address.startswith(SCHEME)


class Outpost:
    """An actor: a command of dtorch on a node of Ray."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None

    def controller(self, address: str) -> str:
        """Be the controller's; returns where it listens."""
        at = f"{address}:{_free_port(address)}"
        self.start(["controller", "--listen", at])
        return at

    def start(self, arguments: Sequence[str]) -> None:
        """Run a command, which ends with this process."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "dtorch", *arguments, "--key", "-"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert self._process.stdin is not None
        self._process.stdin.write(self._key)
        self._process.stdin.flush()

    def runs(self) -> bool:
        """Whether it still does."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Reservation:
    """CPUs of a Ray cluster, one for each worker, and the actors on them. Its owner calls ``release``.

    Attributes:
        address: of the controller.
    """

    def __init__(self, ray: ModuleType, ours: bool, keys: Keys, workers: int, spread: bool) -> None:
        self._ray, self._ours, self._key = ray, ours, keys.as_line()
        self._workers = workers
        self._posts: list[tuple[Any, list[int]]] = []
        self._group = ray.util.placement_group([{"CPU": 1}] * workers, strategy="SPREAD" if spread else "PACK")
        try:
            self._await_cpus()
            self._head = self._actor(0, 0)
            self.address: str = ray.get(self._head.controller.remote(self._node_address(self._homes()[0])), timeout=RESERVED_S)
            self.occupy()
        except BaseException:
            self.release()
            raise

    def occupy(self) -> None:
        """Start an agent on each node with reserved CPUs that no agent is there for: also where Ray has moved them to."""
        self._await_cpus()
        self._posts = [(actor, cpus) for actor, cpus in self._posts if self._runs(actor)]
        occupied = {cpu for _, cpus in self._posts for cpu in cpus}
        free = defaultdict(list)
        for cpu, node in self._homes().items():
            if cpu not in occupied:
                free[node].append(cpu)
        for node, cpus in free.items():
            actor, at = self._actor(1, cpus[0]), self._node_address(node)
            words = ["agent", "--controller", self.address, "--devices", f"cpu:{len(cpus)}", "--address", at]
            self._posts.append((actor, cpus))
            actor.start.remote(words)

    def release(self) -> None:
        """End the actors, and give back the CPUs."""
        actors = [actor for actor, _ in self._posts] + ([self._head] if hasattr(self, "_head") else [])
        with suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.end.remote() for actor in actors], timeout=2 * END_S)
        with suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
        if self._ours:
            self._ray.shutdown()

    def _await_cpus(self) -> None:
        if not self._group.wait(RESERVED_S):
            there = int(self._ray.cluster_resources().get("CPU", 0))
            given = f"{self._workers} CPUs that Ray could not reserve within {RESERVED_S:.0f} s; all its nodes have {there}"
            remedy = "ask for fewer workers=, end what else runs there, or add nodes"
            raise WorkerLost(four_parts(given, "each worker has a CPU of its own", "dtorch.init on Ray", remedy))

    def _homes(self) -> dict[int, str]:
        homes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return {int(cpu): node for cpu, node in sorted(homes.items())}

    def _node_address(self, node: str) -> str:
        return next(str(each["NodeManagerAddress"]) for each in self._ray.nodes() if each["NodeID"] == node)

    def _actor(self, cpus: int, bundle: int) -> Any:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        return self._ray.remote(Outpost).options(num_cpus=cpus, scheduling_strategy=place).remote(self._key)

    def _runs(self, actor: Any) -> bool:
        try:
            return bool(self._ray.get(actor.runs.remote(), timeout=END_S))
        except self._ray.exceptions.RayError:
            return False


class RayConnection(Connection):
    """The link to a cluster that has been started on Ray, and ends with it."""

    def __init__(self, reservation: Reservation, keys: Keys) -> None:
        self._reservation = reservation
        host, _, port = reservation.address.rpartition(":")
        super().__init__(f"tcp://{reservation.address}", f"{host}:{int(port) + 1}", keys)

    def begin(self, wanted: int, counts: Mapping[str, Sequence[int]], threads: int) -> Start:
        """See ``Connection``. Each worker has one CPU, and so one thread."""
        self._reservation.occupy()
        return super().begin(wanted, counts, 1)

    def close(self) -> None:
        """End the link and the cluster; a second call does nothing."""
        if not self._closed:
            super().close()
            self._reservation.release()


def on_ray(address: str, workers: int | None, spread: bool) -> RayConnection:
    """Start a cluster on Ray with so many workers, or one for each CPU that is free.

    Raises:
        UsageError: Ray is not installed, or does not run there.
        WorkerLost: it has too few CPUs.
    """
    ray = _imported()
    ours, keys = not ray.is_initialized(), Keys.generate()
    if ours:
        try:
            ray.init("auto" if address == ANYWHERE else address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, ValueError, RuntimeError) as error:
            given, rule = f"the address {address!r}: {str(error).splitlines()[0]}", "a Ray cluster runs there"
            remedy = "start one (ray start --head), or give the address of its client server, e.g. ray://10.0.0.1:10001"
            raise UsageError(four_parts(given, rule, "dtorch.init", remedy)) from error
    reservation = Reservation(ray, ours, keys, workers or max(1, int(ray.available_resources().get("CPU", 0))), spread)
    try:
        connection = RayConnection(reservation, keys)
    except BaseException:
        reservation.release()
        raise
    return _answered(connection)


def _answered(connection: RayConnection) -> RayConnection:
    try:
        connection.await_answer()
    except WorkerLost:
        connection.close()
        raise
    return connection


def _imported() -> ModuleType:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        rule, remedy = "a session on Ray needs the package ray", 'pip install "dtorch[ray]"'
        raise UsageError(four_parts(f"no package ray: {error}", rule, "dtorch.init", remedy)) from error
    return ray


def _free_port(address: str) -> int:
    """A port with a free one after it."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind((address, 0))
            port = int(one.getsockname()[1])
            try:
                other.bind((address, port + 1))
            except OSError:
                continue
            return port
