"""What a worker holds: for each handle the pieces of a value, or the failure that prevented it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class Pending:
    """Stands in the store for a value that is being made. Using it waits; where it could not be made, using it fails.

    Args:
        settle: waits for it, and gives its pieces or what stands for them.

    Attributes:
        pieces: where whoever makes it puts them.
    """

    __slots__ = ("__weakref__", "_settle", "pieces")

    def __init__(self, settle: Callable[[Pending], Pieces | Poison]) -> None:
        self._settle = settle
        self.pieces: Pieces = ()

    def settled(self) -> Pieces | Poison:
        """The value, once it is there."""
        return self._settle(self)

    def __getitem__(self, place: int) -> Any:
        """A piece. Poison cannot be indexed, so that is where it fails."""
        return self.settled()[place]  # type: ignore[index]


def settled(value: Any) -> Any:
    """A value of the store, once it is there."""
    return value.settled() if type(value) is Pending else value


class Store(dict[int, "Pieces | Poison"]):
    """Values by handle."""

    def poison_of(self, handles: Iterable[int]) -> Poison | None:
        """The first poison among these values, or None."""
        return next((v for h in handles if isinstance(v := settled(self.get(h)), Poison)), None)

    def spoil(self, handle: int, poison: Poison) -> None:
        """Poison a value that may be half written, and with it every value that shares its memory; nothing is under way."""
        value = settled(self.get(handle))
        if value is None or isinstance(value, Poison):
            return
        shared = {memory(t) for t in value} - {0}
        for other, pieces in [(h, settled(v)) for h, v in self.items()]:
            if not isinstance(pieces, Poison) and any(memory(t) in shared for t in pieces):
                self[other] = poison
        self[handle] = poison

    def drop(self, handles: Iterable[int]) -> None:
        """Give back the memory of values, which stay; poison has none, nor have devices of other workers."""
        for handle in handles:
            value = settled(self.get(handle, ()))
            for piece in () if isinstance(value, Poison) else value:
                piece.untyped_storage().resize_(0)

    def free(self, handles: Iterable[int]) -> None:
        """Forget values; handles that hold nothing are passed over."""
        for handle in handles:
            self.pop(handle, None)


def memory(piece: Any) -> int:
    """Stands for the memory of a piece; 0 for what has none."""
    # The object that stands for the memory, for memory that was dropped has no address.
    return piece.untyped_storage()._cdata if isinstance(piece, Tensor) else 0
