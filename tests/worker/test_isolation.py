"""What surrounds the client does not reach a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.worker.isolation import isolated


class BreakFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a torch function mode was asked")


class BreakDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a dispatch mode was asked")


SURROUNDINGS = [
    torch.inference_mode,
    torch.enable_grad,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("meta"),
    BreakFunctions,
    BreakDispatch,
]


@pytest.mark.parametrize("surround", SURROUNDINGS)
def test_operators_run_as_if_alone(surround: Any) -> None:
    a = torch.randn(2, 2, requires_grad=True)
    around: AbstractContextManager = surround()
    with around, isolated():
        product = torch.mm(a, torch.ones(2, 2))
    assert product.dtype == torch.float32 and product.device.type == "cpu"
    assert not product.is_inference() and not product.requires_grad


def test_the_surroundings_come_back() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with isolated():
            pass
        assert torch.is_inference_mode_enabled() and torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16


def test_the_default_dtype_is_the_worker_s_inside_and_the_client_s_after() -> None:
    for inner, outer in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        torch.set_default_dtype(outer)
        try:
            with isolated(lambda inner=inner: inner):
                assert (torch.arange(3) / 2).dtype == inner
            assert torch.get_default_dtype() is outer
            own = [outer]
            with isolated(lambda own=own: own[0]):
                own[0] = inner
                torch.set_default_dtype(inner)
            assert torch.get_default_dtype() is outer
            with isolated(lambda outer=outer: outer):
                torch.set_default_dtype(inner)  # the client, in another thread
            assert torch.get_default_dtype() is inner
        finally:
            torch.set_default_dtype(torch.float32)


class _Inside(torch.Tensor):
    """A tensor whose operators look what a batch would give in their place."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.complex64)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = torch.tensor([1 + 2j, 3j])
        with isolated():
            return (value * value.conj()).real + value.conj().imag


def test_conjugates_are_resolved_in_the_middle_of_an_operator() -> None:
    assert _Inside().sin().tolist() == [5 - 2, 9 - 3]
