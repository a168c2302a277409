"""The one place that makes tensor wrappers. PyTorch has no public way to make a tensor without storage."""

from __future__ import annotations

from typing import Any

import torch

from ..core.spec import Spec
from .value import Value

make_wrapper = torch.Tensor._make_wrapper_subclass


def wrap(cls: type, spec: Spec, value: Value) -> Any:
    """A tensor of class ``cls`` over a value."""
    out = make_wrapper(cls, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    out._spec = spec
    out._value = value
    return out
