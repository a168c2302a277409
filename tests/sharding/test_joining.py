"""Joining, splitting, repeating and padding split tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.sharding.rules.joining import CROWDED
from tests.sharding.harness import check, not_replicated, place, same, stays, values

R, S = Replicate(), Shard


@pytest.mark.parametrize("dim", [0, -1])
def test_cat(dim: int) -> None:
    shapes = [(5, 4), (1, 4)] if dim == 0 else [(5, 4), (5, 3)]
    check(lambda *t: torch.cat(t, dim), *[values(*s, seed=i) for i, s in enumerate(shapes)], grad=True)


def test_cat_of_three_and_of_one() -> None:
    check(lambda *t: torch.cat(t), values(4, 2), values(2, 2, seed=1), values(5, 2, seed=2), limit=40)
    check(lambda x: torch.cat([x, x * 2, x[:, :1]], 1), values(4, 3), grad=True)
    check(lambda x: torch.cat([x]), values(4, 3))


def test_cat_of_empty_and_mixed_dtypes() -> None:
    check(lambda x, y: torch.cat([x, torch.empty(0), y, y[:0]]), values(4, 3), values(2, 3, seed=1), limit=25)
    check(lambda x, y: torch.cat([x, y]), values(4, 3), values(2, 3, dtype=torch.int64), limit=25)
    check(lambda x, y: torch.cat([x, y]), values(4, 3), values(2, 3, dtype=torch.float64), limit=25)
    check(lambda x, y: torch.cat([x, y]), values(3), values(0), limit=25)


def test_cat_of_every_partial_alike() -> None:
    for op in ("sum", "avg", "max", "min", "prod"):
        result = stays(
            lambda x, y: torch.cat([x, y]), values(4, 3), values(2, 3), mesh=(2,), placements=[[Partial(op)], [Partial(op)]]
        )
        assert result.placements == (Partial(op),)


def test_growing_along_a_whole_dim_is_free() -> None:
    cache, new = values(2, 4, 6, 3), values(2, 4, 1, 3)
    for placements in ([S(1)], [S(0)]):
        stays(lambda c, n: torch.cat([c, n], 2), cache, new, mesh=(2,), placements=[placements, placements])


def test_growing_along_a_split_dim_moves_only_what_is_new_until_a_piece_is_crowded() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    plain = values(40, 2)
    cache = place(plain, mesh, (S(0),))
    for step in range(12):
        row = values(1, 2, seed=step)
        plain = torch.cat([plain, row])
        with dtorch.explain() as report:
            cache = torch.cat([cache, place(row, mesh, (S(0),))])
        assert max(cache.local_shape((i,))[0] for i in range(4)) <= CROWDED * len(plain) / 4 + 1
        assert report.nbytes <= 2 * 4 or step > 2
    same(cache, plain, "after growing")


def test_joining_what_was_split_moves_nothing() -> None:
    for sizes in ([3, 5], [1, 2, 4, 1], [8]):
        stays(lambda x, sizes=sizes: torch.cat(x.split(sizes)), values(8, 3), mesh=(2, 2), placements=[[S(0), S(0)]])


def test_stack() -> None:
    check(
        lambda x, y: (torch.stack([x, y]), torch.stack([x, y], -1), torch.stack([y, x, y], 1)), values(4, 3), values(4, 3, seed=1)
    )
    check(lambda x, y: torch.stack([x, y], 1), values(4, 3), values(4, 3, seed=1), grad=True, limit=25)
    check(lambda x: torch.stack([x.sum(), x.mean()]), values(4, 3))


@pytest.mark.parametrize("sizes", [3, 1, 7, [2, 5], [0, 3, 4], [7]])
def test_split(sizes: int | list[int]) -> None:
    check(lambda x: x.split(sizes), values(7, 2), grad=True)


def test_chunk_unbind_and_tensor_split() -> None:
    check(
        lambda x: (x.chunk(3), x.chunk(2, 1), x.tensor_split(3), x.tensor_split((1, 4)), x.unbind(1)),
        values(7, 2),
        grad=True,
        limit=25,
    )
    check(lambda x: x.unbind(0), values(3, 4), grad=True)


def test_splitting_a_split_dim_moves_nothing_and_aliases() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z.split([1, 4, 2])[1].mul_(2)
        z.chunk(2, 1)[1].zero_()
        z.unbind(1)[0].add_(1)
        return z

    check(write, values(7, 4), partial=(), limit=25)
    stays(lambda x: x.split([1, 4, 2]), values(7, 4), mesh=(3,), placements=[[S(0)]])


def test_repeat_and_tile() -> None:
    check(lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2), x.repeat(1, 0), x.expand(2, 3, 4)), values(3, 4))
    check(lambda x: x.repeat(2, 1, 3), values(3, 4), grad=True)
    check(lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3, 0), x.repeat_interleave(2)), values(3, 4), grad=True)
    stays(lambda x: (x.repeat(3, 1), x.repeat_interleave(2, 1)), values(3, 4), mesh=(2,), placements=[[S(1)]])


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (-1,)])
def test_flip(dims: tuple[int, ...]) -> None:
    check(lambda x: x.flip(dims), values(5, 4), grad=True)


def test_flip_of_transposed() -> None:
    check(lambda x: (x.t().flip(0), x.t().contiguous().flip(0).view(-1)), values(5, 4), partial=())


@pytest.mark.parametrize("shifts, dims", [(1, 0), (-3, 0), (7, 1), ((2, -1), (0, 1)), ((1, 2), (0, 0)), (3, ())])
def test_roll(shifts: object, dims: object) -> None:
    check(lambda x: x.roll(shifts, dims), values(5, 4), grad=True)


def test_of_permuted() -> None:
    x = values(3, 4, 5)
    for order in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        check(lambda x, p=order: (x.permute(p).flip(0, 2), x.permute(p).roll(1, 0).view(-1)), x, limit=20)
        check(lambda x, p=order: (F.pad(x.permute(p), (1, 0, 0, 2)).view(-1), torch.cat([x.permute(p)] * 2, 1)), x, limit=20)


def test_flip_and_roll_move_each_element_at_most_once() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    x = place(values(16, 8), mesh, (S(0),))
    not_replicated(lambda x: x.flip(0), x, at_most_nbytes=16 * 8 * 4)
    not_replicated(lambda x: x.roll(1, 0), x, at_most_nbytes=4 * 8 * 4)


@pytest.mark.parametrize("size, step", [(3, 2), (2, 2), (1, 1), (5, 1), (7, 3), (2, 5)])
def test_windows(size: int, step: int) -> None:
    check(lambda x: x.unfold(0, size, step), values(7, 2))
    check(lambda x: x.unfold(1, size, step), values(2, 8), grad=True, limit=20)


def test_windows_fetch_only_what_reaches_over_a_cut() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    not_replicated(lambda x: x.unfold(0, 3, 1), place(values(16, 8), mesh, (S(0),)), at_most_nbytes=3 * 2 * 8 * 4)
    not_replicated(lambda x: x.unfold(0, 2, 2), place(values(16, 8), mesh, (S(0),)), at_most_nbytes=0)


@pytest.mark.parametrize("pad", [(1, 2), (0, 0, 2, 1), (-1, 0, 0, -2), (2, -1, -3, 4), (-2, -2), (0, 0), (0, 0, -6, 2)])
def test_constant_pad(pad: tuple[int, ...]) -> None:
    check(lambda x: (F.pad(x, pad), F.pad(x, pad, value=1.5)), values(6, 5), grad=True)


def test_padding_a_split_dim_moves_nothing() -> None:
    stays(
        lambda x: (F.pad(x, (0, 0, 1, 2), value=3), F.pad(x, (0, 1, -4, 0))), values(6, 5), mesh=(2, 2), placements=[[S(0), S(0)]]
    )
    stays(lambda x: F.pad(x, (1, -1)), values(6, 5), mesh=(2,), placements=[[Partial()]])
