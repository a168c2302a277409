"""A sink that forgets: what remains is the client's own time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dtorch
from dtorch.core.program import Instruction, PendingReply, Reply
from dtorch.transport.base import Finished


class Discard:
    """Takes every batch and runs none."""

    travels = False

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Forget a batch."""

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Forget a batch; its answer is empty."""
        return Finished(Reply())

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def client_only() -> Iterator[None]:
    """Within it nothing that the session's client issues is run. Tensors made within it hold nothing afterwards."""
    client = dtorch.session()
    client.flush()
    known = set(client.cache)
    real, client.sink = client.sink, Discard()
    try:
        yield
    finally:
        client.flush()
        client.history.clear()
        client.sink = real
        # The worker never saw what was planned meanwhile.
        client.forget([client.cache.pop(key).number for key in client.cache.keys() - known])
