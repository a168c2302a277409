"""Convolutions against plain torch: every dim split, groups, transposed ones, strides, biases and layouts in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial
from tests.sharding.harness import check, not_replicated, place, stays, values

_aten = torch.ops.aten
LIMIT = 7


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2}])
def test_conv2d(options, bias):
    inputs = [values(2, 4, 6, 5), values(6, 4, 3, 2, seed=1), *[values(6, seed=2)] * bias]
    check(lambda x, w, b=None: F.conv2d(x, w, b, **options), *inputs, grad=True, limit=LIMIT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups, bias):
    inputs = [values(2, 4, 5, 5), values(8, 4 // groups, 3, 3, seed=1), *[values(8, seed=2)] * bias]
    check(lambda x, w, b=None: F.conv2d(x, w, b, padding=1, groups=groups), *inputs, grad=True, limit=LIMIT)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}])
def test_transposed(options, groups):
    inputs = [values(2, 4, 5, 4), values(4, 6 // groups, 3, 3, seed=1), values(6, seed=2)]
    check(lambda x, w, b: F.conv_transpose2d(x, w, b, groups=groups, **options), *inputs, grad=True, limit=LIMIT)


def test_one_and_three_dims():
    check(
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        values(2, 4, 7),
        values(6, 4, 3, seed=1),
        values(6, seed=2),
        grad=True,
        limit=LIMIT,
    )
    x, w, b = values(2, 2, 4, 4, 4), values(3, 2, 2, 2, 2, seed=1), values(3, seed=2)
    check(F.conv3d, x, w, b, grad=True, limit=LIMIT)
    check(F.conv_transpose1d, values(2, 4, 7), values(4, 6, 3, seed=1), values(6, seed=2), grad=True, limit=LIMIT)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows_that_do_not_overlap(stride):
    inputs = [values(2, 3, 6, 12), values(4, 3, stride, stride, seed=1), values(4, seed=2)]
    check(lambda x, w, b: F.conv2d(x, w, b, stride=stride), *inputs, grad=True, limit=LIMIT)
    check(lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1), b, stride=stride), *inputs, grad=True, limit=LIMIT)
    check(lambda x, w, b: F.conv2d(x, w[:, :, :1, :1], b, stride=stride), *inputs, grad=True, limit=LIMIT)


def test_one_image_without_a_batch():
    check(
        lambda x, w, b: F.conv2d(x, w, b), values(4, 5, 5), values(6, 4, 3, 3, seed=1), values(6, seed=2), grad=True, limit=LIMIT
    )


def test_no_images():
    check(
        lambda x, w, b: F.conv2d(x, w, b),
        torch.empty(0, 4, 5, 5),
        values(6, 4, 3, 3, seed=1),
        values(6, seed=2),
        grad=True,
        limit=6,
    )


@pytest.mark.parametrize("mask", [[True, False, True], [False, True, False], [False, False, True]])
def test_backward_gives_what_is_asked_for(mask):
    def fn(g, x, w):
        out = _aten.convolution_backward.default(g, x, w, [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return [t for t, wanted in zip(out, mask, strict=True) if wanted]

    check(fn, values(2, 6, 5, 5, seed=2), values(2, 4, 5, 5), values(6, 4, 3, 3, seed=1), limit=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_channels_last(dtype):
    def fn(x, w, b):
        out = F.conv2d(x.to(memory_format=torch.channels_last), w, b, padding=1)
        return out, out.permute(0, 2, 3, 1).contiguous().view(-1), out.flatten(1)

    check(fn, *(t.to(dtype) for t in (values(2, 4, 5, 5), values(6, 4, 3, 3, seed=1), values(6, seed=2))), grad=True, limit=LIMIT)


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_last_volumes(batch):
    def fn(x, w):
        out = F.conv3d(x.to(memory_format=torch.channels_last_3d), w)
        return out, out.flatten(1), out.sum(0, keepdim=True).flatten()

    check(fn, values(batch, 2, 4, 4, 4), values(3, 2, 2, 2, 2, seed=1), grad=True, limit=LIMIT)


def test_the_stride_of_a_result_is_plain_torch_s():
    mesh = init_device_mesh("cpu", (2,))
    x, w = values(2, 4, 5, 5).to(memory_format=torch.channels_last), values(6, 4, 3, 3, seed=1)
    for placement in (Replicate(), Shard(0), Shard(1)):
        out = F.conv2d(place(x, mesh, (placement,)).to(memory_format=torch.channels_last), w)
        assert out.stride() == F.conv2d(x, w).stride()


def test_what_moves():
    x, w, b = values(4, 4, 6, 6), values(6, 4, 3, 3, seed=1), values(6, seed=2)
    out = stays(F.conv2d, x, w, b, mesh=(2,), placements=[[Shard(0)], [Replicate()], [Replicate()]])
    assert out.placements == (Shard(0),)
    out = stays(F.conv2d, x, w, b, mesh=(2,), placements=[[Replicate()], [Shard(0)], [Shard(0)]])
    assert out.placements == (Shard(1),)
    out = stays(F.conv2d, x, w, mesh=(2,), placements=[[Shard(1)], [Shard(1)]])
    assert out.placements == (Partial(),)
    grouped = values(8, 2, 3, 3, seed=1)
    out = stays(lambda x, w: F.conv2d(x, w, groups=2), x, grouped, mesh=(2,), placements=[[Shard(1)], [Shard(0)]])
    assert out.placements == (Shard(1),)
    patches = values(6, 4, 3, 3, seed=1)
    out = stays(
        lambda x, w, b: F.conv2d(x, w, b, stride=3),
        x,
        patches,
        b,
        mesh=(2,),
        placements=[[Shard(2)], [Replicate()], [Replicate()]],
    )
    assert out.placements == (Shard(2),)


def test_a_step_over_batches_moves_nothing():
    mesh = init_device_mesh("cpu", (2,))
    x, w, b = (
        place(values(4, 4, 6, 6), mesh, (Shard(0),)),
        place(values(6, 4, 3, 3), mesh, (Replicate(),)),
        place(values(6), mesh, (Replicate(),)),
    )
    leaves = [t.requires_grad_() for t in (x, w, b)]
    out = F.conv2d(*leaves)
    grads = not_replicated(lambda: torch.autograd.grad(out, leaves, out.detach()), at_most_nbytes=0)
    assert [g.placements for g in grads] == [(Shard(0),), (Partial(),), (Partial(),)]
