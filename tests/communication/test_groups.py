"""Waiting for what has no way out, in another thread."""

from __future__ import annotations

import pytest

from dtorch.communication.groups import Waiter
from dtorch.communication.peers import PeerLost


class Work:
    """Ends as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout: object) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def waiter() -> Waiter:
    # Not for good, so that a test that fails ends.
    left = iter(range(50))
    return Waiter(10.0, lambda: next(left, None) is None)


def test_a_peer_that_is_gone_is_lost(waiter: Waiter) -> None:
    with pytest.raises(PeerLost):
        waiter.wait(3, [Work(RuntimeError("connection closed by peer"))])
    waiter.close()


def test_whatever_goes_wrong_is_told_and_the_next_is_waited_for(waiter: Waiter) -> None:
    with pytest.raises(ValueError, match="odd"):
        waiter.wait(3, [Work(ValueError("odd"))])
    waiter.wait(3, [Work()])
    waiter.close()
