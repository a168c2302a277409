"""Distances, products of three and counts by value, and what else stays split by a small table of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch import Replicate, Shard
from tests.sharding.harness import check, stays, values

F = torch.nn.functional
aten = torch.ops.aten
INDICES = torch.tensor([0, 3, 2, 2, 4])
OFFSETS = torch.tensor([0, 2, 2])
SAMPLES = (values(2, 3, 2).abs() / 3).clamp(0.05, 0.95)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], bool]] = {
    "cdist": (torch.cdist, (values(5, 3), values(4, 3, seed=1) + 0.03), True),
    "cdist by product": (torch.cdist, (values(30, 3), values(4, 3, seed=1) + 0.03), False),
    "cdist of a batch": (lambda a, b: torch.cdist(a, b, 1.0), (values(2, 5, 3), values(1, 4, 3, seed=1) + 0.03), True),
    "cdist of stretched batches": (
        lambda a, b: torch.cdist(a, b, 1.0),
        (values(1, 2, 3), values(2, 1, 2, 3, seed=1) + 0.03),
        True,
    ),
    "bilinear": (F.bilinear, (values(5, 3), values(5, 4), values(2, 3, 4), values(2)), True),
    "histc": (lambda x: torch.histc(x, 6, -1.5, 1.5), (values(5, 3),), False),
    "histc between extremes": (lambda x: torch.histc(x, 6), (values(5, 3),), False),
    "histogram": (lambda x: torch.histogram(x, 6, range=(-1.5, 1.5)), (values(5, 3),), False),
    "histogram of density": (lambda x: torch.histogram(x, 6, range=(-1.5, 1.5), density=True), (values(5, 3),), False),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (values(2, 12, 3, 2),), True),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (values(2, 3, 6, 4),), True),
    "unfold": (lambda x: F.unfold(x, (2, 3)), (values(2, 3, 4, 5),), True),
    "unfold without a batch": (lambda x: F.unfold(x, 2), (values(3, 4, 5),), True),
    "fractional pooling": (
        lambda x, s: F.fractional_max_pool2d(x, 2, 3, _random_samples=s.detach()),
        (values(2, 3, 7, 8, distinct=True), SAMPLES),
        True,
    ),
    "hardshrink": (F.hardshrink, (values(5, 3),), True),
    "softshrink": (F.softshrink, (values(5, 3),), True),
    "mish": (F.mish, (values(5, 3),), True),
    "logsigmoid": (F.logsigmoid, (values(5, 3),), True),
    "floor_divide in place": (lambda a, b: a.clone().floor_divide_(b), (values(5, 3), values(5, 3, seed=1) + 0.03), False),
    "addbmm": (torch.addbmm, (values(4, 5), values(3, 4, 2), values(3, 2, 5)), True),
    "addbmm scaled": (
        lambda c, a, b: torch.addbmm(c, a, b, beta=2, alpha=3),
        (values(5), values(3, 4, 2), values(3, 2, 5)),
        True,
    ),
    "addr": (torch.addr, (values(4, 5), values(4), values(5)), True),
    "addr in place": (lambda c, a, b: c.clone().addr_(a, b, beta=2, alpha=3), (values(4, 5), values(4), values(5)), False),
    "unbind_copy": (lambda x: torch.unbind_copy(x, 1), (values(5, 3),), False),
    "allclose": (lambda a, b: torch.allclose(a, b), (values(5, 3), values(5, 3)), False),
    "histogramdd": (lambda x: torch.histogramdd(x, [2, 3]), (values(6, 2),), False),
}
WHOLE = {"histogramdd"}


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    fn, inputs, grad = PROGRAMS[name]
    partial = () if name in ("cdist", "cdist by product", "allclose", "histc") else ("sum",)
    check(fn, *inputs, grad=grad, rule=name not in WHOLE, limit=20, partial=partial, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    def bags(table: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(numbers, table, offsets, mode=mode)

    check(bags, values(5, 4), INDICES, OFFSETS, grad=True, limit=20)
    check(bags, values(5, 4).double(), INDICES, OFFSETS, limit=10)
    stays(bags, values(5, 4), INDICES, OFFSETS, mesh=(2,), placements=[[Shard(1)], *[[Replicate()]] * 2])


def test_weighted_bags() -> None:
    def bags(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(INDICES, table, OFFSETS, mode="sum", per_sample_weights=weights)

    check(bags, values(5, 4), values(5, seed=2), grad=True, limit=20)


def test_split_rows_and_images_stay_where_they_are() -> None:
    stays(torch.cdist, values(30, 3), values(4, 3), mesh=(3,), placements=[[Shard(0)], [Replicate()]])
    stays(lambda x: F.pixel_shuffle(x, 2), values(2, 12, 3, 2), mesh=(3,), placements=[[Shard(1)]])
    stays(lambda x: F.unfold(x, 2), values(2, 3, 4, 5), mesh=(2,), placements=[[Shard(0)]])
    stays(lambda x: torch.histc(x, 4, -1, 1), values(5, 3), mesh=(3,), placements=[[Shard(0)]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_by_its_newer_name(dtype: torch.dtype) -> None:
    def normalised(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        mean, var = mean.clone(), var.clone()
        out = aten._batch_norm_with_update.default(x, None, None, mean, var, 0.1, 1e-5)
        return out, mean, var

    x = values(4, 3, 5).to(dtype)
    check(normalised, x, values(3).to(dtype), values(3).to(dtype).abs(), limit=15, partial=(), rtol=3e-2, atol=3e-2)
