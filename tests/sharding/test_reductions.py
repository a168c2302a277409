"""Reductions over all dims, some dims and no dims; over even, uneven and empty pieces; of every kind of partial."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.sharding.harness import check, not_replicated, place, stays, values

R, S = Replicate(), Shard
NAN, INF = float("nan"), float("inf")
EVERY = ("sum", "avg", "max", "min", "prod")
X = values(6, 5)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "nansum", "prod", "count_nonzero", "any", "all"])
def test_reductions(name: str) -> None:
    def reduce(x: torch.Tensor) -> tuple:
        fn = getattr(torch, name)
        more = () if name in ("count_nonzero",) else (fn(x, 1, keepdim=True),)
        every = () if name in ("amax", "amin") else (fn(x),)
        return (fn(x, 0), *more, *every) if name == "prod" else (fn(x, 0), *more, *every, fn(x, (-1, 0)), fn(x, dim=()))

    check(reduce, X, grad=name not in ("count_nonzero", "any", "all"), partial=EVERY, limit=40)


@pytest.mark.parametrize("name", ["max", "min", "aminmax"])
def test_extremes(name: str) -> None:
    check(lambda x: getattr(torch, name)(x), X, grad=True, partial=EVERY, limit=25)
    if name == "aminmax":
        check(lambda x: (x.aminmax(dim=0), x.aminmax(dim=1, keepdim=True), x.aminmax(keepdim=True)), X, limit=25)


def test_of_three_dims() -> None:
    check(lambda x: (x.sum((0, 2)), x.mean((1, 2), keepdim=True), x.amax((0, 1)), x.var((0, 2))), values(4, 3, 5), limit=30)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = values(5, 4).abs().to(dtype)
    names = ["sum", "prod", "count_nonzero", "any", "all", "amax", "amin"]
    check(lambda x: [getattr(torch, n)(x, 0) for n in names], x, limit=20, rtol=2e-2, atol=2e-2)
    check(lambda x: (x.sum(dtype=torch.float64), x.prod(0, dtype=torch.float32), x.max(), x.min()), x, limit=20)


def test_nan_and_infinity() -> None:
    x = torch.tensor([[1.0, NAN, INF, 2.0], [3.0, 1.0, -INF, 0.0], [NAN, 1.0, INF, 5.0]])
    check(
        lambda x: [getattr(torch, n)(x, 0) for n in ("amax", "amin", "nansum", "sum", "logsumexp", "any", "count_nonzero")],
        x,
        partial=(),
    )
    check(lambda x: [torch.linalg.vector_norm(x, p, 0) for p in (0, 1, 2, INF, -INF)], x, partial=(), limit=20)


def test_a_mean_of_half_precision_has_room() -> None:
    check(lambda x: (x.mean(), x.mean(0)), torch.full((2000, 2), 100.0, dtype=torch.float16), partial=(), limit=20)


def test_nothing_to_reduce() -> None:
    check(lambda x: (x.sum(0), x.sum(1), x.prod(0), x.any(0), x.all(), x.mean(1), x.amax(1)), values(0, 3))
    check(lambda x: (x.sum(), x.mean(), x.amax(()), x.norm(), x.any()), values())


@pytest.mark.parametrize("correction", [-5, 0, 1, 2.5])
def test_variance(correction: float) -> None:
    def spread(x: torch.Tensor) -> list:
        fns = (torch.var, torch.std, torch.var_mean, torch.std_mean)
        return [
            fn(x, dim, correction=correction, keepdim=keep) for fn in fns for dim, keep in ((0, False), (1, True), (None, False))
        ]

    check(spread, X, grad=True, limit=20)


def test_variance_of_other_dtypes() -> None:
    check(lambda x: (x.var(0), x.std()), values(7, 3, dtype=torch.bfloat16), limit=20, rtol=2e-2, atol=2e-2)
    check(lambda x: (x.var(0), torch.std_mean(x, 1)), torch.complex(values(7, 3), values(7, 3, seed=1)), limit=20)


@pytest.mark.parametrize("order", [2, 1, 0, INF, -INF, 3, 0.5, -1, -2.5])
def test_norms(order: float) -> None:
    x = values(6, 5) + 0.0625
    vector_norm = torch.linalg.vector_norm
    check(
        lambda x: (vector_norm(x, order), vector_norm(x, order, 0), vector_norm(x, order, (0, 1), True)),
        x,
        grad=order >= 1,
        limit=25,
    )
    check(lambda x: vector_norm(x, order, -1), torch.complex(x, x + 1), limit=20)
    check(lambda x: vector_norm(x, order, 0), x.to(torch.bfloat16), limit=20, rtol=2e-2, atol=2e-2)
    check(lambda x: vector_norm(x, order, 0, dtype=torch.float64), x, limit=20)


def test_older_norms() -> None:
    aten = torch.ops.aten.norm
    check(
        lambda x: (
            x.norm(),
            x.norm(3, 0),
            aten.Scalar(x),
            aten.ScalarOpt_dim(x, 3, [0], True),
            aten.ScalarOpt_dtype(x, 2, dtype=torch.float64),
        ),
        X,
        limit=20,
    )


def test_logsumexp() -> None:
    check(lambda x: (x.logsumexp(0), x.logsumexp((0, 1)), x.logsumexp(1, True)), X, grad=True, limit=25)
    check(lambda x: x.logsumexp(0), torch.tensor([[-INF, 1.0], [-INF, INF], [-INF, 3.0]]), partial=())
    check(lambda x: x.logsumexp(0), values(5, 3, dtype=torch.int64), limit=20)
    check(lambda x: x.logsumexp(0), values(5, 3, dtype=torch.bfloat16), limit=20, rtol=2e-2, atol=2e-2)


def test_trace() -> None:
    check(lambda x: x.trace(), values(4, 5), grad=True)


def test_reducing_moves_nothing_until_it_is_needed() -> None:
    for placements in ([S(0)], [S(0, (6, 0))], [Partial()]):
        y = stays(lambda x: (x.sum(), x.mean(0), x.sum(1)), X, mesh=(2,), placements=[placements])
        assert y[0].placements == (Partial(),)
    y = stays(lambda x: (x.amax(), x.min(), x.amax(0)), X, mesh=(3,), placements=[[S(0, (0, 6, 0))]])
    assert y[0].placements == (Partial("max"),) and y[1].placements == (Partial("min"),)


def test_norm_and_variance_send_numbers_and_not_the_tensor() -> None:
    x = place(values(64, 8), dtorch.init_device_mesh("cpu", (4,)), (S(0),))
    not_replicated(lambda x: x.norm(), x, at_most_nbytes=6 * 4)
    not_replicated(lambda x: x.var(0), x, at_most_nbytes=2 * 6 * 8 * 4)
    not_replicated(lambda x: x.logsumexp(0), x, at_most_nbytes=2 * 6 * 8 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [0, 1, 2, 3, -2, INF, -INF])
def test_norms_of_dims_of_length_one(order: float, dtype: torch.dtype) -> None:
    def norms(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linalg.vector_norm(x, order, dims, kept) for dims in (0, 1, (0, 1), None) for kept in (False, True)]

    for shape in ((2, 1), (1, 5), (1, 1)):
        check(norms, values(*shape, seed=3).to(dtype), partial=(), limit=15, meshes=((2,), (4,), (2, 2)))


@pytest.mark.parametrize("p", [1, 3.5, float("inf")])
def test_renorm(p):
    for dim in (0, -1):
        check(lambda x, dim=dim: (x.renorm(p, dim, 1.5), x.clone().renorm_(p, dim, 0.5)), values(3, 5, 2), grad=True, limit=5)
    check(lambda x: x.renorm(p, 0, 1.5), values(5, 4, dtype=torch.bfloat16), limit=5, rtol=0.03, atol=0.03)
