"""Entries of a small operator database of our own: the tests need no import of PyTorch's, which changes global state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from dtorch.testing.opdb.record import Record
from dtorch.testing.opdb.settings import Settings


@dataclass
class Entry:
    """What the sweep uses of PyTorch's ``OpInfo``.

    Attributes:
        shapes: of the tensors of each sample.
    """

    full_name: str
    function: Callable[..., Any]
    shapes: Sequence[Sequence[tuple[int, ...]]] = (((5, 4),), ((3, 2),))
    inplace: Callable[..., Any] | None = None
    supports_autograd: bool = True
    supports_out: bool = False
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    supports_inplace_autograd: bool = field(init=False)

    def __post_init__(self) -> None:
        self.supports_inplace_autograd = self.inplace is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def get_inplace(self) -> Callable[..., Any] | None:
        return self.inplace

    def supported_dtypes(self, device_type: str) -> set[torch.dtype]:
        return set(self.dtypes)

    def supported_backward_dtypes(self, device_type: str) -> set[torch.dtype]:
        return {d for d in self.dtypes if d.is_floating_point or d.is_complex}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[Any]:
        for shapes in self.shapes:
            first, *rest = [(torch.randn(shape) * 4).to(dtype).requires_grad_(requires_grad) for shape in shapes]
            yield SimpleNamespace(
                input=first, args=tuple(rest), kwargs={}, output_process_fn_grad=lambda out: out, broadcasts_input=False
            )


def answers(name: str, settings: Settings, at: Any, answer: Any) -> None:
    """A child's program that ends as the operator's name says."""
    at.value = b"forward:float32:3:0:R"
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os._exit(3)
    answer.send(Record(name).to_json())
