"""Where PyTorch's meta kernels are wrong or cannot be asked, and what is true instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.spec import Spec
from .call import OutMeta

_aten = torch.ops.aten


def _batch_statistics(outs: tuple[OutMeta, ...], specs: tuple[Spec, ...]) -> tuple[OutMeta, ...]:
    """Statistics of batch and layer normalisation: the meta kernels describe CUDA's also for the CPU."""
    return outs if specs[0].mesh.device_type != "cpu" else _statistics(outs, specs)


def _statistics(outs: tuple[OutMeta, ...], specs: tuple[Spec, ...]) -> tuple[OutMeta, ...]:
    """Statistics have the input's dtype, but float32 where parameters have another."""
    dtype = specs[0].dtype if all(s.dtype == specs[0].dtype for s in specs) else torch.float32
    return (outs[0], *(OutMeta(m.shape, m.stride, dtype) for m in outs[1:]))


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """A grouped product by a plain one of the same output: its meta kernel refuses dtypes that the CPU's kernel takes."""
    if a.dtype == torch.bfloat16 or offs is None:
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype) if a.dtype == torch.bfloat16 else a @ b
    groups = (offs.shape[0], *a.shape) if a.ndim == b.ndim == 2 else a.shape[-2:]
    return a.expand(groups) @ b if a.ndim == b.ndim else (a if a.ndim == 2 else a[0]) @ (b if b.ndim == 2 else b[0])


def _likelihood(func: Callable[..., Any]) -> Callable[..., Any]:
    """Class numbers of eight bits, which the kernels take and the meta kernels refuse, count as longer ones."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        longer = [a.long() if isinstance(a, torch.Tensor) and a.dtype == torch.uint8 else a for a in args]
        return func(*longer, **kwargs)

    return stand_in


def _empty_mean(func: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of means over nothing, for which the meta kernels divide by zero, look like those of sums."""

    def stand_in(grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, *rest: Any) -> Any:
        return func(grad_output, self, target, 2 if self.numel() == 0 else reduction, *rest)

    return stand_in


def _nansum(self: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    """An empty list of dims means all, which its meta kernel takes for none."""
    return _aten.nansum.default(self, dim or None, keepdim, dtype=dtype)


CORRECTIONS: dict[str, Callable[[tuple[OutMeta, ...], tuple[Spec, ...]], tuple[OutMeta, ...]]] = {
    "aten::native_layer_norm": _batch_statistics,
    "aten::native_group_norm": _statistics,
    "aten::_native_batch_norm_legit": _batch_statistics,
}
"""Where a meta kernel differs from the real one."""

STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::nansum": _nansum,
    "aten::_grouped_mm": _grouped_product,
    "aten::nll_loss_forward": _likelihood(_aten.nll_loss_forward.default),
    "aten::nll_loss_backward": _likelihood(_aten.nll_loss_backward.default),
    "aten::nll_loss2d_forward": _likelihood(_aten.nll_loss2d_forward.default),
    "aten::nll_loss2d_backward": _likelihood(_aten.nll_loss2d_backward.default),
    "aten::mse_loss_backward": _empty_mean(_aten.mse_loss_backward.default),
    "aten::smooth_l1_loss_backward": _empty_mean(_aten.smooth_l1_loss_backward.default),
    "aten::huber_loss_backward": _empty_mean(_aten.huber_loss_backward.default),
}
"""Operators whose meta kernel cannot be asked, and what is asked instead."""
