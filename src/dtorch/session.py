"""Sessions: the one place where client, controller, transport and worker are wired together."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .controller.service import Service
from .core.errors import UsageError, four_parts
from .core.mesh import DeviceMesh
from .core.program import MeshInfo
from .tensor import client as clients
from .tensor.client import Client
from .transport.inprocess import InlineTransport, ThreadTransport
from .worker.devices import Devices
from .worker.executor import Executor

_TRANSPORTS = {"inline": InlineTransport, "thread": ThreadTransport}


def init(*, simulate: Mapping[str, int] | None = None, worker: str = "inline") -> Client:
    """Start an embedded session: one worker in this process, any number of logical devices.

    Without it, the first use of a tensor starts one.

    Args:
        simulate: logical devices by type that share one physical device, e.g. ``{"cuda": 8}``. A CPU mesh needs none.
        worker: ``"inline"`` runs batches in the caller's thread, ``"thread"`` in a thread of their own. The results,
            their order and the errors are the same. PyTorch has one default dtype for the whole process, so with a thread
            change it only while no operator is under way: after a value was read.

    Raises:
        UsageError: a session is running already, or an unknown kind of worker.
    """
    if worker not in _TRANSPORTS:
        rule = f"an embedded worker is one of {tuple(_TRANSPORTS)}"
        raise UsageError(four_parts(f"worker={worker!r}", rule, "dtorch.init", "use one of these"))
    if clients.running() is not None:
        raise UsageError(
            four_parts(
                "init() while a session is running",
                "one session at a time",
                "dtorch.init",
                "call dtorch.shutdown() first; its tensors' data is released then",
            )
        )
    client = _embedded(simulate, worker)
    clients.set_current(client)
    return client


def shutdown() -> None:
    """End the session and release the data of all its tensors. The next use starts a new one."""
    client = clients.running()
    if client is not None:
        client.close()
        clients.set_current(None)


def session() -> Client:
    """The running session; starts the embedded one if there is none."""
    return clients.current_client()


def _embedded(simulate: Mapping[str, int] | None = None, worker: str = "inline") -> Client:
    devices = Devices(simulate)
    service = Service(_TRANSPORTS[worker](Executor(devices)), devices.check_mesh)

    def check(mesh: DeviceMesh | MeshInfo) -> None:
        service.check_mesh(mesh.device_type, mesh.ids)

    return Client(service, check, synchronous=os.environ.get("DTORCH_SYNC", "0") not in ("", "0"))


clients.set_starter(_embedded)
