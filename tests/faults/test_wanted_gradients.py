"""Operators of several arguments, of which any may want a gradient and the others not: kernels are told by a mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.core.placements import Placement

LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
Sizes = tuple[tuple[int, ...], ...]

OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], Sizes]] = {
    "grid_sample": (lambda x, g: F.grid_sample(x, g * 2 - 1, align_corners=False), ((4, 3, 5, 5), (4, 4, 4, 2))),
    "grid_sample 3d": (lambda x, g: F.grid_sample(x, g * 2 - 1, align_corners=False), ((4, 3, 4, 4, 4), (4, 3, 3, 3, 3))),
    "affine_grid": (
        lambda t, x: F.grid_sample(x, F.affine_grid(t, x.shape, align_corners=False), align_corners=False),
        ((4, 2, 3), (4, 3, 5, 5)),
    ),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), ((4, 6, 5, 5), (8, 3, 3, 3), (8,))),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), ((4, 6, 5, 5), (6, 4, 3, 3), (4,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((6, 4, 5), (4,), (4,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((6, 4, 5), (4,), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4, 5), w, b), ((6, 4, 5), (4, 5), (4, 5))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), ((6, 4, 5), (5,))),
    "bilinear": (F.bilinear, ((6, 4), (6, 5), (3, 4, 5), (3,))),
    "attention": (F.scaled_dot_product_attention, ((2, 4, 5, 4), (2, 4, 6, 4), (2, 4, 6, 4), (4, 5, 6))),
    "linear": (F.linear, ((6, 4, 5), (7, 5), (7,))),
    "prelu": (lambda x, w: F.prelu(x - 0.5, w), ((6, 4, 5), (4,))),
    "embedding_bag": (
        lambda w, s: F.embedding_bag(torch.arange(12).view(3, 4) % 6, w, per_sample_weights=s, mode="sum"),
        ((6, 4), (3, 4)),
    ),
    "gru_cell": (torch.gru_cell, ((6, 5), (6, 4), (12, 5), (12, 4), (12,), (12,))),
    "mse_loss": (F.mse_loss, ((6, 4), (6, 4))),
    "scatter_reduce": (lambda a, b: a.scatter_reduce(0, torch.arange(12).view(3, 4) % 6, b, "prod"), ((6, 4), (3, 4))),
    "solve": (lambda a, b: torch.linalg.solve(a + 3 * torch.eye(4), b), ((3, 4, 4), (3, 4, 2))),
    "einsum": (lambda a, b, c: torch.einsum("bi,ij,bj->b", a, b, c), ((6, 4), (4, 5), (6, 5))),
}


def placed(sizes: Sizes) -> list[tuple[dtorch.DeviceMesh, list[list[Placement]]]]:
    """All split along their first dim, the first alone, and over two axes."""
    return [
        (LINE, [[Shard(0)] for _ in sizes]),
        (LINE, [[Shard(0)], *([Replicate()] for _ in sizes[1:])]),
        (GRID, [[Shard(len(s) - 1), Shard(0)] for s in sizes]),
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_any_of_the_arguments_may_want_a_gradient(name: str) -> None:
    function, sizes = OPERATORS[name]
    generator = torch.Generator().manual_seed(0)
    plain = [torch.rand(s, generator=generator) for s in sizes]
    for wanted in itertools.product((False, True), repeat=len(plain)):
        if not any(wanted):
            continue

        def run(given: list[torch.Tensor], wanted: tuple[bool, ...] = wanted) -> list[torch.Tensor]:
            own = [t.detach().clone().requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
            out = function(*own)
            weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
            return [out.detach(), *torch.autograd.grad((out * weights).sum(), [t for t in own if t.requires_grad])]

        for mesh, placements in placed(sizes):
            ours = run([dtorch.Tensor(t, device_mesh=mesh, placements=p) for t, p in zip(plain, placements, strict=True)])
            for found, expected in zip(ours, run(plain), strict=True):
                assert isinstance(found, dtorch.Tensor)
                torch.testing.assert_close(found.to_torch(), expected, rtol=1e-4, atol=1e-5)
