"""Whether an operator has a kernel for dtypes: asked of PyTorch's own CPU kernels, on tensors of one element, or of none.

Meta kernels check shapes, and take many dtypes that the kernels refuse: a difference of booleans, a product of float and
double. They also take an extreme of nothing. Without this the refusal would come from a worker, at the next value read.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..core.spec import Spec
from .builder import Changing
from .call import leaves, replace_leaves, schema_of, written_args


def check_dtypes(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run an operator that does not care for sizes on one element of each tensor; where one is empty, on their own sizes.

    Raises:
        Whatever PyTorch raises for these dtypes, in its own words.
    """
    specs = leaves((args, kwargs), Spec)
    number = _filling(func)
    if number is None or not specs or not all(s.device.type == "cpu" and s.dtype in DTYPES for s in specs):
        return
    count = _enough(func, kwargs)
    empty = count == 1 and not all(s.shape.numel() for s in specs)
    if empty and sum(s.shape.numel() for s in specs) > SMALL:
        return
    if any(d.type != "cpu" for d in leaves((args, kwargs), torch.device)):
        return
    given = replace_leaves((args, kwargs), Changing, lambda c: c.value)
    one = _one if written_args(func) else _kept_one

    def made(s: Spec) -> torch.Tensor:
        return one(s.shape if empty else (count,) * len(s.shape), number, s.dtype)

    one_args, one_kwargs = replace_leaves(given, Spec, made)
    if func is torch.ops.aten.convolution.default and not empty:
        one_args = _of_one_group(*one_args)
    with torch.no_grad():
        func(*one_args, **one_kwargs)


def kernel_takes(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the CPU's kernel takes what its meta kernel refused: where a tensor is empty, many do whatever the dtypes."""
    specs = leaves((args, kwargs), Spec)
    sizes = [s.shape.numel() for s in specs]
    if 0 not in sizes or sum(sizes) > SMALL or any(s.device.type != "cpu" for s in specs):
        return False
    given = replace_leaves((args, kwargs), Changing, lambda c: c.value)
    real_args, real_kwargs = replace_leaves(given, Spec, lambda s: torch.zeros(s.shape, dtype=s.dtype))
    try:
        with torch.no_grad():
            func(*real_args, **real_kwargs)
    except Exception:
        return False
    return True


def check_overlap(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """See that an elementwise write is to no expanded tensor: on pieces each element could have memory of its own.

    Raises:
        RuntimeError: it is, in PyTorch's words.
    """
    schema = schema_of(func)
    if schema.name in ALIKE or not (torch.Tag.pointwise in func.tags or schema.name == "aten::copy_"):
        return
    if schema.name == "aten::copy_" and args[0] is args[1]:
        # Which may be the tensor itself, and that is no write.
        return
    given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
    for spec in leaves([given.get(name) for name in written_args(func)], Spec):
        if spec.shape.numel() and any(step == 0 and n > 1 for step, n in zip(spec.stride, spec.shape, strict=True)):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
                "Please clone() the tensor before performing the operation."
            )


def _enough(func: OpOverload, kwargs: dict[str, Any]) -> int:
    """Elements along each dim: one, or as many as a variance needs not to warn."""
    if schema_of(func).name.removeprefix("aten::") not in SPREADS:
        return 1
    return 2 + max(0, int(kwargs.get("correction") or 1))


def _one(shape: tuple[int, ...], number: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full(shape, number, dtype=dtype)


_kept_one = lru_cache(1000)(_one)


@cache
def _filling(func: OpOverload) -> int | None:
    """What to fill the elements with; None for an operator that is not asked."""
    namespace, _, name = schema_of(func).name.partition("::")
    if namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    name = name.removesuffix("_")
    # A zero would be a divisor, a one an index beyond the end.
    return 1 if torch.Tag.pointwise in func.tags or name in SIZELESS else 0 if name in INDEXED else None


def _of_one_group(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> tuple:
    """A convolution's arguments where the channels are one; a transposed one's result would be padded to nothing."""
    none = [0] * len(stride)
    return x, weight, bias, stride, none if transposed else padding, dilation, transposed, none, 1


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


SMALL = 4096
"""Elements of all tensors together, up to which an empty tensor's partners are made in full."""

DTYPES = frozenset(
    getattr(torch, name)
    for name in _named("bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128")
)

SIZELESS = _named(
    """mm bmm addmm addbmm baddbmm addmv mv dot vdot addr convolution full_like
    trace sum prod mean nansum amax amin aminmax max min argmax argmin all any median nanmedian mode logsumexp
    _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort
    binary_cross_entropy mse_loss smooth_l1_loss huber_loss soft_margin_loss
    var std var_mean std_mean native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"""
)
"""Operators that take sizes of one whatever their other arguments are: products, what goes along dims, losses."""

SPREADS = _named("var std var_mean std_mean")
"""Those that warn of fewer numbers than their correction takes off."""

INDEXED = _named(
    """index_select gather scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce
    masked_scatter masked_fill embedding nll_loss_forward bucketize searchsorted"""
)
"""Operators that take sizes of one with every index 0."""

ALIKE = ("aten::fill_", "aten::zero_", "aten::masked_fill_")
"""Elementwise writes that PyTorch lets have an expanded tensor."""
