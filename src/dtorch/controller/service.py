"""``Service``: takes the client's instructions and sends them on over a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import SessionClosedError, four_parts
from ..core.program import Instruction, PendingReply
from ..transport.base import Transport
from .state import BatchArrived, ControllerState

CheckMesh = Callable[[str, Sequence[int]], None]


class Service:
    """A ``Sink`` over one worker that hosts every device.

    Args:
        transport: the way to the worker; closed with the service.
        check_mesh: raises MeshError for devices that the worker's machine does not have.
        worker: the worker's name in errors and stories.
    """

    def __init__(self, transport: Transport, check_mesh: CheckMesh | None = None, worker: str = "embedded") -> None:
        self.state = ControllerState(worker)
        self._transport = transport
        self._check_mesh = check_mesh
        self._closed = False

    def check_mesh(self, device_type: str, ids: Sequence[int]) -> None:
        """Check that logical devices exist, before anything is placed on them.

        Raises:
            MeshError: they do not.
            SessionClosedError: after ``close``.
        """
        self._check_open()
        if self._check_mesh is not None:
            self._check_mesh(device_type, ids)

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Send a batch; its effects need not be visible yet.

        Raises:
            SessionClosedError: after ``close``.
        """
        self._check_open()
        for order in self.state.handle(BatchArrived(first, batch)):
            self._transport.submit(order.first, order.batch)

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Send a batch and answer its last instruction.

        Raises:
            SessionClosedError: after ``close``.
        """
        self._check_open()
        (order,) = self.state.handle(BatchArrived(first, batch))
        return self._transport.request(order.first, order.batch)

    def close(self) -> None:
        """End the worker and release everything; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def _check_open(self) -> None:
        if self._closed:
            given = "an operation on a session that was shut down"
            rule = "tensors live as long as their session"
            remedy = "make new tensors: the next use starts a new session"
            raise SessionClosedError(four_parts(given, rule, "after dtorch.shutdown()", remedy))
