"""Batch normalisation against plain torch: training and not, running statistics written in place, every dim split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, stays, values

_aten = torch.ops.aten


def inputs(*shape: int) -> list[torch.Tensor]:
    c = shape[1]
    return [values(*shape), values(c, seed=1), values(c, seed=2), values(c, seed=3), values(c, seed=4).abs() + 0.5]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 5), (2, 4, 3, 3)])
def test_every_placement(training, shape):
    def fn(x, w, b, mean, var):
        mean, var = mean.detach().clone(), var.detach().clone()
        out = F.batch_norm(x, mean, var, w, b, training, momentum=0.2)
        return out, mean, var

    check(fn, *inputs(*shape), grad=True, limit=10, rtol=1e-4, atol=1e-5)


def test_without_weights_or_statistics():
    check(lambda x: F.batch_norm(x, None, None, training=True), values(3, 4, 5), grad=True, limit=15, rtol=1e-4, atol=1e-5)
    check(lambda x: F.instance_norm(x), values(3, 4, 5), grad=True, limit=15, rtol=1e-4, atol=1e-5)


def test_dtypes():
    def fn(x, w, b, mean, var):
        mean, var = mean.detach().clone(), var.detach().clone()
        return F.batch_norm(x, mean, var, w, b, True), mean, var

    mixed = [t.to(torch.bfloat16) if i == 0 else t for i, t in enumerate(inputs(4, 4, 3))]
    check(fn, *mixed, grad=True, limit=6, partial=(), rtol=3e-2, atol=5e-2)
    check(fn, *[t.double() for t in inputs(4, 4, 3)], grad=True, limit=6)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True]])
def test_backward_gives_what_is_asked_for(train, mask):
    x, w, _, mean, var = inputs(3, 4, 5)
    saved = [x.mean((0, 2)), (x.var((0, 2), correction=0) + 1e-5).rsqrt()] if train else [torch.empty(0)] * 2

    def fn(g, x, w, mean, var, *saved):
        out = _aten.native_batch_norm_backward.default(g, x, w, mean, var, *saved, train, 1e-5, mask)
        return [t for t, wanted in zip(out, mask, strict=True) if wanted]

    check(fn, values(3, 4, 5, seed=5), x, w, mean, var, *saved, limit=10, rtol=1e-4, atol=1e-5)


def test_module_over_several_steps():
    def fn(x):
        torch.manual_seed(0)
        module = torch.nn.BatchNorm2d(4)
        for _ in range(3):
            module(x + 1)
        trained = [module.running_mean.clone(), module.running_var.clone(), module.num_batches_tracked.clone()]
        module.eval()
        return module(x), trained

    check(fn, values(3, 4, 2, 2), limit=10, rtol=1e-4, atol=1e-5)


def test_split_channels_stay():
    def fn(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, True)

    out = stays(fn, *inputs(3, 4, 5), mesh=(2,), placements=[[Shard(1)], *[[Shard(0)]] * 4])
    assert out.placements == (Shard(1),)


def test_a_split_batch_moves_only_sums():
    mesh = init_device_mesh("cpu", (2,))
    x, w, b, mean, var = inputs(64, 4, 8)
    vectors = [place(t, mesh, (Replicate(),)) for t in (mean, var, w, b)]
    x = place(x, mesh, (Shard(0),))
    out = not_replicated(lambda: F.batch_norm(x, *vectors, True), at_most_nbytes=2 * 4 * 4 * 2)
    assert out.placements == (Shard(0),)
    assert not_replicated(lambda: F.batch_norm(x, *vectors, False), at_most_nbytes=0).placements == (Shard(0),)


def test_a_split_batch_s_gradients_move_only_sums():
    mesh = init_device_mesh("cpu", (2,))
    x, w, b, mean, var = inputs(64, 4, 8)
    x, w, b = (
        place(x, mesh, (Shard(0),)).requires_grad_(),
        place(w, mesh, (Replicate(),)).requires_grad_(),
        place(b, mesh, (Replicate(),)).requires_grad_(),
    )
    out = F.batch_norm(x, place(mean, mesh, (Replicate(),)), place(var, mesh, (Replicate(),)), w, b, True)
    grads = not_replicated(lambda: torch.autograd.grad(out, (x, w, b), out.detach()), at_most_nbytes=2 * 4 * 4 * 2)
    assert grads[0].placements == (Shard(0),)


@pytest.mark.parametrize("training", [True, False])
def test_cudnn_s_kernel_by_another_name(training):
    mesh = init_device_mesh("cpu", (2,))
    x, w, b, mean, var = (t.clone() for t in inputs(6, 4, 3))
    placed = [place(t, mesh, (p,)) for t, p in zip((x, w, b, mean, var), (Shard(0), *[Replicate()] * 4), strict=True)]
    expected = _aten.native_batch_norm.default(x, w, b, mean, var, training, 0.1, 1e-5)
    got = _aten.cudnn_batch_norm.default(*placed, training, 0.1, 1e-5)
    torch.testing.assert_close(got[0].to_torch(), expected[0])
    torch.testing.assert_close(placed[3].to_torch(), mean)
    torch.testing.assert_close(placed[4].to_torch(), var)
    if training:
        g = values(6, 4, 3, seed=9)
        wanted = _aten.native_batch_norm_backward.default(g, x, w, mean, var, *expected[1:], True, 1e-5, [True] * 3)
        grads = _aten.cudnn_batch_norm_backward.default(
            placed[0], place(g, mesh, (Shard(0),)), placed[1], None, None, *got[1:3], 1e-5, got[3]
        )
        for a, e in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a.to_torch(), e)


def test_statistics_that_are_only_read_by_a_kernel_that_may_write_them():
    def fn(x, w, b, mean, var):
        return _aten._native_batch_norm_legit.default(x, w, b, mean.clone(), var.clone(), False, 0.1, 1e-5)[0]

    check(fn, *inputs(3, 4, 5), limit=10, rtol=1e-4, atol=1e-5)
