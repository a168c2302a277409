"""Dtype promotion: every dtype with tensors of every dtype, 0-d ones and numbers, is that of plain PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Placement

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
MESH = init_device_mesh("cpu", 2)
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
NUMBERS = (True, 3, 2.5, 1 + 2j)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "pow": operator.pow,
    "eq": operator.eq,
    "lt": operator.lt,
    "or": operator.or_,
    "maximum": lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
    "where": lambda a, b: torch.where(_tensor(a) == a, a, b),
    "add in place": lambda a, b: a.clone().add_(b),
    "mul in place": lambda a, b: a.clone().mul_(b),
    "result_type": lambda a, b: torch.zeros((), dtype=torch.result_type(a, b)),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "fill": lambda a, b: torch.full_like(a, b) if not isinstance(b, torch.Tensor) else a.clone().fill_(b),
    "clamp": lambda a, b: a.clamp(min=b),
}


def _tensor(value: Any) -> Any:
    assert isinstance(value, torch.Tensor)
    return value


def _made(dtype: torch.dtype, ndim: int) -> torch.Tensor:
    return torch.tensor([1, 2, 3, 1, 1][: 5 if ndim else 1]).view([5] * ndim).to(dtype)


def _partners() -> Iterator[Any]:
    for dtype in DTYPES:
        yield from (_made(dtype, 0), _made(dtype, 1))
    yield from NUMBERS


def _outcome(fn: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    try:
        return fn(a, b)
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:  # a dtype without a kernel, by either side
        assert not isinstance(error, dtorch.DTorchError), error
        return type(error)


def _assert_same(actual: Any, expected: Any, where: Any) -> None:
    if isinstance(expected, type):
        assert isinstance(actual, type), f"{where}: {actual!r}, PyTorch {expected}"
        return
    assert not isinstance(actual, type), f"{where}: {actual}, PyTorch {expected!r}"
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{where}: {actual.dtype}, PyTorch {expected.dtype}"
    actual = actual.to_torch() if isinstance(actual, dtorch.Tensor) else actual
    if expected.dtype == torch.complex32:
        actual, expected = actual.to(torch.complex64), expected.to(torch.complex64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")


PLACED = [(name, placement) for name in OPERATORS for placement in (Replicate(), Shard(0, (4, 1)))]
REDUCED = [(name, Partial()) for name in ("add", "mul", "div", "where")]


@pytest.mark.parametrize(("name", "placement"), [*PLACED, *REDUCED], ids=str)
def test_every_dtype_with_everything(name: str, placement: Placement) -> None:
    def put(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        keeps = value.ndim or isinstance(placement, Partial)
        return dtorch.Tensor(
            value, device_mesh=MESH, placements=[placement if keeps and value.dtype != torch.bool else Replicate()]
        )

    fn = OPERATORS[name]
    for dtype in DTYPES:
        for plain in (_made(dtype, 1), _made(dtype, 0)):
            mine = put(plain)
            for partner in _partners():
                theirs = put(partner)
                where = (name, plain, partner)
                _assert_same(_outcome(fn, mine, theirs), _outcome(fn, plain, partner), where)
                _assert_same(_outcome(fn, theirs, mine), _outcome(fn, partner, plain), where)
                if isinstance(partner, torch.Tensor) and "in place" not in name:
                    _assert_same(_outcome(fn, mine, partner), _outcome(fn, plain, partner), (*where, "plain"))


def test_the_default_dtype_counts_when_the_operator_runs() -> None:
    def program(x: Any) -> list[torch.dtype]:
        return [
            t.dtype
            for t in (x * 1.5, x / 2, x.float() * 1j, x.sqrt(), torch.full_like(x, 2.5), x.softmax(0, torch.float32), 1.5 - x)
        ]

    x = torch.arange(4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for placement in (Replicate(), Shard(0)):
                assert program(dtorch.Tensor(x, device_mesh=MESH, placements=[placement])) == program(x)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_what_was_issued_before_a_change_of_the_default_dtype_runs_under_the_old_one(placement: Placement) -> None:
    x = dtorch.Tensor(torch.arange(4), device_mesh=MESH, placements=[placement])
    single = x / 3
    torch.set_default_dtype(torch.float64)
    try:
        double = x / 3
        assert torch.equal(single.to_torch(), (torch.arange(4).float() / 3))
        assert torch.get_default_dtype() is torch.float64
        late = x.sqrt()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(double.to_torch(), torch.arange(4).double() / 3)
    assert torch.equal(late.to_torch(), torch.arange(4).double().sqrt())
    assert torch.equal((x / 3).to_torch(), single.to_torch())
