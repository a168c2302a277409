"""What counts as different, and as which kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard, init_device_mesh
from dtorch.testing.opdb.compare import differences

NAN = float("nan")

SAME = [
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (torch.tensor([1e6, 1.0]), torch.tensor([1e6, 1.5])),
    ([torch.zeros(2), 3, None], (torch.zeros(2), 3, None)),
    ({"a": 1.0}, {"a": 1.0 + 1e-9}),
    (torch.zeros(1, 3).as_strided((1, 3), (7, 1)), torch.zeros(1, 3)),
]

DIFFERENT = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "value"),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), "value"),
    (torch.tensor([1, 2]), torch.tensor([1, 3]), "value"),
    (True, False, "value"),
    (torch.zeros(2, 3), torch.zeros(3, 2), "meta"),
    (torch.zeros(2), torch.zeros(2).double(), "meta"),
    (1, torch.ones(()), "meta"),
    ([torch.zeros(2)], [torch.zeros(2)] * 2, "meta"),
    ({"a": 1}, {"b": 1}, "meta"),
    (torch.zeros(2, 3), torch.zeros(3, 2).t(), "layout"),
]


@pytest.mark.parametrize(("got", "expected"), SAME)
def test_what_is_the_same(got: Any, expected: Any) -> None:
    assert differences(got, expected) == []


@pytest.mark.parametrize(("got", "expected", "kind"), DIFFERENT)
def test_what_is_different(got: Any, expected: Any, kind: str) -> None:
    assert [d.kind for d in differences(got, expected)] == [kind]


def test_values_may_be_left_out() -> None:
    assert differences(torch.zeros(2), torch.ones(2), values=False) == []
    assert [d.kind for d in differences(torch.zeros(2), torch.ones(3), values=False)] == ["meta"]


@pytest.mark.embedded("workers in processes refuse to collect pieces of other sizes")
def test_local_tensors_must_be_what_the_placements_say() -> None:
    mesh = init_device_mesh("cpu", 2)
    right = dtorch.zeros(4, device_mesh=mesh, placements=[Shard(0)])
    uneven = dtorch.zeros(4, device_mesh=mesh, placements=[Shard(0, sizes=(1, 3))])
    assert differences(right, torch.zeros(4)) == []
    right._value = uneven._value
    assert [d.kind for d in differences(right, torch.zeros(4))] == ["meta"]


def test_rounding_is_told_from_error_by_a_judge() -> None:
    judge = torch.tensor([0.0, 1.0], dtype=torch.float64)
    plain, near, far = torch.tensor([0.001, 1.0]), torch.tensor([-0.003, 1.0]), torch.tensor([0.005, 1.0])
    assert [d.kind for d in differences(near, plain)] == ["value"]
    assert differences([near], [plain], judge=[judge]) == []
    assert [d.kind for d in differences([far], [plain], judge=[judge])] == ["value"]
    # Where plain PyTorch itself is far off, such as in a random operator, a judge tells nothing.
    assert [d.kind for d in differences(near, plain, judge=judge + 1)] == ["value"]
    assert [d.kind for d in differences(torch.tensor([1]), torch.tensor([2]), judge=torch.tensor([1]))] == ["value"]
