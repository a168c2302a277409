"""Taking parts of split tensors, writing parts back, and the gradients of both."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.sharding.harness import MESHES, check, place, stays, values, without_communication

R, S = Replicate(), Shard


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 6),),
        (slice(None, None, 3),),
        (slice(-4, None, 2),),
        (slice(2, 3),),
        (slice(5, 2),),
        (slice(1, -1), slice(0, 4, 3)),
        (slice(7, 100), slice(-100, 2)),
        (..., slice(1, 2)),
    ],
    ids=str,
)
def test_slices(index: tuple) -> None:
    check(lambda x: x[index], values(8, 5), grad=True)


def test_slices_of_every_range() -> None:
    x = values(5)
    for start in range(-6, 7):
        for end in range(-6, 7):
            for step in (1, 2, 4):
                check(lambda x, at=slice(start, end, step): x[at], x, meshes=[(3,)], partial=(), limit=12)


@pytest.mark.parametrize("dim, index", [(0, 0), (0, -1), (0, 4), (1, 2), (-2, -6), (2, 0)])
def test_select(dim: int, index: int) -> None:
    check(lambda x: x.select(dim, index), values(5, 6, 3), grad=True, limit=25)


def test_narrow_and_scalar_index() -> None:
    check(lambda x: (x.narrow(1, 2, 3), x[3, 1], x[-1, ..., 0]), values(5, 6), grad=True)


@pytest.mark.parametrize("offset", [-7, -2, -1, 0, 1, 3, 6])
def test_diagonal(offset: int) -> None:
    check(lambda x: x.diagonal(offset), values(5, 6), grad=True)


@pytest.mark.parametrize("dims", [(0, 2), (2, 0), (1, 2), (-2, 0)])
def test_diagonal_of_dims(dims: tuple[int, int]) -> None:
    check(lambda x: torch.diagonal(x, 1, *dims), values(4, 3, 5), grad=True, limit=30)


def test_diagonal_of_pieces_in_both_dims() -> None:
    for shape in ((2, 2, 2), (3, 2)):
        check(lambda x: x.diagonal(-1), values(7, 6), meshes=[shape], partial=())


@pytest.mark.parametrize("start, end, step", [(1, 5, 1), (0, 7, 3), (-3, None, 1), (6, 6, 1), (None, None, 1)])
def test_slice_scatter(start: int | None, end: int | None, step: int) -> None:
    count = len(range(*slice(start, end, step).indices(7)))
    check(lambda x, y: x.slice_scatter(y, 0, start, end, step), values(7, 4), values(count, 4, seed=1), grad=True, limit=40)


def test_select_scatter() -> None:
    check(lambda x, y: x.select_scatter(y, 0, -2), values(5, 4), values(4, seed=1), grad=True)
    check(lambda x, y: x.select_scatter(y, 1, 0), values(5, 4), values(5, seed=1))


@pytest.mark.parametrize("offset", [-2, 0, 3])
def test_diagonal_scatter(offset: int) -> None:
    x = values(5, 6)
    check(lambda x, y: x.diagonal_scatter(y, offset), x, x.diagonal(offset) + 1, grad=True, limit=40)


def test_diag_embed() -> None:
    check(lambda x: (x.diag_embed(), x.diag_embed(-2, 0, 1), torch.diag(x[0], 1)), values(4, 5), grad=True)
    stays(lambda x: x.diag_embed(), values(4, 5), mesh=(2,), placements=[[S(1)]])


def test_integers_and_bools() -> None:
    check(lambda x: (x[1:4], x[2], x.diagonal()), values(5, 6, dtype=torch.int32))
    check(lambda x: (x[1:4], x[2], x.diagonal()), values(5, 6) > 0)


def test_slices_of_split_dims_move_nothing() -> None:
    x = values(8, 6)
    for mesh, placements in (
        ((2,), [S(0)]),
        ((3,), [S(0, (0, 5, 3))]),
        ((2, 2), [S(0), S(0)]),
        ((2, 2), [S(1), S(0)]),
        ((2,), [Partial()]),
    ):
        stays(lambda x: (x[3:7], x[::3], x[1:2, 2:], x.diagonal(1), x.narrow(0, 4, 2)), x, mesh=mesh, placements=[placements])
    y = stays(lambda x: x[3:7], x, mesh=(2,), placements=[[S(0)]])
    assert y.placements == (S(0, (1, 3)),)


def test_scattered_slices_move_nothing() -> None:
    stays(lambda x, y: x.slice_scatter(y, 0, 2, 7), values(8, 6), values(5, 6), mesh=(2,), placements=[[S(0)], [R]])
    stays(lambda x, y: x.select_scatter(y, 0, 5), values(8, 6), values(6), mesh=(2, 2), placements=[[S(0), S(1)], [R, S(0)]])
    stays(lambda x, y: x.diagonal_scatter(y), values(6, 6), values(6), mesh=(2,), placements=[[S(1)], [S(0)]])


def test_gradients_of_slices_come_back_as_the_input_lies() -> None:
    for at in (slice(2, 6), slice(0, 2), slice(1, 8, 3), slice(7, 8)):
        mesh = dtorch.init_device_mesh("cpu", (2, 2))
        x = place(values(8, 6), mesh, (S(0), S(0))).requires_grad_()
        with torch.no_grad():
            weight = x[at].detach().clone()
        (g,) = without_communication(lambda x=x, at=at, weight=weight: torch.autograd.grad((x[at] * weight).sum(), x))
        assert g.placements == x.placements


def test_a_selected_row_is_sent_and_not_the_tensor() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    x = place(values(16, 8), mesh, (S(0),))
    with dtorch.explain() as report:
        x[9]
    assert report.nbytes == 3 * 8 * 4 and not report.replicated


def test_complex_views() -> None:
    z = torch.complex(values(4, 3), values(4, 3, seed=1))
    check(lambda z: torch.view_as_complex(torch.view_as_real(z) * 2), z)
    check(lambda x: torch.view_as_complex(x), values(4, 3, 2), grad=False)
    stays(lambda z: torch.view_as_real(z), z, mesh=(2, 2), placements=[[S(0), S(1)]])


@pytest.mark.parametrize("shape", MESHES)
def test_slices_alias(shape: tuple[int, ...]) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[1:4].mul_(2)
        z[::3, 1:] += 1
        z[2:][1:2].zero_()
        z[4] = 7
        z[0, 3] = -1
        z.diagonal(1)[1:].fill_(5)
        z.select(1, 2).neg_()
        return z

    check(write, values(6, 5), meshes=[shape], partial=())
