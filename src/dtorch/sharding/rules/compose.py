"""What programs are made of: settling partials, casting, aligning, and reductions that come out whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.placements import REPLICATE, Partial
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall, schema_of
from ..redistribute import redistribute

_aten = torch.ops.aten
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
NARROW = (torch.float16, torch.bfloat16)


def letters(ndim: int, whole: Sequence[int] = ()) -> list[str | None]:
    """One label per dim, None for the dims that must be whole."""
    return [None if d in whole else _LETTERS[d] for d in range(ndim)]


def sharded_on(spec: Spec, dims: Sequence[int]) -> bool:
    """Whether the tensor is split, over more than one device, along one of these dims."""
    return any(axis in spec.axes for d in dims for axis in spec.sharding_axes(d))


def has_empty_piece(spec: Spec, dims: Sequence[int]) -> bool:
    """Whether some piece has no element along one of these dims."""
    return any(size[d] == 0 for _, size in spec.boxes for d in dims)


def settled(builder: Builder, value: Value) -> Value:
    """The value with every partial reduced, so that it can be used more than once and in any operator."""
    placements = [REPLICATE if isinstance(p, Partial) else p for p in value.spec.placements]
    return redistribute(builder, value, value.spec.replace(placements))


def aligned(builder: Builder, value: Value, like: Value) -> Value:
    """The value placed like another of its shape."""
    return redistribute(builder, value, value.spec.replace(like.spec.placements))


def cast(builder: Builder, value: Value, dtype: torch.dtype) -> Value:
    """The value in another dtype."""
    return value if value.spec.dtype == dtype else builder.op(_aten._to_copy.default, value, dtype=dtype)


def wide(builder: Builder, value: Value) -> Value:
    """Half and bfloat16 as float32, in which PyTorch's own kernels compute; others unchanged."""
    return cast(builder, value, torch.float32) if value.spec.dtype in NARROW else value


def named(call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, tensors as values, defaults filled in."""
    schema = schema_of(call.func)
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**values, **{a.name: v for a, v in zip(schema.arguments, args, strict=False)}, **kwargs}


def tensor_names(call: OpCall) -> list[str]:
    """Schema names of the tensor arguments, in the order of ``call.specs``."""
    names = [a.name for a in schema_of(call.func).arguments]
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return [name for name, value in given if isinstance(value, Spec)]


def changed(call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any], **new: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call with some of them, by schema name, replaced."""
    names = [a.name for a in schema_of(call.func).arguments]
    positional = [new.pop(name, value) for name, value in zip(names, args, strict=False)]
    return positional, {**kwargs, **new}


def product(builder: Builder, first: Value, second: Value) -> Value:
    """Elementwise product."""
    return builder.op(_aten.mul.Tensor, first, second)


def total(builder: Builder, value: Value, dims: Sequence[int], keepdim: bool = True) -> Value:
    """The sum over some dims, reduced across devices."""
    if not dims:
        return value
    return settled(builder, builder.op(_aten.sum.dim_IntList, value, list(dims), keepdim))


def average(builder: Builder, value: Value, dims: Sequence[int]) -> Value:
    """The mean over some dims, kept as size 1: uneven pieces weigh right, since the count is global."""
    count = 1
    for d in dims:
        count *= value.spec.shape[d]
    return builder.op(_aten.div.Tensor, total(builder, value, dims), count)
