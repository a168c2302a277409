"""A partial tensor is reduced once, however many operators need it whole, and anew after every write."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import Partial, Shard, explain

MESH = dtorch.init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))


@pytest.fixture
def partial() -> tuple[torch.Tensor, dtorch.Tensor]:
    x = torch.randn(12, 10, dtype=torch.float64)
    return x, dtorch.Tensor(x, device_mesh=MESH, placements=[Partial(), Partial()])


def test_one_reduction_for_many_readers(partial: tuple[torch.Tensor, dtorch.Tensor]) -> None:
    x, p = partial
    with explain() as report:
        results = [p.exp(), p.relu(), p.sigmoid() + p.tanh()]
    assert [e.comm.kind for e in report.events] == ["all_reduce", "all_reduce"]
    assert {e.comm.axis for e in report.events} == {"a", "b"}
    for got, expected in zip(results, [x.exp(), x.relu(), x.sigmoid() + x.tanh()], strict=True):
        torch.testing.assert_close(got.to_torch(), expected)
    assert p.placements == (Partial(), Partial())


def test_a_write_makes_the_reduced_form_stale(partial: tuple[torch.Tensor, dtorch.Tensor]) -> None:
    x, p = partial
    p.exp()
    p.mul_(2)
    torch.testing.assert_close(p.relu().to_torch(), (2 * x).relu())
    p[0].mul_(3)
    expected = 2 * x
    expected[0] *= 3
    torch.testing.assert_close(p.relu().to_torch(), expected.relu())
    p.add_(p.exp())
    torch.testing.assert_close(p.sin().to_torch(), (expected + expected.exp()).sin())


def test_a_view_that_reduces_still_writes_the_tensor_itself(partial: tuple[torch.Tensor, dtorch.Tensor]) -> None:
    x, p = partial
    p.exp()
    p.view(torch.int64)[0] = 0
    expected = x.clone()
    expected.view(torch.int64)[0] = 0
    torch.testing.assert_close(p.to_torch(), expected)


def test_gradients_of_a_partial_read_twice(partial: tuple[torch.Tensor, dtorch.Tensor]) -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    placed = dtorch.Tensor(x.detach(), device_mesh=MESH, placements=[Shard(0), Shard(1)], requires_grad=True)
    for tensor in (x, placed):
        total = tensor.sum(0)
        (total.exp() * total.tanh()).sum().backward()
    torch.testing.assert_close(placed.grad.to_torch(), x.grad)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * math.inf,
        lambda x: x * -math.inf,
        lambda x: x * math.nan,
        lambda x: x / 0,
        lambda x: x / -0.0,
        lambda x: x / False,
        lambda x: torch.add(x, x, alpha=math.inf),
        lambda x: x.clone().div_(0),
        lambda x: x.clone().mul_(math.inf),
    ],
)
def test_infinite_parts_are_never_summed(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Parts of either sign would become infinities, whose sum is not a number."""
    parts = [torch.tensor([3.0, -4.0, 2.0]), torch.tensor([0.0, 3.0, -2.0])]
    x = dtorch.from_local(parts, dtorch.init_device_mesh("cpu", 2), [Partial()])
    program(x * 2)
    torch.testing.assert_close(program(x).to_torch(), program(parts[0] + parts[1]), rtol=0, atol=0, equal_nan=True)
