"""Output metadata from PyTorch's own meta kernels, never written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..core.spec import Spec
from .call import OutMeta, leaves, replace_leaves, schema_of

_DYNAMIC_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# Their shape depends on data only where an index is a mask, which their meta kernels refuse.
_DYNAMIC_BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)


def infer_outputs(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[OutMeta, ...], Any] | None:
    """Metadata of the tensor outputs, and the shape of the result tree (lists, tuples, None, non-tensors).

    Returns None when the outputs depend on data, or no meta kernel exists: then only a run can tell.

    Raises:
        Whatever PyTorch raises for arguments that do not fit, at once and in its own words.
    """
    if _is_dynamic(func):
        return None
    meta_args = replace_leaves(args, Spec, lambda s: s.meta)
    meta_kwargs = replace_leaves(kwargs, Spec, lambda s: s.meta)
    meta_args, meta_kwargs = _on_meta(func, meta_args, meta_kwargs)
    try:
        with torch.no_grad():
            result = STAND_INS.get(schema_of(func).name, func)(*meta_args, **meta_kwargs)
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "meta tensor" in str(error) or "Meta" in str(error):
            return None
        raise
    outs = tuple(OutMeta(t.shape, t.stride(), t.dtype) for t in leaves(result, torch.Tensor))
    correct = CORRECTIONS.get(schema_of(func).name)
    outs = outs if correct is None else correct(outs, tuple(leaves((args, kwargs), Spec)))
    return outs, replace_leaves(result, torch.Tensor, lambda _: ...)


def _batch_statistics(outs: tuple[OutMeta, ...], specs: tuple[Spec, ...]) -> tuple[OutMeta, ...]:
    """Statistics of batch and layer normalisation: the meta kernels describe CUDA's also for the CPU."""
    return outs if specs[0].mesh.device_type != "cpu" else _statistics(outs, specs)


def _statistics(outs: tuple[OutMeta, ...], specs: tuple[Spec, ...]) -> tuple[OutMeta, ...]:
    """Statistics have the input's dtype, but float32 where parameters have another."""
    dtype = specs[0].dtype if all(s.dtype == specs[0].dtype for s in specs) else torch.float32
    return (outs[0], *(OutMeta(m.shape, m.stride, dtype) for m in outs[1:]))


CORRECTIONS: dict[str, Callable[[tuple[OutMeta, ...], tuple[Spec, ...]], tuple[OutMeta, ...]]] = {
    "aten::native_layer_norm": _batch_statistics,
    "aten::native_group_norm": _statistics,
    "aten::_native_batch_norm_legit": _batch_statistics,
}
"""Where a meta kernel differs from the real one."""


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """A grouped product by a plain one of the same output: its meta kernel refuses dtypes that the CPU's kernel takes."""
    if a.dtype == torch.bfloat16 or offs is None:
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype) if a.dtype == torch.bfloat16 else a @ b
    groups = (offs.shape[0], *a.shape) if a.ndim == b.ndim == 2 else a.shape[-2:]
    return a.expand(groups) @ b if a.ndim == b.ndim else (a if a.ndim == 2 else a[0]) @ (b if b.ndim == 2 else b[0])


STAND_INS: dict[str, Callable[..., torch.Tensor]] = {"aten::_grouped_mm": _grouped_product}
"""Operators whose meta kernel cannot be asked, and what is asked instead."""


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
