"""Tensors on several meshes of one family, as on the stages of a parallelized model: what meets comes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, MeshError, Partial, Replicate, Shard, init_device_mesh
from dtorch.core.mesh import Family
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()

# Two meshes of a family, and placements of (5, 4) tensors on each.
PAIRS = {
    "alike": (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]), (Shard(0),), (Shard(1),)),
    "uneven": (DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3, 4, 5]), (Shard(0, (4, 0, 1)),), (R,)),
    "partial": (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]), (Shard(1),), (Partial(),)),
    "two axes": (DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[4, 5], [6, 7]]), (Shard(0), Shard(0)), (R, Shard(1))),
    "a part of the other": (init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [1, 3]), (Shard(1), Shard(0)), (Shard(0),)),
    "one device": (DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1]), (Shard(0),), (R,)),
}

# x is here and y there, both (5, 4); w (4, 7), row (4,), picks and mask are there too.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, w, row, picks, mask: x + y,
    "from there": lambda x, y, w, row, picks, mask: y * x,
    "larger there": lambda x, y, w, row, picks, mask: x @ w,
    "larger here": lambda x, y, w, row, picks, mask: row - x * x,
    "index_select": lambda x, y, w, row, picks, mask: x.index_select(0, picks),
    "index": lambda x, y, w, row, picks, mask: x[picks] + y[picks],
    "gather": lambda x, y, w, row, picks, mask: x.gather(0, picks.unsqueeze(1).expand(-1, 4)),
    "where": lambda x, y, w, row, picks, mask: torch.where(mask, x, y),
    "masked_fill": lambda x, y, w, row, picks, mask: x.masked_fill(mask, 2.0),
    "masked_select": lambda x, y, w, row, picks, mask: x.masked_select(mask),
    "cat": lambda x, y, w, row, picks, mask: torch.cat([x, y, y, x]),
    "stack": lambda x, y, w, row, picks, mask: torch.stack([row, x[0], y[1]]),
    "linear": lambda x, y, w, row, picks, mask: torch.nn.functional.linear(x, w.t(), w[0]),
    "layer_norm": lambda x, y, w, row, picks, mask: torch.nn.functional.layer_norm(x, (4,), row, row),
    "in place": lambda x, y, w, row, picks, mask: (x * 1).mul_(y).add_(row),
    "into a smaller one": lambda x, y, w, row, picks, mask: (row * 1).copy_(x[2]).index_copy_(0, picks[1:2], x[0, :1]),
    "through a view": lambda x, y, w, row, picks, mask: _written(x * 1, y, row),
    "index_put": lambda x, y, w, row, picks, mask: (x * 1).index_put_((picks,), y[:3], accumulate=True),
    "scalar": lambda x, y, w, row, picks, mask: x.sum() * y.sum() * x,
}


def _written(x: Any, y: Any, row: Any) -> Any:
    x[1:3] = y[:2]
    x.t()[0] += y[:, 1]
    x[4].copy_(row)
    return x


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple]:
    here, there, *placements = PAIRS[request.param]
    family = Family((here, there))
    yield here, there, *placements
    del family


def _plain(grad: bool) -> list[torch.Tensor]:
    floats = [values(*shape, seed=n).requires_grad_(grad) for n, shape in enumerate([(5, 4), (5, 4), (4, 7), (4,)])]
    return [*floats, torch.tensor([3, 0, 3]), torch.arange(20).view(5, 4) % 3 == 0]


def _placed(plain: list[torch.Tensor], here: DeviceMesh, there: DeviceMesh, on_here: Any, on_there: Any) -> list[Any]:
    whole = (R,) * there.ndim
    at = [(here, on_here), (there, on_there), (there, whole), (there, whole), (there, whole), (there, whole)]
    return [place(t.detach(), mesh, p).requires_grad_(t.requires_grad) for t, (mesh, p) in zip(plain, at, strict=True)]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_brings_its_tensors_together(name: str, pair: tuple) -> None:
    plain = _plain(grad=False)
    expected, actual = OPERATORS[name](*plain), OPERATORS[name](*_placed(plain, *pair))
    torch.testing.assert_close(actual.to_torch(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_come_home(name: str, pair: tuple) -> None:
    plain = _plain(grad=True)
    placed = _placed(plain, *pair)
    OPERATORS[name](*plain).cos().sum().backward()
    OPERATORS[name](*placed).cos().sum().backward()
    for expected, actual in zip(plain, placed, strict=True):
        assert (expected.grad is None) == (actual.grad is None)
        if expected.grad is not None:
            assert actual.grad.device_mesh is actual.device_mesh
            torch.testing.assert_close(actual.grad.to_torch(), expected.grad, atol=1e-5, rtol=1e-5)


def test_the_larger_one_stays_and_what_is_written_stays() -> None:
    here, there, *placements = PAIRS["alike"]
    family = Family((here, there))
    x, y, w, row, picks, mask = _placed(_plain(grad=False), here, there, *placements)
    assert (x + y).device_mesh is (x + row).device_mesh is (row + x).device_mesh is here
    assert (y + x).device_mesh is torch.where(mask, y, x).device_mesh is (x @ w).device_mesh is there
    assert x.index_select(0, picks).device_mesh is torch.cat([x, y]).device_mesh is here
    assert row.copy_(x[0]).device_mesh is there and row.placements == (R,)
    assert x.masked_select(mask).device_mesh is here
    with dtorch.explain() as report:
        x + row
    assert [event.comm.kind for event in report.events] == ["transfer"]
    with dtorch.communication("forbid"), pytest.raises(dtorch.CommunicationForbidden):
        x * y
    del family


def test_a_parameter_that_meets_others_in_every_step_keeps_one_hook() -> None:
    here, there, *placements = PAIRS["alike"]
    family = Family((here, there))
    x, y, *_ = _placed(_plain(grad=True), here, there, *placements)
    for _ in range(3):
        (x * y).sum().backward()
    assert len(x._backward_hooks) == len(y._backward_hooks) == 1
    del family


def test_what_is_written_between_two_meetings_sends_both_gradients_home() -> None:
    def program(a: Any, b: Any) -> Any:
        x = a * 2
        first = (x + b).sin().sum()
        x.add_(1)
        second = (b + x).cos().sum()
        x.sub_(b)
        return first + second + (x + b * b).sin().sum()

    here, there, *placements = PAIRS["alike"]
    family = Family((here, there))
    plain = _plain(grad=True)
    placed = _placed(plain, here, there, *placements)
    program(*plain[:2]).backward()
    program(*placed[:2]).backward()
    for expected, actual in zip(plain[:2], placed[:2], strict=True):
        assert actual.grad.device_mesh is actual.device_mesh
        torch.testing.assert_close(actual.grad.to_torch(), expected.grad, atol=1e-5, rtol=1e-5)
    del family


def test_meshes_that_belong_to_no_family_or_no_longer_do_not_mix() -> None:
    here, there, alien = DeviceMesh("cpu", [10, 11]), DeviceMesh("cpu", [12, 13]), DeviceMesh("cpu", [14, 15])
    x, y, z = (place(values(6), mesh, (Shard(0),)) for mesh in (here, there, alien))
    with pytest.raises(MeshError, match="stages of one parallelized model"):
        x + y
    family = Family((here, there))
    assert (x + y).device_mesh is here
    for program in (lambda: x + z, lambda: torch.addcmul(x, y, z), lambda: torch.cat([y, z]), lambda: z.copy_(x)):
        with pytest.raises(MeshError, match="ids 14, 15"):
            program()
    del family
    with pytest.raises(MeshError):
        x * y


def test_a_scalar_written_with_another_mesh_s_keeps_its_mesh_and_sends_the_gradient_home() -> None:
    here, there = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    x, scale = place(values(4), here, (Shard(0),)), place(torch.tensor(3.0), there, (R,)).requires_grad_()
    y = x.clone().mul_(scale)
    y.sum().backward()
    assert y.device_mesh is here and scale.grad.device_mesh is there
    torch.testing.assert_close(scale.grad.to_torch(), values(4).sum())
