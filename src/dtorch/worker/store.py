"""What a worker holds: for each handle the pieces of a value, or the failure that prevented it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..core.program import Failure


class Poison:
    """Stands in the store for a value that could not be made. It cannot be indexed, so using it fails by itself."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


Pieces = Sequence[Any]
"""The distinct local tensors of a value, row-major over the mesh axes along which it varies; or one Python function."""


class Store(dict[int, "Pieces | Poison"]):
    """Values by handle."""

    def poison_of(self, handles: Iterable[int]) -> Poison | None:
        """The first poison among these values, or None."""
        return next((v for h in handles if isinstance(v := self.get(h), Poison)), None)

    def spoil(self, handle: int, poison: Poison) -> None:
        """Poison a value that may be half written, and with it every value that shares its memory."""
        value = self.get(handle)
        if value is None or isinstance(value, Poison):
            return
        memory = {_memory(t) for t in value} - {0}
        for other, pieces in self.items():
            if not isinstance(pieces, Poison) and any(_memory(t) in memory for t in pieces):
                self[other] = poison
        self[handle] = poison

    def drop(self, handles: Iterable[int]) -> None:
        """Give back the memory of values, which stay; poison has none, nor have devices of other workers."""
        for handle in handles:
            value = self.get(handle, ())
            for piece in () if isinstance(value, Poison) else value:
                piece.untyped_storage().resize_(0)

    def free(self, handles: Iterable[int]) -> None:
        """Forget values; handles that hold nothing are passed over."""
        for handle in handles:
            self.pop(handle, None)


def _memory(piece: Any) -> int:
    # The object that stands for the memory, for memory that was dropped has no address.
    return piece.untyped_storage()._cdata if isinstance(piece, Tensor) else 0
