"""Group normalisation against plain torch: split images, groups, parted groups and positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, stays, values

_aten = torch.ops.aten


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm(groups):
    x, w, b = values(3, 6, 4), values(6, seed=1), values(6, seed=2)
    check(lambda x, w, b: F.group_norm(x, groups, w, b), x, w, b, grad=True, limit=10, rtol=1e-4, atol=1e-5)
    check(lambda x: F.group_norm(x, groups), x, grad=True, limit=15, rtol=1e-4, atol=1e-5)


def test_images():
    x, w, b = values(2, 4, 3, 5), values(4, seed=1), values(4, seed=2)
    check(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b, grad=True, limit=15, rtol=1e-4, atol=1e-5)


def test_no_positions_beside_channels():
    check(lambda x, w: F.group_norm(x, 2, w), values(3, 8), values(8, seed=1), grad=True, limit=15, rtol=1e-4, atol=1e-5)


def test_statistics_are_results_too():
    check(lambda x: _aten.native_group_norm.default(x, None, None, 3, 6, 4, 2, 1e-5), values(3, 6, 4), rtol=1e-4, atol=1e-5)


def test_dtypes():
    x, w, b = values(3, 6, 4, dtype=torch.bfloat16), values(6, seed=1), values(6, seed=2)
    check(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b, grad=True, limit=6, partial=(), rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True], [True, False, True]])
def test_backward_gives_what_is_asked_for(mask):
    x, w = values(3, 6, 4), values(6, seed=1)
    _, mean, rstd = _aten.native_group_norm.default(x, w, None, 3, 6, 4, 2, 1e-5)

    def fn(g, x, mean, rstd, w):
        out = _aten.native_group_norm_backward.default(g, x, mean, rstd, w, 3, 6, 4, 2, mask)
        return [t for t, wanted in zip(out, mask, strict=True) if wanted]

    check(fn, values(3, 6, 4, seed=3), x, mean, rstd, w, limit=15, rtol=1e-4, atol=1e-5)


def test_split_images_and_groups_stay():
    x, w = values(4, 6, 4), values(6, seed=1)
    placements = [[Shard(0), Shard(1)], [Replicate(), Shard(0)]]
    out = stays(lambda x, w: F.group_norm(x, 2, w, w), x, w, mesh=(2, 2), placements=placements)
    assert out.placements == (Shard(0), Shard(1))


def test_split_positions_move_only_sums():
    mesh = init_device_mesh("cpu", (2,))
    x = place(values(2, 4, 256), mesh, (Shard(2),))
    out = not_replicated(lambda: F.group_norm(x, 2), at_most_nbytes=2 * 2 * 2 * 4 * 4 * 2)
    assert out.placements == (Shard(2),)
