"""Dtypes and pieces that PyTorch's CPU kernels take, though its meta kernels or its kernels on small pieces refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.harness import check, values

F = torch.nn.functional
MASK = torch.tensor([1, 0, 1, 1, 0], dtype=torch.uint8)
NUMBERS = torch.arange(5)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "where by bytes": (torch.where, (MASK, values(5), values(5, seed=1))),
    "where by bytes and a number": (lambda c, x: torch.where(c, x, 0.0), (MASK, values(5))),
    "index by bytes": (lambda x, c: x[c], (values(5, 3), MASK)),
    "a bool shifted": (lambda c: (c << 2, c >> 1), (MASK.bool(),)),
    "a bool shifted by a tensor": (lambda c, n: (c << n, n << c, torch.bitwise_left_shift(c, n)), (MASK.bool(), NUMBERS)),
    "bags by bytes": (lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 2])), (values(4, 3), MASK)),
}


@pytest.mark.filterwarnings("ignore:.*uint8", "ignore:.*has no sharding rule")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_kernels_take_is_taken(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    check(fn, *inputs, rule=False, limit=15, partial=())


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_index_reduce_on_pieces_of_one_column(dtype: torch.dtype, reduce: str) -> None:
    index = torch.tensor([0, 2, 0, 1])
    for kept in (True, False):
        check(
            lambda x, source, kept=kept: (
                x.index_reduce(0, index, source, reduce, include_self=kept),
                x.clone().index_reduce_(0, index, source, reduce, include_self=kept),
            ),
            values(3, 3).to(dtype),
            values(4, 3, seed=1).to(dtype),
            limit=12,
            partial=(),
            meshes=((3,), (2, 2)),
        )
