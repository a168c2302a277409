"""``TensorFuture``: a value on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import torch

from ..core.program import PendingReply
from .client import Client


class TensorFuture:
    """The plain value of a global tensor, not yet waited for. Await it, or call ``get``.

    Errors of operators it depends on are raised by ``get`` and ``await`` as ``RemoteError``.
    """

    def __init__(self, client: Client, reply: PendingReply) -> None:
        self._client = client
        self._reply = reply
        self._value: torch.Tensor | None = None

    def is_ready(self) -> bool:
        """Whether ``get`` would return at once."""
        return self._reply.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (for ever when None); returns whether the value is there."""
        try:
            self._reply.result(timeout)
        except TimeoutError:
            return False
        return True

    def get(self, timeout: float | None = None) -> torch.Tensor:
        """The value, a plain tensor of the global shape.

        Args:
            timeout: seconds to wait; for ever when None.

        Raises:
            TimeoutError: it did not arrive in time.
            RemoteError: an operator it depends on failed.
        """
        if self._value is None:
            self._value = self._client.settle(self._reply.result(timeout))[0]
        return self._value

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def wake(_: Any) -> None:
            loop.call_soon_threadsafe(_arrive, arrived)

        self._reply.add_done_callback(wake)
        yield from arrived
        return self.get()


def _arrive(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
