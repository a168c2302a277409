"""Lists of tensors (``torch._foreach_*``, fused optimizers): one call per element, so elements may lie on different meshes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..core.placements import REPLICATE, Partial
from ..core.spec import Spec
from ..sharding.call import leaves, schema_of
from . import dispatch, moving

_aten = torch.ops.aten
_PREFIX = "aten::_foreach_"
_GRADIENT = 1
"""Place of the gradients among a fused step's lists."""
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
    single = getattr(_aten, _RENAMED.get(name, name))
    args = tuple(_numbers(a) if at.name == "scalars" else a for a, at in zip(args, schema.arguments, strict=False))
    count = len(next(a for a in args if isinstance(a, list | tuple)))
    out = []
    for i in range(count):
        row = [_element(a, i) for a in args]
        named = {k: _element(v, i) for k, v in kwargs.items()}
        if name.removesuffix("_") in _VALUE_BY_NAME and len(row) > 3:
            named["value"] = row.pop()
        out.append(single(*row, **named))
    if schema.returns:
        return out
    # Below autograd nobody counts the writes to the elements, and what was saved of them would be taken for unchanged.
    torch.autograd.graph.increment_version([t for t in args[0] if not t.is_inference()])
    return None


def is_fused(func: Any) -> bool:
    """Whether the operator is a step of an optimizer that updates lists in place."""
    schema = schema_of(func)
    return (
        schema.name.startswith("aten::_fused_") and schema.name.endswith("_") and str(schema.arguments[0].type) == "List[Tensor]"
    )


def lists_of_one(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run the operator on each element alone, where its parameter lies; lists that it does not use are empty."""
    for i in range(len(args[0])):
        given = tuple(a[i : i + 1] if isinstance(a, list | tuple) else a for a in args)
        row, moved = _where_the_first_lies(cls, given, kwargs.get("grad_scale") is not None)
        if not leaves((row, kwargs), cls):
            func(*row, **kwargs)
        elif func is _aten._fused_adagrad_.default:
            # It says that it writes the number of steps too, which no piece could do for all; its other form does not.
            rate = torch.tensor(kwargs["lr"], dtype=torch.float64)
            _aten._fused_adagrad_.tensor_lr(*row, **{**kwargs, "lr": rate})
        else:
            dispatch.ordinary(cls, func, row, kwargs)
        for origin, now in moved:
            _aten.copy_.default(origin, now)


def _where_the_first_lies(cls: Any, lists: tuple, scaled: bool) -> tuple[tuple, list[tuple[Any, Any]]]:
    """Lists of one with what lies elsewhere brought to the parameter (a sum first added up), and what of that is written.

    What is written is told as pairs: where it came from, and what it is now.

    The gradient, in the second list, is written where it is scaled.
    """
    (parameter,) = lists[0]
    if type(parameter) is not cls:
        return lists, []
    spec = parameter._spec
    home = spec.replace([REPLICATE if isinstance(p, Partial) else p for p in spec.placements])
    row, moved = [], []
    for number, one in enumerate(lists):
        if one and type(one[0]) is cls and _lies_elsewhere(one[0]._spec, home):
            (origin,) = one
            one = [moving.move(origin, origin._spec.replace(home.placements), explicit=False, reason="a fused step")]
            if number != _GRADIENT or scaled:
                moved.append((origin, one[0]))
        row.append(one)
    return tuple(row), moved


def _lies_elsewhere(spec: Spec, home: Spec) -> bool:
    return spec.mesh is home.mesh and spec.shape == home.shape and spec.placements != home.placements


def unscaled(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Gradients times a number, and a mark where one of them is not finite, by operators that work on pieces."""
    gradients, mark, factor = args
    finite = [torch.isfinite(g).all() for g in gradients]
    torch._foreach_mul_(gradients, factor)
    mark.masked_fill_(functools.reduce(torch.logical_and, finite).logical_not(), 1.0)


def _numbers(scalars: Any) -> Any:
    """One number for each element, also where they come as one tensor."""
    return scalars.tolist() if isinstance(scalars, torch.Tensor) else scalars


def _element(argument: Any, i: int) -> Any:
    return argument[i] if isinstance(argument, list | tuple) else argument
