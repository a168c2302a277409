"""Pieces along a mesh axis that several workers have: what travels, and what each makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communication import local as comm
from ..communication.peers import Message
from ..communication.raw import blank, packed
from ..core.grid import Grid
from ..core.placements import balanced, starts
from ..core.program import Collective
from .lines import Line, cut

SMALL_NBYTES = 32 << 10
"""A sum up to this size goes to everyone whole; a larger one in parts, each of which one worker adds up."""

Messages = tuple[list[Message], list[Message]]
"""What to send, and what to receive."""

Unit = tuple[int, list[int]]
"""A worker, and positions of the line that it gives as one."""


class Meeting:
    """A line of which several workers have pieces. ``first``, ``second`` and ``results`` are called in this order."""

    def __init__(self, step: Collective, line: Line, source: Grid, target: Grid) -> None:
        self.step, self.line, self.source, self.target = step, line, source, target
        self.me = source.here.worker
        self.reduces = step.kind in ("all_reduce", "reduce_scatter")
        self.own = {i: source.places[line.pieces[i]] for i in line.positions(self.me)}
        self.parts: dict[tuple[int, int], Tensor] = {}
        self.whole: Tensor | None = None
        self.bytes: Tensor | None = None

    def first(self, pieces: Sequence[Tensor]) -> Messages:
        """The pieces, or what of them each target needs."""
        self.own_pieces = {i: pieces[place] for i, place in self.own.items()}
        self.like = next(iter(self.own_pieces.values()))
        self.units = self._units()
        if self.step.kind == "all_reduce" and self.like.numel() * self.like.element_size() > SMALL_NBYTES and self.summed:
            return self._first_in_parts()
        sends, receives = [], []
        for number, (worker, positions) in enumerate(self.units):
            for member in self.line.members:
                for target in self.line.targets.get(member, ()):
                    if worker == self.me and member != self.me:
                        sends.append((member, packed(self._given(positions, target), self.step.order)))
                    elif worker != self.me and member == self.me:
                        receives.append((worker, self._room(number, positions, target)))
        return _not_empty(sends), _not_empty(receives)

    def second(self) -> Messages:
        """Of a sum in parts, the part that was added up here."""
        if self.whole is None:
            return [], []
        return self._second_in_parts()

    def results(self, held: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """The target pieces of this worker by number; ``held`` has memory for them, or None."""
        for target in self.line.targets.get(self.me, ()):
            yield target, self._result(target, held[self.target.places[target]])
        self.parts, self.own_pieces, self.whole, self.bytes = {}, {}, None, None

    @property
    def summed(self) -> bool:
        """Whether a worker's pieces may be combined before they travel: not for averages of integers, which round."""
        dtype = self.like.dtype
        exact = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
        return self.reduces and (self.step.op != "avg" or exact)

    def _units(self) -> list[Unit]:
        if self.summed:
            return [(w, self.line.positions(w)) for w in self.line.members]
        return [(w, [i]) for i, w in enumerate(self.line.workers)]

    def _given(self, positions: Sequence[int], target: int) -> Tensor:
        """What pieces of this worker give to a target."""
        parts = [self._cut(self.own_pieces[i], target) for i in positions]
        return comm.all_reduce(parts, self._op) if len(parts) > 1 else parts[0]

    @property
    def _op(self) -> str:
        """How parts combine; what makes a sum an average comes last."""
        return "sum" if self.step.op == "avg" and self.summed else self.step.op

    def _cut(self, piece: Tensor, target: int) -> Tensor:
        if not self.step.sizes:
            return piece
        return piece.narrow(self.step.dim, *self._part_of(target))

    def _part_of(self, target: int) -> tuple[int, int]:
        step = self.step
        return cut(step.sizes, step.outer, step.axis, self.source.mesh.shape, self.target.at(target))

    def _room(self, unit: int, positions: Sequence[int], target: int) -> Tensor:
        """Bytes for what another worker gives to a target."""
        step, shape = self.step, list(self.like.shape)
        if not self.reduces:
            at = {**self.line.at, step.axis: positions[0]}
            size = cut(step.from_sizes, step.from_outer, step.axis, self.source.mesh.shape, at)[1]
            shape[step.dim if step.kind == "all_gather" else step.from_dim] = size
        if step.sizes:
            shape[step.dim] = self._part_of(target)[1]
        self.parts[unit, target], room = blank(shape, self.like.dtype, self.like.device, step.order)
        return room

    def _result(self, target: int, into: Tensor | None) -> Tensor:
        step = self.step
        if self.whole is not None:
            return self._average(self.whole)
        parts = [self._given(p, target) if w == self.me else self.parts[n, target] for n, (w, p) in enumerate(self.units)]
        if not self.reduces:
            return comm.all_gather(parts, step.dim if step.kind == "all_gather" else step.from_dim, step.order, into)
        total = comm.all_reduce(parts, self._op)
        return self._average(total) if self.summed else total

    def _average(self, total: Tensor) -> Tensor:
        if self.step.op == "avg" and total.dtype != torch.bool:
            total.div_(len(self.line.pieces))
        return total

    # A large sum: each member adds up one part of all, and gives it to the others.

    def _first_in_parts(self) -> Messages:
        own = self._given(self.line.positions(self.me), -1)
        self.whole, self.bytes = blank(own.shape, own.dtype, own.device, self.step.order)
        self.whole.copy_(own)
        flat = self.bytes.view(own.dtype)
        sizes = balanced(flat.numel(), len(self.line.members))
        self.cuts = list(zip(starts(sizes), sizes, strict=True))
        self.flat, start, size = flat, *self.cuts[self.line.members.index(self.me)]
        self.rows = {w: torch.empty(size, dtype=own.dtype, device=own.device) for w in self.line.members if w != self.me}
        self.rows[self.me] = flat.narrow(0, start, size)
        sends = [(w, flat.narrow(0, *c).view(torch.uint8)) for w, c in zip(self.line.members, self.cuts, strict=True)]
        receives = [(w, row.view(torch.uint8)) for w, row in self.rows.items()]
        return self._to_others(sends), self._to_others(receives)

    def _second_in_parts(self) -> Messages:
        mine = comm.all_reduce([self.rows[w] for w in self.line.members], self._op)
        self.rows[self.me].copy_(mine)
        sends = [(w, self.rows[self.me].view(torch.uint8)) for w in self.line.members]
        receives = [(w, self.flat.narrow(0, *c).view(torch.uint8)) for w, c in zip(self.line.members, self.cuts, strict=True)]
        return self._to_others(sends), self._to_others(receives)

    def _to_others(self, messages: Sequence[Message]) -> list[Message]:
        return _not_empty([m for m in messages if m[0] != self.me])


def _not_empty(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m[1].numel()]
