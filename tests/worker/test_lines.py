"""Which pieces meet: every worker comes to the same lines, and every target piece is made wherever it is held."""

from __future__ import annotations

import pytest

from dtorch.core.grid import Grid, Here
from dtorch.core.hosting import Hosting
from dtorch.core.program import Collective, MeshInfo
from dtorch.worker.lines import Line, cut, lines_of

MESH = MeshInfo("cpu", [2, 3], list(range(6)))
HOSTINGS = [Hosting(1), Hosting(2), Hosting(3), Hosting(6), Hosting(3, {"cpu": [4, 0, 2]})]
STEPS = [("all_gather", [0, 1], [0]), ("all_reduce", [1], []), ("reduce_scatter", [1], [1]), ("all_to_all", [0, 1], [0, 1])]


def lines(kind: str, source: list[int], target: list[int], hosting: Hosting, worker: int) -> list[Line]:
    here = Here(hosting, worker)
    step = Collective(kind, 0, 1, 1, 0, [1, 1, 1], "sum")
    return lines_of(step, Grid(MESH, source, here), Grid(MESH, target, here))


@pytest.mark.parametrize("hosting", HOSTINGS)
@pytest.mark.parametrize(("kind", "source", "target"), STEPS)
def test_all_agree_and_nothing_is_left_out(kind: str, source: list[int], target: list[int], hosting: Hosting) -> None:
    seen = [lines(kind, source, target, hosting, worker) for worker in range(hosting.workers)]
    every = {line.pieces + line.workers: line for of in seen for line in of}.values()
    for worker, of in enumerate(seen):
        grid = Grid(MESH, target, Here(hosting, worker))
        made = [piece for line in of for piece in line.targets.get(worker, ())]
        assert sorted(made) == grid.held, "each once"
        assert of == [line for line in every if worker in line.workers]
        for line in of:
            assert set(line.targets) <= set(line.members)
            assert sorted(i for w in line.members for i in line.positions(w)) == [0, 1, 2]


def test_copies_do_not_meet_twice() -> None:
    (line,) = lines("all_reduce", [1], [], Hosting(3), 1)
    assert line.pieces == (0, 1, 2) and line.workers == (0, 1, 2)
    assert [len(lines("all_reduce", [1], [], Hosting(6), worker)) for worker in range(6)] == [1] * 6


def test_cuts() -> None:
    assert cut([2, 1, 1, 3, 0, 4], [0], 1, [2, 3], {0: 1, 1: 2}) == (3, 4)
    assert cut([5, 4], [], 0, [2, 3], {0: 1}) == (5, 4)
