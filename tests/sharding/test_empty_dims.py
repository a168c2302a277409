"""An empty list of dims: to some operators it means none, to others all, and to some it is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.harness import check, values

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "squeeze": lambda x: torch.squeeze(x, ()),
    "squeeze_copy": lambda x: torch.squeeze_copy(x, ()),
    "squeeze in place": lambda x: x.clone().squeeze_(()),
    "squeeze some": lambda x: torch.squeeze(x, (0, 1)),
    "sum": lambda x: torch.sum(x, ()),
    "sum kept": lambda x: torch.sum(x, (), keepdim=True),
    "nansum": lambda x: torch.nansum(x, ()),
    "mean": lambda x: torch.mean(x, ()),
    "nanmean": lambda x: torch.nanmean(x, ()),
    "amax": lambda x: torch.amax(x, ()),
    "amin kept": lambda x: torch.amin(x, (), keepdim=True),
    "any": lambda x: torch.any(x, ()),
    "all": lambda x: torch.all(x, ()),
    "count_nonzero": lambda x: torch.count_nonzero(x, ()),
    "var": lambda x: torch.var(x, (), correction=0),
    "std_mean": lambda x: torch.std_mean(x, (), correction=0, keepdim=True),
    "norm": lambda x: torch.norm(x, 2, ()),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, ()),
    "flip": lambda x: torch.flip(x, ()),
    "roll": lambda x: torch.roll(x, (2,), ()),
    "movedim": lambda x: torch.movedim(x, (), ()),
    "tensordot": lambda x: torch.tensordot(x, x, ([], [])),
    "repeat": lambda x: x.sum().repeat(()),
    "permute": lambda x: x.sum().permute(()),
    "tile": lambda x: torch.tile(x, ()),
    "fftn": lambda x: torch.fft.fftn(x, dim=()),
}


@pytest.mark.parametrize("shape", [(1, 5), (5, 1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_empty_list_of_dims_means_what_it_means_in_pytorch(name: str, shape: tuple[int, ...]) -> None:
    check(PROGRAMS[name], values(*shape), rule=False, limit=12)
