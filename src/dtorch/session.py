"""Sessions: the one place where client, controller, transport and worker are wired together."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .controller.service import Service
from .core.errors import UsageError, four_parts
from .core.mesh import DeviceMesh
from .tensor import client as clients
from .tensor.client import Client
from .transport.inprocess import InlineTransport
from .worker.devices import Devices
from .worker.executor import Executor


def init(*, simulate: Mapping[str, int] | None = None) -> Client:
    """Start an embedded session: one worker in this process, any number of logical devices.

    Without it, the first use of a tensor starts one.

    Args:
        simulate: logical devices by type that share one physical device, e.g. ``{"cuda": 8}``. A CPU mesh needs none.

    Raises:
        UsageError: a session is running already.
    """
    if clients.running() is not None:
        raise UsageError(four_parts("init() while a session is running", "one session at a time", "dtorch.init", "call dtorch.shutdown() first; its tensors' data is released then"))
    client = _embedded(simulate)
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


def _embedded(simulate: Mapping[str, int] | None = None) -> Client:
    devices = Devices(simulate)
    service = Service(InlineTransport(Executor(devices)), devices.check_mesh)

    def check(mesh: DeviceMesh) -> None:
        service.check_mesh(mesh.device_type, mesh.ids)

    return Client(service, check, synchronous=os.environ.get("DTORCH_SYNC", "0") not in ("", "0"))


clients.set_starter(_embedded)
