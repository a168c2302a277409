"""Pieces of a value along the axes of a mesh, and which of them a worker holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from .hosting import ALONE, Hosting
from .mesh import coordinates
from .program import DefinePlan, MeshInfo

At = dict[int, int]
"""A coordinate by mesh axis."""


class Here:
    """A worker's number among those of its session."""

    def __init__(self, hosting: Hosting = ALONE, worker: int = 0) -> None:
        self.hosting, self.worker = hosting, worker

    def hosts(self, mesh: MeshInfo) -> list[int]:
        """The worker of each device of a mesh, row-major."""
        return self.hosting.hosts(mesh.device_type, mesh.ids)

    def holds(self, mesh: MeshInfo) -> bool:
        """Whether any device of a mesh is on this worker."""
        return self.hosting.workers == 1 or self.worker in self.hosts(mesh)


ALL_HERE = Here()
"""For a worker that hosts every device."""


class Grid:
    """The pieces of a value that varies over some axes of a mesh, numbered row-major; a worker holds some of them.

    Attributes:
        count: how many there are.
        held: numbers of the pieces that this worker holds, in order: a stored value is the list of these.
    """

    def __init__(self, mesh: MeshInfo, axes: Sequence[int], here: Here = ALL_HERE) -> None:
        self.mesh, self.axes, self.here = mesh, list(axes), here
        self.shape = [mesh.shape[a] for a in axes]
        self.count = math.prod(self.shape)
        self.held = [piece for piece, workers in enumerate(self.holders) if here.worker in workers]

    @cached_property
    def holders(self) -> list[list[int]]:
        """For each piece the workers that hold it, in the order of the devices."""
        if self.here.hosting.workers == 1:
            return [[0]] * self.count
        found: list[dict[int, None]] = [{} for _ in range(self.count)]
        for coordinate, worker in zip(coordinates(self.mesh.shape), self.here.hosts(self.mesh), strict=True):
            found[self.number(dict(enumerate(coordinate)))][worker] = None
        return [list(workers) for workers in found]

    @cached_property
    def places(self) -> dict[int, int]:
        """Where each held piece stands in a stored value."""
        return {piece: place for place, piece in enumerate(self.held)}

    def number(self, at: At) -> int:
        """The piece at a coordinate; axes that are not given count as 0."""
        index = 0
        for axis, n in zip(self.axes, self.shape, strict=True):
            index = index * n + at.get(axis, 0)
        return index

    def at(self, piece: int) -> At:
        """The coordinate of a piece."""
        found = {}
        for axis, n in zip(reversed(self.axes), reversed(self.shape), strict=True):
            piece, found[axis] = divmod(piece, n)
        return found

    def coords(self) -> Iterator[At]:
        """The coordinate of each piece that is held."""
        return (self.at(piece) for piece in self.held)

    def projection(self, other: Grid) -> list[int]:
        """For each held piece, where the piece of another grid at the same place stands in a stored value."""
        return [other.places[other.number(at)] for at in self.coords()]

    def devices(self, place: int) -> str:
        """Logical ids that hold a piece which is held here, e.g. ``cpu:1,5``."""
        wanted = self.at(self.held[place])
        whole = zip(self.mesh.ids, coordinates(self.mesh.shape), strict=True)
        ids = [i for i, c in whole if all(c[axis] == n for axis, n in wanted.items())]
        text = ",".join(map(str, ids[:8]))
        return f"{self.mesh.device_type}:{text}{',...' if len(ids) > 8 else ''}"


def grid_of(plan: DefinePlan, slot: int, here: Here = ALL_HERE) -> Grid:
    """The pieces of a slot."""
    return Grid(plan.meshes[plan.meshes_of[slot]], plan.axes[slot], here)
