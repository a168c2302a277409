"""Pieces along a mesh axis that several workers have: what travels, and what each makes of it.

A ``Meeting`` is what can be settled once; each run of it is a ``Talk``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communication import local as comm
from ..communication.peers import Message
from ..communication.raw import blank, packed, scratch
from ..core.grid import Grid
from ..core.placements import balanced, starts
from ..core.program import Collective
from ..core.raw import as_bytes
from .lines import Line, cut

SMALL_NBYTES = 32 << 10
"""A sum up to this size goes to everyone whole; a larger one in parts, each of which one worker adds up."""

Messages = tuple[list[Message], list[Message]]
"""What to send, and what to receive."""

Unit = tuple[int, list[int]]
"""A worker, and positions of the line that it gives as one."""


class Meeting:
    """A line of which several workers have pieces."""

    def __init__(self, step: Collective, line: Line, source: Grid, target: Grid) -> None:
        self.step, self.line, self.target, self.shape = step, line, target, source.mesh.shape
        self.me = source.here.worker
        self.reduces = step.kind in ("all_reduce", "reduce_scatter")
        self.join_dim = step.dim if step.kind == "all_gather" else step.from_dim
        self.places = {i: source.places[line.pieces[i]] for i in line.positions(self.me)}
        self.cuts = {t: self._cut(t) for ts in line.targets.values() for t in ts} if step.sizes else {}

    def begin(self, pieces: Sequence[Tensor], held: Sequence[Any]) -> Talk:
        """Start a run on this worker's pieces of the source; ``held`` has memory for its target pieces, or None."""
        own = {i: pieces[place] for i, place in self.places.items()}
        like = next(iter(own.values()))
        large = self.step.kind == "all_reduce" and like.numel() * like.element_size() > SMALL_NBYTES
        if large and self.summed(like.dtype):
            kind: type[Talk] = TalkInParts
        else:
            kind = TalkInPlace if not self.reduces and self.step.order[0] == self.join_dim else Talk
        talk = kind(self, own, like)
        talk.open(held)
        return talk

    def summed(self, dtype: torch.dtype) -> bool:
        """Whether a worker's pieces may be combined before they travel: not for averages of integers, which round."""
        exact = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
        return self.reduces and (self.step.op != "avg" or exact)

    def units(self, dtype: torch.dtype) -> list[Unit]:
        """Who gives what, in the order of what is made of it."""
        if self.summed(dtype):
            return [(w, self.line.positions(w)) for w in self.line.members]
        return [(w, [i]) for i, w in enumerate(self.line.workers)]

    def length(self, position: int) -> int:
        """Size of a source piece along the dim that is joined."""
        step = self.step
        return cut(step.from_sizes, step.from_outer, step.axis, self.shape, {**self.line.at, step.axis: position})[1]

    def _cut(self, target: int) -> tuple[int, int]:
        return cut(self.step.sizes, self.step.outer, self.step.axis, self.shape, self.target.at(target))


class Talk:
    """One run of a meeting.

    Attributes:
        first: the messages that open it.
    """

    def __init__(self, meeting: Meeting, own: dict[int, Tensor], like: Tensor) -> None:
        self.meeting, self.own, self.like = meeting, own, like
        self.units = meeting.units(like.dtype)
        self.op = "sum" if meeting.step.op == "avg" and meeting.summed(like.dtype) else meeting.step.op
        self.parts: dict[tuple[int, int], Tensor] = {}
        self.first: Messages = [], []

    def open(self, held: Sequence[Any]) -> None:
        """Make the first messages; ``held`` has memory for the target pieces of this worker, or None."""
        meeting, (sends, receives) = self.meeting, self.first
        for number, (worker, positions) in enumerate(self.units):
            for member in meeting.line.members:
                for target in meeting.line.targets.get(member, ()):
                    if worker == meeting.me and member != meeting.me:
                        sends.append((member, packed(self.given(positions, target), meeting.step.order)))
                    elif worker != meeting.me and member == meeting.me:
                        receives.append((worker, self._room(number, positions, target)))

    def results(self, held: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """The target pieces of this worker by number."""
        meeting = self.meeting
        for target in meeting.line.targets.get(meeting.me, ()):
            parts = [self.given(p, target) if w == meeting.me else self.parts[n, target] for n, (w, p) in enumerate(self.units)]
            if meeting.reduces:
                yield target, self.averaged(comm.all_reduce(parts, self.op))
            else:
                yield target, comm.all_gather(parts, meeting.join_dim, meeting.step.order, held[meeting.target.places[target]])

    def given(self, positions: Sequence[int], target: int) -> Tensor:
        """What pieces of this worker give to a target."""
        bounds = self.meeting.cuts.get(target)
        pieces = [self.own[i] for i in positions]
        parts = pieces if bounds is None else [p.narrow(self.meeting.step.dim, *bounds) for p in pieces]
        return comm.all_reduce(parts, self.op) if len(parts) > 1 else parts[0]

    def averaged(self, total: Tensor) -> Tensor:
        """A sum of parts as what the step asks for."""
        if self.meeting.step.op != self.op and total.dtype != torch.bool:
            total.div_(len(self.meeting.line.pieces))
        return total

    def shape(self, target: int, joined: int) -> list[int]:
        """The shape of a target piece, or of what goes into it: that many elements along the dim that is joined."""
        meeting, shape = self.meeting, list(self.like.shape)
        if not meeting.reduces:
            shape[meeting.join_dim] = joined
        if target in meeting.cuts:
            shape[meeting.step.dim] = meeting.cuts[target][1]
        return shape

    def _room(self, unit: int, positions: Sequence[int], target: int) -> Tensor:
        """Bytes for what another worker gives to a target."""
        meeting, like = self.meeting, self.like
        shape = self.shape(target, 0 if meeting.reduces else meeting.length(positions[0]))
        self.parts[unit, target], room = blank(shape, like.dtype, like.device, meeting.step.order)
        return room


class TalkInPlace(Talk):
    """Pieces that lie one after another in what is made of them: they are received where they belong."""

    def open(self, held: Sequence[Any]) -> None:
        """Make the first messages."""
        meeting, order = self.meeting, self.meeting.step.order
        lengths = [meeting.length(i) for i in range(len(meeting.line.pieces))]
        self.lengths = list(zip(starts(lengths), lengths, strict=True))
        self.wholes = {
            t: comm.allotted(self.shape(t, sum(lengths)), self.like, order, held[meeting.target.places[t]])
            for t in meeting.line.targets.get(meeting.me, ())
        }
        super().open(held)

    def results(self, held: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """The whole, once this worker's own pieces are there too."""
        order = self.meeting.step.order
        for target, whole in self.wholes.items():
            for position in self.own:
                whole.narrow(0, *self.lengths[position]).copy_(self.given([position], target).permute(*order))
            yield target, comm.arranged(whole, order)

    def _room(self, unit: int, positions: Sequence[int], target: int) -> Tensor:
        return as_bytes(self.wholes[target].narrow(0, *self.lengths[positions[0]]))


class TalkInParts(Talk):
    """A large sum: each member adds up one part of all, and gives it to the others."""

    def open(self, held: Sequence[Any]) -> None:
        """Make the first messages."""
        members, order = self.meeting.line.members, self.meeting.step.order
        own = self.given(self.meeting.line.positions(self.meeting.me), -1)
        flat = packed(own, order).view(own.dtype)
        self.dense = comm.allotted(own.shape, own, order)
        sizes = balanced(flat.numel(), len(members))
        bounds = dict(zip(members, zip(starts(sizes), sizes, strict=True), strict=True))
        # Each member's part of the sum.
        self.mine = {w: self.dense.view(-1).narrow(0, *b) for w, b in bounds.items()}
        part = flat.narrow(0, *bounds[self.meeting.me])
        self.rows = {w: part if w == self.meeting.me else scratch.room(part.shape, part.dtype, part.device) for w in members}
        self.first = self._to_others({w: flat.narrow(0, *b) for w, b in bounds.items()}), self._to_others(self.rows)

    def second(self) -> Messages:
        """The messages that follow once all of the first have arrived: the part that was added up here, and room for others."""
        members, mine = self.meeting.line.members, self.mine[self.meeting.me]
        self.averaged(comm.all_reduce([self.rows[w] for w in members], self.op, into=mine))
        return self._to_others(dict.fromkeys(members, mine)), self._to_others(self.mine)

    def results(self, held: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """The sum."""
        for target in self.meeting.line.targets.get(self.meeting.me, ()):
            yield target, comm.arranged(self.dense, self.meeting.step.order)

    def _to_others(self, parts: Mapping[int, Tensor]) -> list[Message]:
        return [(w, as_bytes(part)) for w, part in parts.items() if w != self.meeting.me]


def not_empty(messages: Sequence[Message]) -> list[Message]:
    """The messages that have something to carry: both sides leave the others out."""
    return [m for m in messages if m[1].numel()]
