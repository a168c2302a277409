"""Output metadata from PyTorch's own meta kernels, never written by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..core.spec import Spec
from .call import OutMeta, has_out, leaves, operator_name, replace_leaves, schema_of
from .layouts import check_dense, is_dense, not_dense
from .metakernels import CORRECTIONS, STAND_INS
from .probe import kernel_takes

_DYNAMIC_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# Their shape depends on data only where an index is a mask, which their meta kernels refuse.
_DYNAMIC_BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)


def infer_outputs(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[OutMeta, ...], Any] | None:
    """Metadata of the tensor outputs, and the shape of the result tree (lists, tuples, None, non-tensors).

    Returns None when the outputs depend on data, or no meta kernel exists: then only a run can tell.

    Raises:
        UsageError: the result would not be dense.
        Whatever PyTorch raises for arguments that do not fit, at once and in its own words.
    """
    check_dense(func, args, kwargs)
    if _is_dynamic(func):
        return None
    # An ``out=`` argument may be resized, and the meta tensor of a spec is shared.
    meta = _own_meta if has_out(func) else _shared_meta
    meta_args = replace_leaves(args, Spec, meta)
    meta_kwargs = replace_leaves(kwargs, Spec, meta)
    meta_args, meta_kwargs = _on_meta(func, meta_args, meta_kwargs)
    try:
        with torch.no_grad():
            stand_in = None if has_out(func) else STAND_INS.get(schema_of(func).name)
            result = (stand_in or func)(*meta_args, **meta_kwargs)
    except RuntimeError as error:
        if _lacks_meta_kernel(error) or kernel_takes(func, args, kwargs):
            return None
        raise
    made = leaves(result, torch.Tensor)
    if not all(map(is_dense, made)):
        raise not_dense(operator_name(func))
    outs = tuple(OutMeta(t.shape, t.stride(), t.dtype) for t in made)
    correct = CORRECTIONS.get(schema_of(func).name)
    outs = outs if correct is None else correct(func, outs, args, kwargs)
    return outs, replace_leaves(result, torch.Tensor, lambda _: ...)


def _lacks_meta_kernel(error: RuntimeError) -> bool:
    """Whether PyTorch says so: by the type that its dispatcher raises, or in words. The call's run tells the outputs then."""
    # It is PyTorch's dispatcher that raises this type, for an operator without a meta kernel: nothing here is left unwritten.
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error) or "Meta" in str(error)


def _shared_meta(spec: Spec) -> torch.Tensor:
    return spec.meta


def _own_meta(spec: Spec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _on_meta(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Send every device argument, given or defaulted, to the meta device; generators are not needed there."""
    names = _places(func)
    if not names:
        return args, kwargs
    args = tuple("meta" if isinstance(v, torch.device) else None if isinstance(v, torch.Generator) else v for v in args)
    kwargs = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
    for at, name in names:
        if at >= len(args) and (name in kwargs or not leaves((args, kwargs), torch.Tensor)):
            kwargs[name] = torch.device("meta")
    return args, kwargs


@cache
def _places(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each device argument; of a generator, a position that no call leaves open."""
    kinds = [(at, a.name, str(a.type)) for at, a in enumerate(schema_of(func).arguments)]
    return tuple((at if "Device" in kind else -1, name) for at, name, kind in kinds if "Device" in kind or "Generator" in kind)


@cache
def _is_dynamic(func: OpOverload) -> bool:
    """Whether output shapes depend on data."""
    return func not in _DYNAMIC_BY_MASK and any(tag in func.tags for tag in _DYNAMIC_TAGS)
