"""New tensors in the shape of a given one: nothing moves, and local pieces have the right shape and order of strides."""

from __future__ import annotations

import torch

from dtorch import Partial, Replicate, Shard
from tests.sharding.harness import check, stays, values

R, S = Replicate(), Shard


def test_like() -> None:
    check(
        lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.5), torch.empty_like(x).fill_(1)), values(5, 4)
    )
    check(lambda x: (torch.zeros_like(x, dtype=torch.int64), torch.full_like(x, True, dtype=torch.bool)), values(5, 4))
    check(lambda x: torch.ones_like(x, memory_format=torch.channels_last), values(2, 3, 4, 5), limit=25)


def test_like_of_transposed() -> None:
    check(lambda x: torch.zeros_like(x.t()).t().view(-1), values(5, 4))


def test_a_fill_value_may_change() -> None:
    check(
        lambda x: [torch.full_like(x, v) for v in (1, 2, 2.5, True)] + [x.new_full((2, 3), v) for v in (3, 4.5)],
        values(5, 4),
        limit=20,
    )


def test_new() -> None:
    check(lambda x: (x.new_zeros(5, 4), x.new_ones(3), x.new_full((4, 5), 7), x.new_empty(()).fill_(2)), values(5, 4))
    check(lambda x: (x.new_zeros(x.shape, dtype=torch.int32), x.new_zeros(0, 4)), values(5, 4))


def test_new_empty_strided() -> None:
    for size, stride in (((5, 4), (4, 1)), ((5, 4), (1, 5)), ((5, 4), (8, 2)), ((3, 2), (2, 1))):
        check(lambda x, size=size, stride=stride: x.new_empty_strided(size, stride).fill_(3), values(5, 4), limit=20)


def test_partials_are_not_reduced() -> None:
    for placements in ([Partial()], [Partial("max")], [S(1)]):
        stays(
            lambda x: (torch.zeros_like(x), x.new_ones(x.shape), x.new_zeros(7)), values(5, 4), mesh=(3,), placements=[placements]
        )
    y = stays(torch.ones_like, values(5, 4), mesh=(2, 2), placements=[[Partial(), S(0)]])
    assert y.placements == (R, S(0))
