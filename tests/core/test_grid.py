"""Pieces along the axes of a mesh, and which of them a worker holds."""

from __future__ import annotations

import itertools

import pytest

from dtorch.core.grid import Grid, Here
from dtorch.core.hosting import Hosting
from dtorch.core.program import MeshInfo

MESH = MeshInfo("cpu", [2, 3], [5, 0, 4, 1, 3, 2])


@pytest.mark.parametrize("axes", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("hosting", [Hosting(1), Hosting(2), Hosting(4), Hosting(2, {"cpu": [5, 1]})])
def test_a_piece_is_where_a_device_is_that_it_belongs_to(axes: list[int], hosting: Hosting) -> None:
    grids = [Grid(MESH, axes, Here(hosting, worker)) for worker in range(hosting.workers)]
    for i, j in itertools.product(range(2), range(3)):
        piece, worker = grids[0].number({0: i, 1: j}), hosting.worker("cpu", MESH.ids[3 * i + j])
        assert worker in grids[0].holders[piece] and piece in grids[worker].held
        assert grids[0].number(grids[0].at(piece)) == piece
    held = [piece for grid in grids for piece in grid.held]
    assert sorted(held) == sorted(piece for piece, workers in enumerate(grids[0].holders) for _ in workers)


def test_what_is_held_is_numbered_anew() -> None:
    grid = Grid(MESH, [0, 1], Here(Hosting(2), 1))
    assert grid.held == [0, 3, 4] and grid.places == {0: 0, 3: 1, 4: 2}
    assert grid.projection(Grid(MESH, [1], Here(Hosting(2), 1))) == [0, 0, 1]
    assert [grid.devices(place) for place in range(3)] == ["cpu:5", "cpu:1", "cpu:3"]


def test_a_mesh_of_other_workers() -> None:
    here = Here(Hosting(4), 1)
    alone = MeshInfo("cpu", [2], [0, 2])
    assert not here.holds(alone) and here.holds(MESH) and Grid(alone, [], here).held == []
