"""The loss of a language model from its last hidden states, in chunks: as without, whatever is split, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtorch
from dtorch import Replicate, Shard, explain, init_device_mesh
from tests.sharding.harness import check, place, values

pytestmark = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="a newer PyTorch has it")
TARGET = torch.tensor([1, 6, -100, 0, 3, -100, 5])
R = Replicate()


def loss(x: Tensor, w: Tensor, target: Tensor, bias: Any = None, classes: Any = None, **options: Any) -> Tensor:
    return F.linear_cross_entropy(
        x, w, target, linear_bias=bias, weight=classes, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2), **options
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients(reduction: str) -> None:
    check(lambda x, w, t: loss(x, w, t, reduction=reduction), values(7, 4), values(8, 4, seed=1), TARGET, grad=True, limit=25)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bias_and_weights_of_classes(reduction: str) -> None:
    classes = torch.rand(8) + 0.5

    def fn(x: Tensor, w: Tensor, t: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return loss(x, w, t, b, c.detach(), reduction=reduction)

    check(fn, values(7, 4), values(8, 4, seed=1), TARGET, values(8, seed=2), classes, grad=True, limit=20)


@pytest.mark.parametrize("ignored", [3, -1, 100])
def test_what_is_ignored(ignored: int) -> None:
    target = torch.where(TARGET == -100, ignored, TARGET)
    check(lambda x, w, t: loss(x, w, t, ignore_index=ignored), values(7, 4), values(8, 4, seed=1), target, grad=True, limit=12)


def test_all_ignored_or_none_of_a_piece() -> None:
    for target in (torch.full((7,), -100), torch.tensor([-100, -100, -100, -100, -100, -100, 2])):
        check(loss, values(7, 4), values(8, 4, seed=1), target, grad=True, limit=12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, reduction: str) -> None:
    x, w = values(7, 4, dtype=dtype), values(8, 4, seed=1, dtype=dtype)
    check(lambda x, w, t: loss(x, w, t, reduction=reduction), x, w, TARGET, grad=True, limit=8, rtol=0.03, atol=0.03)


def test_without_gradients_of_all() -> None:
    for wanted in ((True, False), (False, True), (False, False)):

        def fn(x: Tensor, w: Tensor, t: Tensor, wanted: tuple[bool, bool] = wanted) -> Tensor:
            return loss(*[v if keep else v.detach() for v, keep in zip((x, w), wanted, strict=True)], t)

        check(fn, values(7, 4), values(8, 4, seed=1), TARGET, grad=any(wanted), limit=8)


def test_one_row() -> None:
    check(lambda x, w, t: loss(x, w, t), values(4), values(8, 4, seed=1), torch.tensor(3), grad=True, limit=20)


def test_a_wrong_class_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for x, w in ((Shard(0), R), (R, Shard(0))):
        with pytest.raises(dtorch.RemoteError):
            loss(place(values(3, 4), mesh, (x,)), place(values(8, 4), mesh, (w,)), torch.tensor([1, 8, 2])).to_torch()


def test_a_split_batch_moves_no_logits() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    x, w = (place(t, mesh, (p,)) for t, p in ((values(64, 16), Shard(0)), (values(32, 16, seed=1), R)))
    x.requires_grad_(), w.requires_grad_()
    target = place(torch.arange(64) % 32, mesh, (Shard(0),))
    with explain() as report:
        loss(x, w, target).backward()
    kinds = [(e.comm.kind, e.comm.nbytes) for e in report.events]
    assert ("all_reduce", 4 * 2 * 3) in kinds and not report.replicated
    assert all(kind in ("all_reduce", "reduce_scatter") for kind, _ in kinds)
    assert report.nbytes < 3 * w.nbytes * 4
