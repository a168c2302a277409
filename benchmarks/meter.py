"""What one device holds while a program runs: the worker's store, looked at after every instruction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dtorch.core.program import Calls, DefinePlan, Instruction, Reply
from dtorch.tensor.client import Client
from dtorch.testing.sessions import own_session
from dtorch.worker.executor import Executor
from dtorch.worker.store import Poison


class Meter(Executor):
    """A worker that notes the most bytes any one of its devices held.

    Args:
        operator: values that plans of this name make are counted apart.

    Attributes:
        now, most: bytes of all values on the fullest device, now and at the peak.
        marked, most_marked: of the memory that plans of ``operator`` made.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()
        self._operator = operator
        self._numbers: set[int] = set()
        self._storages: set[int] = set()
        self.now = self.most = self.marked = self.most_marked = 0

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Run a batch, and look."""
        super().submit(first, batch)
        self._look(batch)

    def run(self, first: int, batch: list[Instruction]) -> Reply:
        """Run a batch, look, and answer."""
        reply = super().run(first, batch)
        self._look(batch)
        return reply

    def forget_peaks(self) -> None:
        """Begin anew from what is held now."""
        self.most, self.most_marked = self.now, self.marked

    def _look(self, batch: list[Instruction]) -> None:
        for instruction in batch:
            if isinstance(instruction, DefinePlan) and instruction.operator == self._operator:
                self._numbers.add(instruction.plan)
            for call in instruction.unpacked() if isinstance(instruction, Calls) else ():
                if call.plan in self._numbers:
                    self._storages |= {_place(self.store[h]) for h in call.outputs if h in self.store}
        held: dict[int, int] = {}
        for value in self.store.values():
            if not isinstance(value, Poison):
                held[_place(value)] = max(_nbytes(value), held.get(_place(value), 0))
        self._storages &= set(held)
        self.now, self.marked = sum(held.values()), sum(held[place] for place in self._storages)
        self.most, self.most_marked = max(self.most, self.now), max(self.most_marked, self.marked)


@contextmanager
def metered(operator: str) -> Iterator[tuple[Client, Meter]]:
    """A session with a meter in place of the running one, which comes back afterwards. Every instruction runs at once."""
    with own_session(Meter(operator), synchronous=True) as (client, meter):
        yield client, meter


def _place(value: Any) -> int:
    """Stands for the memory of a value's first piece, and so for that of all its pieces."""
    return value[0].untyped_storage()._cdata if isinstance(value[0], torch.Tensor) else 0


def _nbytes(value: Any) -> int:
    """Bytes on the device that has the largest piece. Pieces of what was put there may share the memory they were cut from."""
    pieces = [t for t in value if isinstance(t, torch.Tensor)]
    return max((min(t.untyped_storage().nbytes(), t.numel() * t.element_size()) for t in pieces), default=0)
