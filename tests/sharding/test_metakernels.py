"""What stands in for PyTorch's meta kernels, beside the kernels themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from dtorch.sharding.metakernels import STAND_INS

SHAPES = (
    (0,),
    (3,),
    (1, 1),
    (2, 3),
    (2, 0, 3),
    (2, 3, 4),
    (2, 3, 1, 1),
    (1, 1, 4, 5),
    (2, 3, 4, 5),
    (1, 2, 1, 1, 1),
    (2, 3, 2, 2, 2),
)


def layouts(shape: Sequence[int]) -> list[torch.Tensor]:
    plain = torch.zeros(shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    laid = [plain.contiguous(memory_format=formats[plain.ndim])] if plain.ndim in formats else []
    return [plain, plain.double(), plain.transpose(0, -1).contiguous().transpose(0, -1), *laid]


@pytest.mark.parametrize("shape", SHAPES)
def test_cat(shape: tuple[int, ...]) -> None:
    join = STAND_INS["aten::cat"]
    for dim in range(-len(shape), len(shape)):
        longer = [n + 2 * (i == dim % len(shape)) for i, n in enumerate(shape)]
        for pair in itertools.product(layouts(shape), layouts(longer)):
            expected = torch.cat(pair, dim)
            actual = join([t.to("meta") for t in pair], dim)
            assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_cat_refuses_as_pytorch_does() -> None:
    join = STAND_INS["aten::cat"]
    a, b = torch.zeros(2, 3, device="meta"), torch.zeros(3, 2, device="meta")
    for tensors, dim in (([a, b], 0), ([a, a], 2), ([a, a], -3), ([a, a[0]], 0), ([a[0, 0]], 0)):
        with pytest.raises((RuntimeError, IndexError)):
            join(tensors, dim)
