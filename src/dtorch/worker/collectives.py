"""Collectives of a plan. Pieces of one worker are combined at once; ``meeting.py`` has those of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..communication import local as comm
from ..communication.peers import Peers
from ..core.grid import Here, grid_of
from ..core.program import Collective, DefinePlan
from .failing import PeerRefused, StepFailed, describe
from .lines import Line, cut, lines_of
from .meeting import Meeting

JOIN_ABOVE = 8
"""Pieces of a line beyond which ``all_to_all`` joins it."""

Slots = list[Any]
Cut = tuple[int, int]


class CollectiveStep:
    """Combine the pieces of one slot along a mesh axis.

    Attributes:
        peers: the other workers that take part.
    """

    def __init__(self, plan: DefinePlan, step: Collective, here: Here, others: Peers) -> None:
        self.step, self.others, self.me = step, others, here.worker
        self.name = f"{step.kind} for {plan.operator}"
        self.source, self.target = grid_of(plan, step.source, here), grid_of(plan, step.output, here)
        lines = lines_of(step, self.source, self.target)
        self.alone = [(line, self._cuts(line)) for line in lines if len(line.members) == 1]
        self.meetings = [Meeting(step, line, self.source, self.target) for line in lines if len(line.members) > 1]
        self.peers = sorted({w for m in self.meetings for w in m.line.members} - {self.me})
        long = bool(lines) and len(lines[0].pieces) > JOIN_ABOVE
        self.make = _joined_once if step.kind == "all_to_all" and long else _MAKERS[step.kind]

    def __call__(self, slots: Slots, scalars: list[Any]) -> None:
        """Read the source's slot, write the output's."""
        step, pieces = self.step, slots[self.step.source]
        held = slots[step.output] if step.refill else [None] * len(self.target.held)
        made: dict[int, Tensor] = {}
        if self.peers:
            self._meet(pieces, held, made)
        for line, cuts in self.alone:
            tensors = [pieces[self.source.places[p]] for p in line.pieces]
            targets = line.targets[self.me]
            try:
                into = held[self.target.places[targets[0]]]
                for target, result in zip(targets, self.make(step, tensors, cuts, into), strict=True):
                    made[target] = result
            except Exception as error:
                place = self.target.places[next(t for t in targets if t not in made)]
                raise StepFailed(self.name, self.target.devices(place), describe(tensors)) from error
        slots[step.output] = [made[piece] for piece in self.target.held]

    def refuse(self) -> None:
        """Take part without pieces."""
        if self.peers:
            self.others.refuse(self.peers)

    def _cuts(self, line: Line) -> list[Cut]:
        step, shape = self.step, self.source.mesh.shape
        if not step.sizes:
            return [(0, 0)]
        return [cut(step.sizes, step.outer, step.axis, shape, self.target.at(t)) for t in line.targets[self.me]]

    def _meet(self, pieces: Sequence[Tensor], held: Sequence[Any], made: dict[int, Tensor]) -> None:
        try:
            talks = [m.begin(pieces) for m in self.meetings]
        except BaseException:
            self.refuse()
            raise
        refused = self.others.exchange(self.peers, *_all([t.first for t in talks]))
        going = [t for t in talks if not refused.intersection(t.meeting.line.members)]
        second = [t.second() for t in going]
        if any(sends or receives for sends, receives in second):
            self.others.exchange(self.peers, *_all(second))
        try:
            for talk in going:
                made.update(talk.results(held))
        except Exception as error:
            raise StepFailed(self.name, self.target.devices(0), describe(pieces)) from error
        if refused:
            raise PeerRefused(refused)


class CutStep:
    """Make pieces of the one at their place: no communication."""

    def __init__(self, plan: DefinePlan, step: Collective, here: Here) -> None:
        self.step, self.name = step, f"{step.kind} for {plan.operator}"
        source, self.target = grid_of(plan, step.source, here), grid_of(plan, step.output, here)
        self.index = self.target.projection(source)
        self.cuts = [
            (at.get(step.axis, 0), *(cut(step.sizes, step.outer, step.axis, source.mesh.shape, at) if step.sizes else (0, 0)))
            for at in self.target.coords()
        ]

    def __call__(self, slots: Slots, scalars: list[Any]) -> None:
        """Read the source's slot, write the output's."""
        step, pieces, results = self.step, slots[self.step.source], []
        try:
            for i, (here, start, size) in zip(self.index, self.cuts, strict=True):
                kept = step.kind == "slice"
                results.append(
                    comm.keep(pieces[i], step.dim, start, size) if kept else comm.fill(pieces[i], step.op, first=here == 0)
                )
        except Exception as error:
            c = len(results)
            raise StepFailed(self.name, self.target.devices(c), describe([pieces[self.index[c]]])) from error
        slots[step.output] = results


def _all(messages: Sequence[tuple[list, list]]) -> tuple[list, list]:
    """Sends and receives of several meetings."""
    return [m for sends, _ in messages for m in sends], [m for _, receives in messages for m in receives]


def _gather(step: Collective, line: Sequence[Tensor], cuts: Sequence[Cut], into: Tensor | None) -> Iterator[Tensor]:
    yield comm.all_gather(line, step.dim, step.order, into)


def _reduce(step: Collective, line: Sequence[Tensor], cuts: Sequence[Cut], into: Tensor | None) -> Iterator[Tensor]:
    yield comm.all_reduce(line, step.op)


def _reduce_scatter(step: Collective, line: Sequence[Tensor], cuts: Sequence[Cut], into: Tensor | None) -> Iterator[Tensor]:
    return (comm.reduce_scatter(line, step.op, step.dim, *cut) for cut in cuts)


def _all_to_all(step: Collective, line: Sequence[Tensor], cuts: Sequence[Cut], into: Tensor | None) -> Iterator[Tensor]:
    return (comm.all_to_all(line, step.from_dim, step.dim, *cut, step.order) for cut in cuts)


def _joined_once(step: Collective, line: Sequence[Tensor], cuts: Sequence[Cut], into: Tensor | None) -> Iterator[Tensor]:
    """``all_to_all`` of a long line: it is joined once for all its targets, which spares k * k small copies."""
    joined = comm.all_gather(line, step.from_dim, step.order)
    return (comm.keep(joined, step.dim, *cut) for cut in cuts)


_MAKERS: dict[str, Callable[[Collective, Sequence[Tensor], Sequence[Cut], Tensor | None], Iterator[Tensor]]] = {
    "all_gather": _gather,
    "all_reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
