"""Winners and order, over placements of the input, also split along the ranked dim; ties and NaN as in PyTorch."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Shard
from tests.sharding.harness import check, not_replicated, place, stays, values

S = Shard
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_winners_along_a_dim(dim: int, keepdim: bool) -> None:
    check(lambda x: (x.max(dim, keepdim), x.min(dim, keepdim)), values(7, 4), grad=True, limit=25)
    check(lambda x: (x.argmax(dim, keepdim), x.argmin(dim, keepdim)), values(7, 4), limit=25)


def test_winner_of_all() -> None:
    check(lambda x: (x.argmax(), x.argmin(), x.argmax(keepdim=True)), values(5, 4, 2) % 1, limit=30)
    check(lambda x: (x.argmax(), x.argmin()), values(5, 4, dtype=torch.int64) % 3, limit=20)


def test_ties_and_nan() -> None:
    x = torch.tensor([[1.0, 3.0, NAN, 3.0, 3.0, NAN], [1.0, 3.0, 2.0, 3.0, 3.0, -INF], [-INF] * 6])
    check(lambda x: (x.max(1), x.min(1), x.argmax(1), x.argmax(0), x.argmax(), x.argmin()), x, partial=(), limit=25)
    check(lambda x: (x[1:].max(1), x[1:].argmax(0), x[1:].argmax(), x[2].argmax()), x, partial=(), limit=25)


def test_other_dtypes() -> None:
    check(lambda x: (x.max(0), x.argmin(1)), values(5, 4, dtype=torch.int32), limit=20)
    check(lambda x: (x.max(0), x.min(1)), values(5, 4) > 0, limit=20)
    check(lambda x: (x.max(0), x.argmin(1)), values(5, 4, dtype=torch.bfloat16), limit=20)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_topk(k: int, dim: int) -> None:
    check(lambda x: (x.topk(k, dim), x.topk(k, dim, largest=False)), values(11, 4, distinct=True), grad=True, limit=25)


def test_sort_and_argsort() -> None:
    x = values(7, 4, distinct=True)
    check(lambda x: (x.sort(0), x.argsort(1, descending=True), x.sort(stable=True), x.msort()), x, grad=True, limit=20)


def test_middle() -> None:
    x = values(7, 4, distinct=True)
    check(lambda x: (x.median(0), x.kthvalue(2, 1), x.median(), x.nanmedian(1, True)), x, grad=True, limit=20)
    check(lambda x: x.mode(1), values(4, 7) % 1, limit=20)


def test_search() -> None:
    edges, x = torch.tensor([-1.0, 0.0, 0.5, 1.0]), values(5, 4)
    check(lambda e, x: (torch.bucketize(x, e), torch.searchsorted(e, x, right=True)), edges, x, limit=30)
    check(lambda e, x: torch.searchsorted(e, x, out_int32=True), values(5, 7).sort(1).values, x, limit=30)


def test_scalars_and_nothing() -> None:
    check(lambda x: (x.max(0), x.argmax(), x.topk(1), x.sort()), values())
    check(lambda x: (x.max(1), x.argmax(1), x.sort(0), x.topk(0, 0)), values(0, 3))


def test_only_winners_move() -> None:
    x = place(values(64, 4, distinct=True), dtorch.init_device_mesh("cpu", (4,)), (S(0),))
    row = 4 * (4 + 8)
    not_replicated(lambda x: x.argmax(0), x, at_most_nbytes=3 * 4 * row)
    not_replicated(lambda x: x.topk(2, 0), x, at_most_nbytes=3 * 4 * 2 * row)
    stays(lambda x: (x.argmax(0), x.topk(2, 0), x.sort(0)), values(6, 4, distinct=True), mesh=(2,), placements=[[S(1)]])
