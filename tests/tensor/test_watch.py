"""Warnings and errors point at the user's own line."""

from __future__ import annotations

import inspect

import pytest
import torch

import dtorch
from dtorch import Shard, init_device_mesh


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_names_the_line_that_communicates() -> None:
    x = dtorch.ones(4, 4, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(1)])
    with pytest.warns(RuntimeWarning, match="all_reduce") as caught, dtorch.communication("warn"):
        line = _line() + 1
        torch.relu(x.sum(1))
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


def test_a_failure_names_its_line_whenever_it_is_read() -> None:
    table = dtorch.ones(4, 2, device_mesh=init_device_mesh("cpu", 2))
    line = _line() + 1
    rows = torch.nn.functional.embedding(torch.tensor([9]), table)
    for value in (rows + 1, rows, rows * 2):
        with pytest.raises(dtorch.RemoteError) as caught:
            value.to_torch()
        assert caught.value.site.startswith(f"{__file__}:{line} in ")
        assert table.sum().item() == 8.0
