"""Negative log likelihood and cross entropy against plain torch: weights, ignored targets, split classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import RemoteError, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, values

REDUCTIONS = ["none", "mean", "sum"]
TARGET = torch.tensor([0, 9, 3, -100, 5, 7, 3])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction):
    check(lambda x, t: F.nll_loss(x, t, reduction=reduction), values(7, 10), TARGET, grad=True, limit=15)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_with_weights(reduction):
    x, w = values(7, 10), values(10, seed=1).abs() + 0.125
    check(
        lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction=reduction, ignore_index=3),
        x,
        TARGET.relu(),
        w,
        grad=True,
        limit=15,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_target(reduction):
    w = values(10, seed=1).abs() + 0.125
    check(lambda x, t: F.nll_loss(x, t, reduction=reduction), values(10), torch.tensor(7), grad=True)
    check(lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction=reduction), values(10), torch.tensor(7), w, grad=True, limit=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_images(reduction):
    target = torch.arange(12).view(2, 2, 3) % 5
    target[0, 1, 2] = -100
    x, w = values(2, 5, 2, 3), values(5, seed=1).abs() + 0.125
    check(lambda x, t: F.nll_loss(x, t, reduction=reduction), x, target, grad=True, limit=12)
    check(lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction=reduction), x, target, w, grad=True, limit=7)
    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x[:, :, 0], target[:, 0], grad=True, limit=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_target_ignored(reduction):
    check(lambda x, t: F.nll_loss(x, t, reduction=reduction), values(7, 10), torch.full((7,), -100), grad=True, limit=15)


def test_no_targets():
    empty = torch.empty(0, dtype=torch.long)
    check(lambda x, t: F.nll_loss(x, t), values(0, 10), empty, grad=True, limit=15)


def test_small_unsigned_targets():
    target = torch.tensor([0, 200, 99, 255, 255], dtype=torch.uint8)
    check(lambda x, t: F.nll_loss(x, t, ignore_index=255), values(5, 250), target, grad=True, limit=15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy(reduction, smoothing):
    def fn(x, t, w=None):
        return F.cross_entropy(x, t, w, reduction=reduction, label_smoothing=smoothing)

    check(fn, values(7, 10), TARGET, grad=True, limit=7)
    check(fn, values(7, 10), TARGET, values(10, seed=1).abs() + 0.125, limit=7, rule=False)


def test_cross_entropy_of_probabilities():
    probabilities = values(7, 10, seed=1).softmax(-1)
    check(lambda x, p: F.cross_entropy(x, p), values(7, 10), probabilities, grad=True, limit=7)
    check(lambda x, p: F.cross_entropy(x, p, label_smoothing=0.1), values(7, 10), probabilities, grad=True, limit=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cross_entropy_dtypes(dtype):
    check(
        lambda x, t: F.cross_entropy(x, t),
        values(7, 10, dtype=dtype),
        TARGET,
        grad=True,
        limit=7,
        partial=(),
        rtol=2e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize("wrong", [-1, 10, 100])
def test_a_target_that_is_no_class_is_an_error(wrong):
    mesh = init_device_mesh("cpu", (2, 2))
    x = place(values(2, 10), mesh, (Replicate(), Shard(1)))
    with pytest.raises(RemoteError, match="out of bounds"):
        F.nll_loss(x, torch.tensor([0, wrong])).to_torch()


def test_split_logits_are_not_gathered():
    mesh = init_device_mesh("cpu", (2, 2))
    x = place(values(8, 1000), mesh, (Shard(0), Shard(1))).requires_grad_()
    target = dtorch.Tensor(torch.arange(8) * 120, device_mesh=mesh, placements=[Shard(0), Replicate()])

    def step():
        loss = F.cross_entropy(x, target)
        return torch.autograd.grad(loss, x)[0]

    grad = not_replicated(step, at_most_nbytes=8 * 4 * 20)
    assert grad.placements == x.placements


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(1), Replicate())])
def test_half_precision_means_do_not_overflow(placements, weighted):
    """As on CUDA; the CPU's own kernel adds up in half precision."""
    mesh = init_device_mesh("cpu", (3,))
    x = torch.full((3000, 10), -40.0).half()
    target = (torch.arange(3000) % 10).where(torch.arange(3000) % 7 != 0, -100)
    weight = values(10, seed=1).abs().half() + 0.5 if weighted else None
    placed = [place(t, mesh, (p,)) for t, p in zip((x, target), placements, strict=True)]
    loss = F.nll_loss(*placed, weight if weight is None else place(weight, mesh, (Replicate(),)))
    torch.testing.assert_close(loss.to_torch(), torch.tensor(40.0).half())


def test_linear_cross_entropy():
    x, w = values(7, 4), values(10, 4, seed=1)
    check(lambda x, w, t: F.linear_cross_entropy(x, w, t), x, w, TARGET, grad=True, limit=10)
