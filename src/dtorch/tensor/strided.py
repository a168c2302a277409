"""``as_strided``: it counts in memory, and the memory of a view is not all of what it was taken from.

A tensor here knows its strides and not where it begins in its base. So places counted from the beginning of the base, and
places between the elements of a view, are refused where they cannot be found.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import UsageError, four_parts
from ..sharding.call import schema_of
from . import dispatch

_aten = torch.ops.aten


def strided(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the operator if what it reaches lies where the tensor's elements do.

    Raises:
        UsageError: it would reach beside or before them.
    """
    tensor = args[0]
    if isinstance(tensor, cls) and not _owns_memory(tensor):
        given = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
        if given.get("storage_offset") is not None:
            raise _refused(tensor, "storage_offset counts from the beginning of the base, and the gradient would too")
        if not _within(tensor, given["size"], given["stride"]):
            raise _refused(tensor, "size and stride reach beside the elements of the view")
    return dispatch.ordinary(cls, func, args, kwargs)


def _owns_memory(tensor: Any) -> bool:
    """Whether the tensor begins where its memory does: no view, or one that shows all of its base without gaps."""
    group, base = tensor._value.group, tensor._base
    if group is None or (group.link is None and group.root == tensor._value.handle):
        return True
    return base is not None and base.numel() == tensor.numel() and _dense(tensor) and _dense(base) and _owns_memory(base)


def _dense(tensor: Any) -> bool:
    return bool(_aten.is_non_overlapping_and_dense.default(tensor._spec.meta))


def _within(tensor: Any, size: Any, stride: Any) -> bool:
    """Whether the places are elements of the tensor, or lie in memory that is here as a whole."""
    if not tensor._spec.axes and tensor._value.group.link is None:
        return True
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return 0 in size or (last < tensor.numel() and _dense(tensor))


def _refused(tensor: Any, why: str) -> UsageError:
    given = f"as_strided of a view of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
    rule = f"{why}; a view on a mesh does not know where it lies in its base"
    return UsageError(four_parts(given, rule, "the operator on your line", "apply it to the base, or to a t.clone()"))


HANDLERS = dict.fromkeys((_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default), strided)
