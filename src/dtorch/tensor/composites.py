"""Composite operators that PyTorch's C++ would run wrongly on a tensor without memory, taken whole before it does.

A composite is C++ code that calls other operators, and dispatch sees those alone. What the code does between them, such as
writing to a part of ``out=`` or reading an index from memory, it does to an empty shell. A kernel of ours stands before
it, at the one dispatch key that only tensors with a dispatch of their own have: plain tensors never come here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..sharding.call import leaves, operator_name, schema_of
from ..sharding.layouts import not_dense
from . import moving, outs

_KEY = torch._C.DispatchKey.PythonTLSSnapshot
Kernel = Callable[[type, Any, tuple, dict[str, Any]], Any]


def into_out(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``out=`` of a composite: its functional form, copied to where it was asked for."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in leaves((args, kwargs), torch.Tensor)):
        name = func.overloadpacket.__name__
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    # As in PyTorch, autocast leaves what is written to out= alone.
    with torch.no_grad(), torch._C._DisableAutocast():
        return outs.into_out(cls, func, args, kwargs)


def split_at(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``tensor_split`` at indices, or into a number of sections, that are a tensor: read, for shapes depend on them."""
    given = dict(zip(("self", "tensor_indices_or_sections", "dim"), args, strict=False)) | kwargs
    indices = given["tensor_indices_or_sections"]
    where = (moving.fetch_whole(indices) if isinstance(indices, cls) else indices).tolist()
    overload = torch.ops.aten.tensor_split.indices if indices.ndim else torch.ops.aten.tensor_split.sections
    return overload(given["self"], where, given.get("dim", 0))


def filled_diagonal(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``fill_diagonal_``: PyTorch reckons with the tensor's place in memory, which a view here does not know."""
    given = dict(zip(("self", "fill_value", "wrap"), args, strict=False)) | kwargs
    tensor, value = given["self"], given["fill_value"]
    if tensor.ndim < 2:
        raise RuntimeError("dimensions must larger than 1")
    if tensor.ndim > 2 and len(set(tensor.shape)) > 1:
        raise RuntimeError("all dimensions of input must be of equal length")
    height, width = tensor.shape[:2]
    starts = range(0, height, width + 1) if given.get("wrap") and tensor.ndim == 2 else (0,)
    for start in starts:
        line = tensor[start:] if start else tensor
        while line.ndim > 1:
            line = line.diagonal(0, 0, line.ndim - 1)
        line.fill_(value)
    return tensor


def refused(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What would make a sparse tensor."""
    raise not_dense(operator_name(func))


def loss_of_each(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The loss of each row, by a linear layer and cross entropy: the operator's own backward writes to memory it makes itself."""
    names = [a.name for a in schema_of(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["linear_weight"], given["linear_bias"]
    options = {"weight": given["weight"], "ignore_index": given["ignore_index"], "reduction": "none"}
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight, bias), given["target"], **options)


def _installed(cls: type, find: Callable[[], Any], kernel: Kernel) -> Callable[..., Any]:
    """The kernel where a global tensor is among the arguments; PyTorch's own for other tensors with a dispatch of their own.

    Args:
        find: gives the operator, which may not be there before its first call.
    """

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        func = find()
        if leaves((args, kwargs), cls):
            return kernel(cls, func, args, kwargs)
        return func.redispatch(keys.remove(_KEY), *args, **kwargs)

    return run


OUT = """
    absolute.out arccos.out arccosh.out arcsin.out arcsinh.out arctan.out arctan2.out arctanh.out argsort.stable_out
    chain_matmul.out clip.Tensor_out clip.out column_stack.out concat.out concatenate.out cross.out diag.out diff.out
    divide.out divide.out_mode dstack.out fft_fft.out fft_fft2.out fft_fftn.out fft_hfft.out fft_hfft2.out fft_hfftn.out
    fft_ifft.out fft_ifft2.out fft_ifftn.out fft_ihfft.out fft_irfft.out fft_irfft2.out
    fft_irfftn.out fft_rfft.out fft_rfft2.out fft_rfftn.out fix.out float_power.Scalar_out float_power.Tensor_Scalar_out
    float_power.Tensor_Tensor_out frobenius_norm.out ger.out greater.Scalar_out greater.Tensor_out
    greater_equal.Scalar_out greater_equal.Tensor_out hstack.out inner.out inverse.out kron.out less.Scalar_out
    less.Tensor_out less_equal.Scalar_out less_equal.Tensor_out linalg_cholesky.out linalg_cond.out
    linalg_cond.p_str_out linalg_det.out linalg_eigh.eigvals linalg_eigvalsh.out linalg_inv.out linalg_ldl_factor.out
    linalg_lu_factor.out linalg_matmul.out linalg_matrix_norm.out linalg_matrix_norm.str_ord_out linalg_matrix_power.out
    linalg_matrix_rank.atol_rtol_float_out linalg_matrix_rank.atol_rtol_tensor_out linalg_matrix_rank.out
    linalg_matrix_rank.out_tol_tensor linalg_multi_dot.out linalg_norm.ord_str_out linalg_norm.out
    linalg_pinv.atol_rtol_float_out linalg_pinv.out linalg_pinv.out_rcond_tensor linalg_slogdet.out linalg_solve.out
    linalg_solve_ex.out linalg_svd.U linalg_svdvals.out linalg_tensorinv.out linalg_tensorsolve.out linalg_vecdot.out
    log_sigmoid.out lu_solve.out matmul.out matrix_power.out max.out min.out msort.out multilabel_margin_loss.out
    multiply.out nanmean.out nanquantile.out nanquantile.scalar_out negative.out nll_loss.out nll_loss2d.out
    not_equal.Scalar_out not_equal.Tensor_out nuclear_norm.dim_out nuclear_norm.out orgqr.out outer.out qr.Q
    quantile.out quantile.scalar_out row_stack.out slogdet.out slow_conv3d.out special_digamma.out special_erf.out
    special_erfc.out special_erfinv.out special_exp2.out special_expit.out special_expm1.out special_gammainc.out
    special_gammaincc.out special_gammaln.out special_i0.out special_log1p.out special_logit.out special_logsumexp.out
    special_multigammaln.out special_ndtr.out special_polygamma.out special_psi.out special_round.out special_sinc.out
    special_xlogy.other_scalar_out special_xlogy.out special_xlogy.self_scalar_out square.out std.out subtract.out svd.U
    take_along_dim.out tensordot.out thnn_conv2d.out true_divide.out var.out vstack.out
"""
"""Composites with ``out=``, by name and overload: every one that has a functional form, but for two.

PyTorch's ``fft_ihfft2`` and ``fft_ihfftn`` leave the conjugation out where they write to ``out=`` along one dim. As on plain
tensors, so here.
"""

OTHERS: dict[str, Kernel] = {
    "fill_diagonal_": filled_diagonal,
    "tensor_split.tensor_indices_or_sections": split_at,
    "sparse_coo_tensor.indices": refused,
    "sparse_coo_tensor.indices_size": refused,
    "sspaddmm": refused,
}
"""Composites that read a tensor's memory."""

LATE: dict[str, Kernel] = {"torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": loss_of_each}
"""Operators that PyTorch writes in Python, and makes when they are first called."""


def _operator(name: str, namespace: str = "aten") -> Any:
    """The operator of a name, or None in a PyTorch without it: the tables are those of the newest that is supported."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


_libraries: list[torch.library.Library] = []


def install(cls: type) -> None:
    """Put the kernels in place for a class of tensors; they stay as long as the library they are in."""
    library = _library("aten")
    for name, kernel in {**dict.fromkeys(OUT.split(), into_out), **OTHERS}.items():
        if _operator(name) is not None:
            library.impl(name, _installed(cls, partial(_operator, name), kernel), with_keyset=True)
    for qualified, kernel in LATE.items():
        namespace, _, name = qualified.partition("::")
        _library(namespace).impl(name, _installed(cls, partial(_operator, name, namespace), kernel), with_keyset=True)


def _library(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL", "PythonTLSSnapshot")
    _libraries.append(library)
    return library
