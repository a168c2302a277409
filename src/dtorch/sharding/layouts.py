"""Global tensors are dense: what would be sparse, quantized, nested or laid out for mkldnn is refused, not mistaken."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from ..core.errors import UsageError, four_parts
from .call import leaves, operator_name, schema_of

RULE = "a global tensor is dense and strided; none is sparse, quantized, nested or laid out for mkldnn"
REMEDY = "keep it dense, or go on with the plain tensor t.to_torch() of its values"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the one kind that has pieces."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def dense(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor itself, where it is dense.

    Raises:
        UsageError: it is not.
    """
    if is_dense(tensor):
        return tensor
    kind = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
    raise UsageError(four_parts(f"a plain tensor that is {kind}", RULE, where, "convert it first, e.g. with t.to_dense()"))


def check_dense(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a call that asks for another layout, by its arguments or by what the operator is.

    Raises:
        UsageError: it does.
    """
    asked = next((a for a in leaves((args, kwargs), torch.layout) if a is not torch.strided), None)
    if asked is None and schema_of(func).name.removeprefix("aten::") not in OTHER_LAYOUTS:
        return
    given = operator_name(func) + ("" if asked is None else f" with layout={asked}")
    raise not_dense(given)


def not_dense(given: str) -> UsageError:
    """The error of a call whose result would not be dense."""
    return UsageError(four_parts(given, RULE, "the operator on your line", REMEDY))


_OTHERS = """
    _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc to_mkldnn mkldnn_reorder_conv2d_weight
    mkldnn_reorder_conv3d_weight quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic
    _empty_affine_quantized _empty_per_channel_affine_quantized _make_per_tensor_quantized_tensor
    _make_per_channel_quantized_tensor _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _sparse_coo_tensor_unsafe sparse_coo_tensor sparse_compressed_tensor _sparse_compressed_tensor_unsafe
    _sparse_compressed_tensor_with_dims _sparse_csr_tensor_unsafe sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor
    sparse_bsc_tensor _spdiags sparse_mask _sparse_mask_projection sspaddmm hspmm _nested_tensor_from_mask
    _nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list _nested_view_from_buffer
    _nested_view_from_buffer_copy _nested_view_from_jagged _nested_view_from_jagged_copy _nested_from_padded
    _nested_from_padded_and_nested_example _nested_from_padded_tensor
"""
OTHER_LAYOUTS = frozenset(_OTHERS.split())
"""Operators whose result is of another layout by what they are."""
