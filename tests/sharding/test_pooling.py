"""Pooling, resizing and padding of planes against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.harness import check, values

LIMIT = 12

PLANES = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2, stride=1, padding=1),
    "max_pool2d indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_avg_pool2d whole": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, size=(7, 5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "bilinear aa": lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, size=(7, 5), mode="bicubic", align_corners=True),
    "reflect": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"),
}


@pytest.mark.parametrize("name", PLANES)
def test_images(name):
    check(PLANES[name], values(2, 4, 4, 6, distinct=True), grad=True, limit=LIMIT)


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "reflect"])
def test_one_image_without_a_batch(name):
    check(PLANES[name], values(4, 4, 6, distinct=True), grad=True, limit=LIMIT)


@pytest.mark.parametrize("name", ["max_pool2d", "adaptive_max_pool2d", "nearest", "bilinear"])
def test_inference_mode(name):
    def fn(x):
        with torch.inference_mode():
            return PLANES[name](x)

    check(fn, values(2, 4, 4, 6, distinct=True), limit=LIMIT)


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d", "bilinear", "nearest"])
def test_channels_last(name):
    def fn(x):
        out = PLANES[name](x.to(memory_format=torch.channels_last))
        return out, out.flatten(1)

    check(fn, values(2, 4, 4, 6, distinct=True), grad=True, limit=LIMIT)


def test_lines_and_volumes():
    line, volume = values(2, 4, 6, distinct=True), values(2, 2, 4, 4, 4, distinct=True)
    for fn in (
        lambda x: F.max_pool1d(x, 2),
        lambda x: F.avg_pool1d(x, 2),
        lambda x: F.adaptive_avg_pool1d(x, 3),
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        lambda x: F.pad(x, (1, 1), mode="reflect"),
    ):
        check(fn, line, grad=True, limit=LIMIT)
    for fn in (
        lambda x: F.max_pool3d(x, 2),
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.adaptive_avg_pool3d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    ):
        check(fn, volume, grad=True, limit=LIMIT)


@pytest.mark.parametrize("ndim", [2, 3])
def test_sampling_at_the_points_of_a_grid(ndim):
    images, grid = values(2, 3, *[4] * ndim), values(2, *[3] * ndim, ndim, seed=1).tanh()
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), images, grid, grad=True, limit=LIMIT, rtol=1e-4, atol=1e-5)
