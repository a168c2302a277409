"""Operators without a rule run by PyTorch's decompositions, on global tensors, and give what the operator gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Shard

PLACEMENTS = [[Shard(0), Shard(1)], [Shard(2), Shard(2)], [Partial(), Shard(3)], [Shard(3), Shard(0)]]
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rot90": lambda x: torch.rot90(x, 1, [2, 3]),
    "reflection_pad": lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, size=(7, 9), mode="nearest"),
    "glu": lambda x: F.glu(x, 1),
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "dist": lambda x: torch.dist(x, x * 2),
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
}


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
def test_value_and_gradient(name: str, placements: list) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 3))
    x = torch.randn(4, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    placed = dtorch.Tensor(x.detach(), device_mesh=mesh, placements=placements, requires_grad=True)
    expected, got = OPERATORS[name](x), OPERATORS[name](placed)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    torch.testing.assert_close(got.to_torch(), expected.detach())
    torch.testing.assert_close(placed.grad.to_torch(), x.grad)
