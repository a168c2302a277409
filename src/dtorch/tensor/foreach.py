"""Lists of tensors (``torch._foreach_*``): one operator per element, so elements may lie on different meshes."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding.call import schema_of

_PREFIX = "aten::_foreach_"
_RENAMED = {
    "norm": "linalg_vector_norm",
    # These take numbers too, and have in-place forms.
    "maximum": "clamp_min",
    "maximum_": "clamp_min_",
    "minimum": "clamp_max",
    "minimum_": "clamp_max_",
}
_VALUE_BY_NAME = ("addcmul", "addcdiv")


def is_foreach(func: Any) -> bool:
    """Whether the operator works on a list of tensors element by element."""
    return schema_of(func).name.startswith(_PREFIX)


def one_by_one(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the operator's single-tensor form on each element."""
    schema = schema_of(func)
    name = schema.name.removeprefix(_PREFIX)
    single = getattr(torch.ops.aten, _RENAMED.get(name, name))
    args = tuple(_numbers(a) if at.name == "scalars" else a for a, at in zip(args, schema.arguments, strict=False))
    count = len(next(a for a in args if isinstance(a, list | tuple)))
    out = []
    for i in range(count):
        row = [_element(a, i) for a in args]
        named = {k: _element(v, i) for k, v in kwargs.items()}
        if name.removesuffix("_") in _VALUE_BY_NAME and len(row) > 3:
            named["value"] = row.pop()
        out.append(single(*row, **named))
    return out if schema.returns else None


def _numbers(scalars: Any) -> Any:
    """One number for each element, also where they come as one tensor."""
    return scalars.tolist() if isinstance(scalars, torch.Tensor) else scalars


def _element(argument: Any, i: int) -> Any:
    return argument[i] if isinstance(argument, list | tuple) else argument
