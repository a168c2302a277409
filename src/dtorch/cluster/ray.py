"""A cluster on Ray: CPUs are reserved as a placement group, and on each of its nodes an actor runs an agent for those there.

Actors only hold a command of dtorch by its standard input. So all ends with them, and they end with the program that made them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from ..core.control import Start
from ..core.errors import UsageError, WorkerLost, four_parts
from .addresses import ports
from .connection import Connection
from .keys import Keys

RESERVED_S = 120.0
"""How long CPUs may take to be reserved. Where Ray has an autoscaler it may start machines meanwhile."""

END_S = 15.0
POLL_S = 0.2

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

    def controller(self) -> str:
        """Run the controller; returns where it listens."""
        address = _imported().util.get_node_ip_address()
        at = f"{address}:{_free_port(address)}"
        self.start(["controller", "--listen", at])
        return at

    def agent(self, controller: str, workers: int) -> None:
        """Run an agent."""
        address = _imported().util.get_node_ip_address()
        self.start(["agent", "--controller", controller, "--devices", f"cpu:{workers}", "--address", address])

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
        workers: how many.
        address: of the controller.
    """

    def __init__(self, ray: ModuleType, ours: bool, keys: Keys, workers: int, spread: bool) -> None:
        self._ray, self._ours, self._key = ray, ours, keys.as_line()
        self.workers = workers
        self._head: Any = None
        self._posts: list[tuple[Any, list[int]]] = []
        self.address = ""
        self._group = ray.util.placement_group([{"CPU": 1}] * workers, strategy="SPREAD" if spread else "PACK")
        try:
            self.occupy()
        except BaseException:
            self.release()
            raise

    def occupy(self) -> bool:
        """Start what does not run: agents for CPUs that none is there for, also where Ray has moved these to, and the controller.

        Returns:
            Whether it is another controller.
        """
        before, deadline_s = self.address, time.monotonic() + RESERVED_S
        while True:
            self._await_cpus()
            try:
                self._renew_controller()
                self._fill()
                return self.address != before
            except self._ray.exceptions.RayError as error:
                # Ray takes a moment to notice that a node is gone, and places actors on it until then.
                if time.monotonic() > deadline_s:
                    given, rule = f"an actor that cannot be started: {error}", "Ray runs the actors of a cluster"
                    raise WorkerLost(four_parts(given, rule, "dtorch on Ray", "look at the state of Ray: ray status")) from error
                time.sleep(POLL_S)

    def _renew_controller(self) -> None:
        if self._runs(self._head):
            return
        # Agents end with their controller.
        for actor, _ in self._posts:
            self._ray.kill(actor)
        self._posts = []
        self._head = self._actor(0, 0)
        self.address = self._ray.get(self._head.controller.remote(), timeout=RESERVED_S)

    def _fill(self) -> None:
        ended = [post for post in self._posts if not self._runs(post[0])]
        for post in ended:
            self._ray.kill(post[0])
            self._posts.remove(post)
        occupied = {cpu for _, cpus in self._posts for cpu in cpus}
        free, started = defaultdict(list), []
        for cpu, node in self._homes().items():
            if cpu not in occupied:
                free[node].append(cpu)
        for cpus in free.values():
            actor = self._actor(1, cpus[0])
            self._posts.append((actor, cpus))
            started.append(actor.agent.remote(self.address, len(cpus)))
        self._ray.get(started, timeout=RESERVED_S)

    def release(self) -> None:
        """End the actors, and give back the CPUs."""
        actors = [actor for actor in (*(actor for actor, _ in self._posts), self._head) if actor is not None]
        with suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.end.remote() for actor in actors], timeout=2 * END_S)
        with suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
        if self._ours:
            self._ray.shutdown()

    def _await_cpus(self) -> None:
        deadline_s = time.monotonic() + RESERVED_S
        # Ray moves them when a node is lost, so that they were there once says nothing.
        while self._table()["state"] != "CREATED":
            time.sleep(POLL_S)
            if time.monotonic() < deadline_s:
                continue
            there = int(self._ray.cluster_resources().get("CPU", 0))
            given = f"{self.workers} CPUs that Ray could not reserve within {RESERVED_S:.0f} s; all its nodes have {there}"
            remedy = "ask for fewer workers=, end what else runs there, or add nodes"
            raise WorkerLost(four_parts(given, "each worker has a CPU of its own", "dtorch.init on Ray", remedy))

    def _homes(self) -> dict[int, str]:
        return {int(cpu): node for cpu, node in sorted(self._table()["bundles_to_node_id"].items())}

    def _table(self) -> dict[str, Any]:
        table: dict[str, Any] = self._ray.util.placement_group_table(self._group)
        return table

    def _actor(self, cpus: int, bundle: int) -> Any:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        return self._ray.remote(Outpost).options(num_cpus=cpus, scheduling_strategy=place).remote(self._key)

    def _runs(self, actor: Any) -> bool:
        try:
            return actor is not None and bool(self._ray.get(actor.runs.remote(), timeout=END_S))
        except self._ray.exceptions.RayError:
            return False


class RayConnection(Connection):
    """The link to a cluster that has been started on Ray, and ends with it."""

    def __init__(self, reservation: Reservation, keys: Keys) -> None:
        self._reservation = reservation
        super().__init__(*ports(reservation.address), keys)

    def begin(self, wanted: int, counts: Mapping[str, Sequence[int]], threads: int, log_level: int | None = None) -> Start:
        """See ``Connection``. Each worker has one CPU, and so one thread."""
        if self._reservation.occupy():
            self._address, self._health = ports(self._reservation.address)
            self._gone = True
        return super().begin(wanted or self._reservation.workers, counts, 1, log_level)

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
    return connection.answered()


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
