"""The one place that makes tensor wrappers. PyTorch has no public way to make a tensor without storage."""

from __future__ import annotations

from typing import Any

import torch

from ..core.spec import Spec
from .hotpath import Value

make_wrapper = torch.Tensor._make_wrapper_subclass


def wrap(cls: type, spec: Spec, value: Value, base: Any = None) -> Any:
    """A tensor of class ``cls`` over a value; ``base`` is given for a view of a tensor."""
    if base is not None and torch.is_inference_mode_enabled() and not base.is_inference():
        # Autograd keeps count of the writes to such a base, and so must be able to of those to its view.
        with torch.inference_mode(False):
            return wrap(cls, spec, value)
    out: Any = make_wrapper(cls, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    out._spec = spec
    out._value = value
    return out
