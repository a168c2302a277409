"""Running sums, products and maxima over placements of the input, also split along the scanned dim."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Shard
from tests.sharding.harness import check, not_replicated, place, stays, values

S = Shard
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_scans(name: str, dim: int) -> None:
    check(lambda x: getattr(x, name)(dim), values(7, 4), grad=True, limit=30)


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_other_dtypes(name: str) -> None:
    check(lambda x: getattr(x, name)(0), values(5, 4, dtype=torch.int32) % 3, limit=20)
    check(lambda x: getattr(x, name)(0), values(5, 4) > 0, limit=20)
    check(lambda x: getattr(x, name)(0, dtype=torch.float64), values(5, 4), limit=20)
    check(lambda x: getattr(x, name)(0), values(5, 4, dtype=torch.bfloat16), limit=20, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_ties_and_nan(name: str) -> None:
    x = torch.tensor([1.0, 1.0, NAN, 3.0, 3.0, 2.0, NAN, 3.0, -INF, INF])
    check(lambda x: getattr(x, name)(0), x, partial=())
    check(lambda x: getattr(x, name)(0), x[3:6].repeat(3), partial=())
    check(lambda x: getattr(x, name)(0), values(9, dtype=torch.int64) % 3)


def test_logcumsumexp_of_infinities() -> None:
    check(lambda x: x.logcumsumexp(0), torch.tensor([-INF, -INF, 1.0, -INF, 2.0, INF, 3.0]), partial=())


def test_nothing_to_scan() -> None:
    check(lambda x: (x.cumsum(0), x.cummax(1)), values(0, 3))
    check(lambda x: (x.cumsum(0), x.cummax(0)), values())


def test_in_place() -> None:
    check(lambda x: x.clone().cumsum_(0).cumprod_(1), values(5, 4), partial=(), limit=20)


def test_only_one_number_per_piece_and_row_moves() -> None:
    x = place(values(64, 8), dtorch.init_device_mesh("cpu", (4,)), (S(0),))
    y = not_replicated(lambda x: x.cumsum(0), x, at_most_nbytes=3 * 4 * 8 * 4)
    assert y.placements == x.placements
    stays(lambda x: (x.cumsum(0), x.cumprod(0), x.cummax(0)), values(6, 8), mesh=(2,), placements=[[S(1)]])
    stays(lambda x: x.cumsum(0), values(6, 8), mesh=(2,), placements=[[Partial()]])
