"""Reading and writing by number, over placements of the tensor, of the numbers and of what is written."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.sharding.harness import check, not_replicated, place, stays, values

R, S = Replicate(), Shard
PUT = torch.ops.aten.index_put.default


def numbers(*shape: int, below: int, seed: int = 3, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = values(6, 5)


def test_index_of_one_dim() -> None:
    check(lambda x, i: x[i], X, numbers(4, below=6), grad=True)
    check(lambda x, i: (x[:, i], x[i - 5], x[i.view(2, 2)]), X, numbers(4, below=5), limit=30)


def test_index_of_several_dims() -> None:
    i, j = numbers(3, 1, below=6), numbers(4, below=5, seed=4)
    check(lambda x, i, j: x[i, j], X, i, j, grad=True, limit=40)
    check(lambda x, i, j: (x[i, :, j], x[:, i, j], x[i.squeeze(-1), None]), values(6, 6, 5), i, j, limit=40)
    check(lambda x, i: x[:, :, i], values(2, 3, 6), i, limit=25)


def test_index_by_int32_and_of_integers() -> None:
    check(lambda x, i: x[i], X, numbers(4, below=6, dtype=torch.int32), limit=20)
    check(lambda x, i: (x[i], x[:, i]), values(6, 5, dtype=torch.int64), numbers(4, below=5), limit=25)
    check(lambda x, i: x[i], X > 0, numbers(4, below=6), limit=25)


def test_index_by_mask_is_read() -> None:
    check(lambda x: (x[x > 0], x.masked_select(x < 0), x[x[:, 0] > 0]), X, rule=False, limit=20)


def test_a_wrong_number_is_an_error() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x = place(X, mesh, (S(0),))
    for bad in (6, -7):
        with pytest.raises(dtorch.RemoteError, match="out of range"):
            x[torch.tensor([bad])].to_torch()
    for bad in (6, -1):
        with pytest.raises(dtorch.RemoteError, match="out of range"):
            x.index_select(0, torch.tensor([bad])).to_torch()
        with pytest.raises(dtorch.RemoteError, match="out of range"):
            x.scatter(0, torch.tensor([[bad]]), 1.0).to_torch()


def test_index_select() -> None:
    for dim in (0, -1):
        check(lambda x, i, dim=dim: x.index_select(dim, i), X, numbers(4, below=5), grad=True)
    check(lambda x: x.index_select(1, torch.tensor(2)), X)


def test_take_along_dim_take_and_put() -> None:
    check(
        lambda x: (x.take_along_dim(x.argsort(1), 1), torch.take(x, torch.tensor([0, 29, 7]))),
        values(6, 5, distinct=True),
        limit=25,
    )
    check(lambda x: x.put(torch.tensor([0, 29, 7]), torch.tensor([1.0, 2.0, 3.0])), X, limit=20)


@pytest.mark.parametrize("shape, dim", [((6, 3), 1), ((6, 5), 0), ((4, 5), 1), ((3, 2), 0), ((7, 5), 0)])
def test_gather(shape: tuple[int, int], dim: int) -> None:
    check(lambda x, i: x.gather(dim, i), X, numbers(*shape, below=5), grad=True)


@pytest.mark.parametrize(
    "shape, source, dim",
    [((6, 5), (6, 5), 0), ((6, 3), (6, 5), 1), ((3, 5), (4, 6), 0), ((4, 2), (9, 2), 1), ((0, 5), (0, 5), 0)],
)
def test_scatter(shape: tuple[int, int], source: tuple[int, int], dim: int) -> None:
    # Each place is written once, so that the order of writes does not matter.
    index = torch.argsort(torch.rand(X.shape, generator=torch.Generator().manual_seed(1)), dim)[: shape[0], : shape[1]]
    check(lambda x, i, y: x.scatter(dim, i, y), X, index, values(*source, seed=5), grad=shape == source, limit=40)
    check(lambda x, i: (x.scatter(dim, i, 2.5), x.scatter(dim, i, 2.0, reduce="multiply")), X, index, limit=30)


@pytest.mark.filterwarnings("ignore:The reduce argument:UserWarning")
@pytest.mark.parametrize("shape, source, dim", [((6, 5), (6, 5), 0), ((6, 7), (6, 7), 1), ((3, 4), (4, 5), 0)])
def test_scatter_add(shape: tuple[int, int], source: tuple[int, int], dim: int) -> None:
    index = numbers(*shape, below=5)
    check(lambda x, i, y: x.scatter_add(dim, i, y), X, index, values(*source, seed=5), grad=shape == source, limit=40)
    check(lambda x, i, y: x.scatter(dim, i, y, reduce="add"), X, index, values(*source, seed=5), limit=25)


@pytest.mark.parametrize("reduce", ["sum", "amax", "amin", "mean", "prod"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    index, y = numbers(4, 5, below=6), values(4, 5, seed=5)
    check(lambda x, i, y: x.scatter_reduce(0, i, y, reduce, include_self=include_self), X, index, y, limit=30)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate: bool) -> None:
    i = torch.tensor([0, 4, 3]) if not accumulate else torch.tensor([0, 4, 4])
    check(lambda x, i, y: x.index_put((i,), y, accumulate), X, i, values(3, 5, seed=5), grad=True, limit=40)
    check(lambda x, i, y: x.index_put((i - 6, i[:1]), y, accumulate), X, i, values(3, seed=5), limit=30)
    check(lambda x, i, y: PUT(x, [None, i], y, accumulate), X, i, values(1, seed=5), limit=30)
    check(lambda x, i, y: PUT(x, [i, None, i], y, accumulate), values(6, 2, 6), i, values(3, 2, seed=5), limit=30)


def test_index_put_by_mask() -> None:
    m = X > 0
    check(lambda x, m, y: (x.index_put((m,), y), x.index_put((m,), y, True)), X, m, values(seed=5), limit=30)
    check(lambda x, m, y: x.index_put((m[:, 0],), y), X, m, values(5, seed=5), limit=30)
    check(lambda x, m, y: x.index_put((m[:, 0],), y), X, m, values(int(m[:, 0].sum()), 5, seed=5), limit=25)
    check(lambda x, m, y: PUT(x, [None, m[0]], y), X, m, values(6, 1, seed=5), limit=25)
    check(lambda x, m, y: x.masked_scatter(m, y), X, m, values(40, seed=5), limit=25)


@pytest.mark.parametrize("dim", [0, 1])
def test_index_add_copy_fill(dim: int) -> None:
    y = values(*((4, 5) if dim == 0 else (6, 4)), seed=5)
    check(
        lambda x, i, y: (x.index_add(dim, i, y, alpha=2), x.index_add(dim, i, y)), X, numbers(4, below=5), y, grad=True, limit=40
    )
    once = torch.tensor([4, 0, 2, 1])
    check(lambda x, i, y: x.index_copy(dim, i, y), X, once, y, grad=True, limit=40)
    check(lambda x, i, y: (x.index_fill(dim, i, 2.5), x.index_fill(dim, i - 5, y[0, 0])), X, once, y, limit=30)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_index_reduce() -> None:
    check(lambda x, i, y: x.index_reduce(0, i, y, "amax"), X, numbers(4, below=6), values(4, 5, seed=5), limit=25)


def test_writing_in_place() -> None:
    def write(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[i] = y
        z[i, 1] += 2
        z[z < -1] = 0
        z.index_add_(0, i, y)
        z.scatter_(0, i[None, :3], 7)
        z.scatter_add_(0, i[None, :2], y[:1, :2])
        z.index_fill_(0, i[:1], -3)
        z.index_copy_(0, i[1:2], y[:1])
        z.index_put_((i[:2], i[:2]), y[0, 0], accumulate=True)
        return z

    check(write, X, torch.tensor([4, 0, 2, 1]), values(4, 5, seed=5), limit=25)


def test_in_place_writing_keeps_the_placement() -> None:
    mesh = dtorch.init_device_mesh("cpu", (3,))
    for placement in (S(0), S(1), S(0, (0, 5, 1)), R):
        x = place(X, mesh, (placement,))
        y = x.scatter_add_(0, numbers(4, 5, below=6), place(values(4, 5), mesh, (S(0),)))
        assert y is x and x.placements == (placement,)


@pytest.mark.parametrize("diagonal", [-4, -1, 0, 2, 7])
def test_triangles(diagonal: int) -> None:
    check(lambda x: (x.tril(diagonal), x.triu(diagonal)), values(6, 5), partial=("sum", "avg"))
    check(lambda x: x.tril(diagonal), values(2, 4, 3), grad=True, limit=25)


def test_triangles_and_batched_lookups_move_nothing() -> None:
    stays(lambda x: (x.tril(), x.triu(2)), values(8, 8), mesh=(2, 2), placements=[[S(0), S(1)]])
    stays(lambda x, i: x.gather(1, i), X, numbers(6, 2, below=5), mesh=(2,), placements=[[S(0)], [S(0)]])
    stays(lambda x, i: x[i], X, numbers(4, below=6), mesh=(2, 2), placements=[[R, S(1)], [S(0), R]])
    stays(
        lambda x, i, y: x.scatter_add(0, i, y), X, numbers(4, 5, below=6), values(4, 5), mesh=(2,), placements=[[S(0)], [R], [R]]
    )
    stays(lambda x, i, y: x.index_add(0, i, y), X, numbers(4, below=6), values(4, 5), mesh=(2,), placements=[[R], [S(0)], [S(0)]])


def test_lookup_in_a_split_dim_sends_what_is_found_and_not_the_tensor() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    x, i = place(values(1000, 8), mesh, (S(0),)), place(numbers(5, below=1000), mesh, (R,))
    y = not_replicated(lambda x, i: x[i], x, i, at_most_nbytes=0)
    assert y.placements == (Partial(),)


def test_one_hot() -> None:
    check(lambda i: torch.nn.functional.one_hot(i, 7), numbers(6, below=7))
