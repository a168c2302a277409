"""Sessions of a test's own, with the worker at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtorch.controller.service import Service
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client
from dtorch.transport.base import Transport
from dtorch.transport.inprocess import InlineTransport
from dtorch.worker.executor import Executor


@contextmanager
def own_session(
    worker: Executor | None = None, transport: type[Transport] = InlineTransport, synchronous: bool = False
) -> Iterator[tuple[Client, Executor]]:
    """A session in place of the running one, which comes back afterwards."""
    before, worker = clients.running(), worker or Executor()
    client = Client(Service(transport(worker)), lambda mesh: None, synchronous=synchronous)
    clients.set_current(client)
    try:
        yield client, worker
    finally:
        client.close()
        clients.set_current(before)
