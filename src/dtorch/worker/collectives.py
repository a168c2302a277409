"""Collectives of a plan. Pieces of one worker are combined at once; ``meeting.py`` has those of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..communication import local as comm
from ..communication.peers import Peers
from ..communication.raw import scratch
from ..core.grid import Here, grid_of
from ..core.program import Collective, DefinePlan, Together
from .failing import PeerRefused, StepFailed, describe
from .lines import Line, cut, lines_of
from .meeting import Meeting, Messages, Talk, TalkInParts, not_empty

JOIN_ABOVE = 8
"""Pieces of a line beyond which ``all_to_all`` joins it."""

Slots = list[Any]
Cut = tuple[int, int]


class CollectiveStep:
    """Combine the pieces of slots along a mesh axis: one collective, or several that travel together.

    Attributes:
        peers: the other workers that take part.
    """

    def __init__(self, plan: DefinePlan, step: Collective | Together, here: Here, others: Peers) -> None:
        parts = step.parts if isinstance(step, Together) else [step]
        self.parts, self.others = [Part(plan, part, here) for part in parts], others
        self.peers = sorted({w for p in self.parts for m in p.meetings for w in m.line.members} - {here.worker})

    def __call__(self, slots: Slots, scalars: list[Any]) -> None:
        """Read the sources' slots, write the outputs'."""
        made: list[dict[int, Tensor]] = [{} for _ in self.parts]
        if self.peers:
            self._meet(slots, made)
        for part, done in zip(self.parts, made, strict=True):
            part.combine(slots, done)
            slots[part.step.output] = [done[piece] for piece in part.target.held]

    def refuse(self) -> None:
        """Take part without pieces."""
        if self.peers:
            self.others.refuse(self.peers)

    def _meet(self, slots: Slots, made: list[dict[int, Tensor]]) -> None:
        scratch.begin()
        try:
            talks = [(number, t) for number, part in enumerate(self.parts) for t in part.begin(slots)]
        except BaseException:
            self.refuse()
            raise
        refused = self.others.exchange(self.peers, *_all([t.first for _, t in talks]))
        refused |= self._meet_again([t for _, t in talks if isinstance(t, TalkInParts) and _goes_on(t, refused)])
        for number, talk in talks:
            if _goes_on(talk, refused):
                self.parts[number].finish(talk, slots, made[number])
        if refused:
            raise PeerRefused(refused)

    def _meet_again(self, talks: Sequence[TalkInParts]) -> set[int]:
        """The second round. Those of other lines know nothing of it."""
        peers = sorted({w for t in talks for w in t.meeting.line.members if w != t.meeting.me})
        try:
            second = [t.second() for t in talks]
        except BaseException:
            self.others.refuse(peers)
            raise
        return self.others.exchange(peers, *_all(second)) if peers else set()


class Part:
    """What a worker does for one collective."""

    def __init__(self, plan: DefinePlan, step: Collective, here: Here) -> None:
        self.step, self.me = step, here.worker
        self.name = f"{step.kind} for {plan.operator}"
        self.source, self.target = grid_of(plan, step.source, here), grid_of(plan, step.output, here)
        lines = lines_of(step, self.source, self.target)
        self.alone = [(line, self._cuts(line)) for line in lines if len(line.members) == 1]
        self.meetings = [Meeting(step, line, self.source, self.target) for line in lines if len(line.members) > 1]
        long = bool(lines) and len(lines[0].pieces) > JOIN_ABOVE
        self.make = _joined_once if step.kind == "all_to_all" and long else _MAKERS[step.kind]

    def held(self, slots: Slots) -> Sequence[Any]:
        """Memory for the target pieces, or None for each."""
        return slots[self.step.output] if self.step.refill else [None] * len(self.target.held)

    def begin(self, slots: Slots) -> list[Talk]:
        """Start a run of every meeting."""
        return [m.begin(slots[self.step.source], self.held(slots)) for m in self.meetings]

    def finish(self, talk: Talk, slots: Slots, made: dict[int, Tensor]) -> None:
        """Add what comes of a meeting to what is made."""
        try:
            made.update(talk.results(self.held(slots)))
        except Exception as error:
            raise StepFailed(self.name, self.target.devices(0), describe(slots[self.step.source])) from error

    def combine(self, slots: Slots, made: dict[int, Tensor]) -> None:
        """Add what this worker makes of its own pieces."""
        held, pieces = self.held(slots), slots[self.step.source]
        for line, cuts in self.alone:
            tensors = [pieces[self.source.places[p]] for p in line.pieces]
            targets = line.targets[self.me]
            try:
                into = held[self.target.places[targets[0]]]
                for target, result in zip(targets, self.make(self.step, tensors, cuts, into), strict=True):
                    made[target] = result
            except Exception as error:
                place = self.target.places[next(t for t in targets if t not in made)]
                raise StepFailed(self.name, self.target.devices(place), describe(tensors)) from error

    def _cuts(self, line: Line) -> list[Cut]:
        step, shape = self.step, self.source.mesh.shape
        if not step.sizes:
            return [(0, 0)]
        return [cut(step.sizes, step.outer, step.axis, shape, self.target.at(t)) for t in line.targets[self.me]]


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


def _goes_on(talk: Talk, refused: set[int]) -> bool:
    """Whether no member of a line has refused. All of them hear the same."""
    return not refused.intersection(talk.meeting.line.members)


def _all(messages: Sequence[Messages]) -> Messages:
    """Sends and receives of several meetings."""
    return not_empty([m for sends, _ in messages for m in sends]), not_empty([m for _, rooms in messages for m in rooms])


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
