"""Sessions: the one place where client, controller, transport and worker are wired together."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .cluster.connection import Connection, join, own
from .cluster.ray import is_ray, on_ray
from .cluster.status import alone
from .controller.service import Service
from .core.errors import MeshError, SessionClosedError, UsageError, four_parts
from .core.hosting import Hosting
from .core.mesh import DeviceMesh
from .core.program import MeshInfo
from .tensor import client as clients
from .tensor.client import Client
from .transport.base import Each
from .transport.inprocess import InlineTransport
from .worker.devices import Devices
from .worker.executor import Executor


def init(
    address: str | None = None,
    *,
    workers: int | None = None,
    devices: Mapping[str, Sequence[int]] | None = None,
    simulate: Mapping[str, int] | None = None,
    key: str | os.PathLike[str] | None = None,
    log_level: int | str | None = None,
    spread: bool = False,
) -> Client:
    """Start a session: on a cluster, on worker processes of this machine, or an embedded one, with one worker in this process.

    Without it, the first use of a tensor starts one: on the cluster that the environment's ``DTORCH_CONTROLLER`` names, else
    of as many processes as ``DTORCH_WORKERS`` says, else an embedded one. Any number of logical devices live on the latter two;
    of a cluster's workers, so many are waited for as ``DTORCH_WORKERS`` says.

    Args:
        address: of a cluster's controller, e.g. ``"tcp://10.0.0.1:7717"``, or of a Ray cluster: ``"ray"`` for the one that this
            machine belongs to, or ``"ray://10.0.0.1:10001"``.
        workers: how many worker processes. On a cluster so many are waited for, and all that are there used when omitted.
        devices: by device type how many logical devices each process of this machine hosts, e.g. ``{"cpu": [3, 3, 2]}``; when
            omitted, ids are dealt out in turn. On a cluster its agents say.
        simulate: logical devices by type that share one physical device, e.g. ``{"cuda": 8}``. A CPU mesh needs none.
        key: file with the cluster's key; what ``DTORCH_KEY`` says, else ``~/.dtorch/key``, when omitted. On Ray there is none.
        spread: on Ray, whether workers are spread over its nodes rather than packed on few.
        log_level: what other processes of the session log of this level and above, e.g. ``logging.INFO``, arrives in this
            process' ``logging`` under ``dtorch.remote``, warnings as of the level ``WARNING``. Nothing does when omitted.

    Raises:
        UsageError: a session is running already, or the arguments make none.
        WorkerLost: no controller answers, or there are too few workers.
    """
    if simulate and (workers is not None or address is not None):
        given, rule = "simulate= with workers or an address", "simulated devices are of an embedded session"
        raise UsageError(four_parts(given, rule, "dtorch.init", "give devices= to say how many devices each process hosts"))
    if address is not None and devices is not None:
        given, rule = "devices= with an address", "the devices of a cluster are those that its agents were given"
        raise UsageError(four_parts(given, rule, "dtorch.init", "leave devices= out"))
    level = _level(log_level)
    with clients.beginning:
        _check_none_runs()
        if address is not None:
            client = _cluster(address, workers, key, level, spread)
        else:
            client = _embedded(simulate) if workers is None else _processes(workers, devices, level)
        clients.set_current(client)
    return client


def shutdown() -> None:
    """End the session and release the data of all its tensors. The next use starts a new one."""
    with clients.beginning:
        _end()


def _end() -> None:
    client = clients.running()
    if client is not None:
        client.close()
        clients.set_current(None)


def session() -> Client:
    """The running session; starts the embedded one if there is none."""
    return clients.current_client()


def _embedded(simulate: Mapping[str, int] | None = None) -> Client:
    devices = Devices(simulate)
    service = Service(Each(InlineTransport(Executor(devices))), check_mesh=devices.check_mesh)
    return Client(service, partial(_check_known, service), partial(_again, partial(_embedded, simulate)), _synchronous(), alone)


def _check_none_runs() -> None:
    if clients.running() is not None:
        given, rule = "init() while a session is running", "one session at a time"
        remedy = "call dtorch.shutdown() first; its tensors' data is released then"
        raise UsageError(four_parts(given, rule, "dtorch.init", remedy))


def _synchronous() -> bool:
    return os.environ.get("DTORCH_SYNC", "0") not in ("", "0")


def _level(given: int | str | None) -> int | None:
    named = logging.getLevelNamesMapping().get(given.upper()) if isinstance(given, str) else given
    if given is not None and (not isinstance(named, int) or isinstance(named, bool) or named < 0):
        rule, remedy = "a level is a number or a name of logging's", "give e.g. logging.INFO"
        raise UsageError(four_parts(f"log_level={given!r}", rule, "dtorch.init", remedy))
    return named


def _check_wanted(workers: Any, counts: Mapping[str, Sequence[int]]) -> None:
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        given, rule = f"workers={workers!r}", "a session has at least one worker"
        raise UsageError(four_parts(given, rule, "dtorch.init or DTORCH_WORKERS", "give a positive number of processes"))
    wrong = [k for k, n in counts.items() if k != "cpu" or len(n) != workers or min(n) < 0 or not sum(n)]
    if wrong:
        given, rule = f"devices={dict(counts)!r} for {workers} workers", "devices tells for a type how many each worker hosts"
        raise UsageError(four_parts(given, rule, "dtorch.init", f'give e.g. devices={{"cpu": {[2] * workers}}}'))


def _check_not_forked() -> None:
    if _inherited:
        given = "a session of processes in a process that was forked from one with such a session"
        rule = "gRPC is in use there and does not survive a fork: the parent's session would be lost"
        remedy = "start the process by spawn or forkserver, or fork before the first session; an embedded session works here"
        raise UsageError(four_parts(given, rule, "dtorch.init or the first use of a tensor", remedy))


def _check_hosted(hosting: Hosting, device_type: str, ids: Sequence[int]) -> None:
    if device_type != "cpu":
        given, rule = f"a mesh of {device_type!r} devices", "worker processes run on the CPU"
        raise MeshError(four_parts(given, rule, "the device mesh of your tensor", "use the embedded session: dtorch.init()"))
    limit = hosting.limit(device_type)
    if limit is not None and max(ids) >= limit:
        given = f"a mesh with {device_type!r} device id {max(ids)}"
        rule = f"there are {limit} {device_type!r} devices, with ids from 0"
        remedy = "use lower ids, or have more: dtorch.init(devices=...), or on a cluster agents of more (--devices cpu:N)"
        raise MeshError(four_parts(given, rule, "the device mesh of your tensor", remedy))


def _first_use() -> Client:
    address, given = os.environ.get("DTORCH_CONTROLLER"), os.environ.get("DTORCH_WORKERS", "0") or "0"
    workers: Any = int(given) if given.isdigit() else given
    if address:
        return _cluster(address, workers or None)
    return _processes(workers) if workers else _embedded()


def _processes(workers: Any, counts: Mapping[str, Sequence[int]] | None = None, log_level: int | None = None) -> Client:
    """A session of worker processes on this machine."""
    _check_not_forked()
    _check_wanted(workers, counts or {})
    return _opened(own(workers), workers, counts or {}, log_level)


def _cluster(
    address: str,
    workers: int | None = None,
    key: str | os.PathLike[str] | None = None,
    log_level: int | None = None,
    spread: bool = False,
) -> Client:
    """A session on a cluster that runs somewhere, or on Ray."""
    _check_not_forked()
    if workers is not None:
        _check_wanted(workers, {})
    connection = on_ray(address, workers, spread) if is_ray(address) else join(address, key)
    return _opened(connection, workers or 0, {}, log_level)


def _opened(connection: Connection, workers: int, counts: Mapping[str, Sequence[int]], log_level: int | None) -> Client:
    """The first session over a connection, which is closed where there will be none."""
    try:
        return _begun(connection, workers, counts, log_level)
    except BaseException:
        connection.close()
        raise


def _begun(connection: Connection, workers: int, counts: Mapping[str, Sequence[int]], log_level: int | None) -> Client:
    start = connection.begin(workers, counts, torch.get_num_threads(), log_level)
    service = Service(connection, partial(_check_hosted, start.hosting), start.hosting, travels=True)
    connection.story = service.state.story
    reset = partial(_again, partial(_begun, connection, workers, counts, log_level))
    return Client(service, partial(_check_known, service), reset, _synchronous(), connection.status)


def _check_known(service: Service, mesh: DeviceMesh | MeshInfo) -> None:
    service.check_mesh(mesh.device_type, mesh.ids)


def _again(begin: Callable[[], Client], client: Client) -> None:
    """Another session in place of a client's, where another thread has not begun it meanwhile."""
    with clients.beginning:
        running = clients.running()
        if running is None:
            given, rule = "reset() of a session that was shut down", "a session begins anew in place of one that is on"
            raise SessionClosedError(four_parts(given, rule, "dtorch.session().reset()", "begin another with dtorch.init()"))
        if running is client:
            client.end()
            clients.set_current(begin())


def _forked() -> None:
    """In a forked child: a session of processes is its parent's. The threads that carry it are not here, and it goes on there."""
    client = clients.running()
    if client is not None and client.sink.travels:
        client.closed = True
        # Nothing of it may be closed by the garbage collector either.
        _inherited.append(client)
        clients.set_current(None)


_inherited: list[Client] = []

clients.set_starter(_first_use)
# A thread that is beginning a session does not hold up the end of the process.
atexit.register(_end)
os.register_at_fork(after_in_child=_forked)
