"""Sessions of one's own, with the worker at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..controller.service import Service
from ..tensor import client as clients
from ..tensor.client import Client
from ..transport.base import Each, Transport
from ..transport.inprocess import InlineTransport
from ..worker.executor import Executor


@contextmanager
def in_place(client: Client) -> Iterator[Client]:
    """A client in place of the running one, which comes back afterwards; it is closed then."""
    before = clients.running()
    clients.set_current(client)
    try:
        yield client
    finally:
        client.close()
        clients.set_current(before)


@contextmanager
def own_session(
    worker: Executor | None = None, transport: Callable[[Executor], Transport] = InlineTransport, synchronous: bool = False
) -> Iterator[tuple[Client, Any]]:
    """A session in place of the running one, which comes back afterwards; gives its client and its worker.

    Args:
        synchronous: each instruction has run before the next is issued.
    """
    worker = worker or Executor()
    with in_place(Client(Service(Each(transport(worker))), lambda mesh: None, synchronous=synchronous)) as client:
        yield client, worker
