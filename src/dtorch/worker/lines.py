"""Which pieces meet in a collective, and which worker gives and gets what. Every worker comes to the same lines by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.grid import At, Grid
from ..core.mesh import coordinates
from ..core.program import Collective

GATHERING = ("all_gather", "all_reduce")
"""Kinds whose result is the same at every position of a line."""


@dataclass(frozen=True, slots=True)
class Line:
    """Pieces along one mesh axis, by position.

    Attributes:
        pieces: numbers of the source pieces.
        workers: who gives each.
        at: the coordinate of the line; that along the axis has no meaning.
        targets: for each worker the numbers of the target pieces that it makes of the line.
    """

    pieces: tuple[int, ...]
    workers: tuple[int, ...]
    at: At
    targets: dict[int, list[int]] = field(default_factory=dict)

    @property
    def members(self) -> list[int]:
        """The workers that take part, in the order of their first positions."""
        return list(dict.fromkeys(self.workers))

    def positions(self, worker: int) -> list[int]:
        """Where a worker gives."""
        return [i for i, w in enumerate(self.workers) if w == worker]


def lines_of(step: Collective, source: Grid, target: Grid) -> list[Line]:
    """The lines that this worker takes part in.

    Devices that differ only along axes over which nothing varies hold copies. A worker that has a piece anyway makes it of
    the first line that it is in; a line that would make nothing new is left out.
    """
    mesh, here = source.mesh, source.here
    others = [a for a in range(len(mesh.shape)) if a != step.axis]
    hosts = dict(zip(coordinates(mesh.shape), here.hosts(mesh), strict=True))
    found: list[Line] = []
    served: set[tuple[int, int]] = set()
    for place in coordinates([mesh.shape[a] for a in others]):
        at = dict(zip(others, place, strict=True))
        line = [{**at, step.axis: i} for i in range(mesh.shape[step.axis])]
        workers = tuple(hosts[tuple(c[a] for a in range(len(mesh.shape)))] for c in line)
        new = [n for n in dict.fromkeys((w, target.number(c)) for w, c in zip(workers, line, strict=True)) if n not in served]
        if not new:
            continue
        served.update(new)
        made = Line(tuple(map(source.number, line)), workers, at)
        for worker, piece in new:
            made.targets.setdefault(worker, []).append(piece)
        found.append(made)
    return [line for line in found if here.worker in line.workers]


def cut(sizes: list[int], outer: list[int], axis: int, mesh_shape: list[int], at: At) -> tuple[int, int]:
    """Start and size of a piece along a split dim, within what the outer axes left of it.

    Args:
        sizes: row-major over ``outer`` and ``axis``.
        outer: the axes before that split the same dim.
    """
    k, here, index = mesh_shape[axis], at.get(axis, 0), 0
    for a in outer:
        index = index * mesh_shape[a] + at.get(a, 0)
    mine = sizes[index * k : (index + 1) * k]
    return sum(mine[:here]), mine[here]
