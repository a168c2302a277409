"""Where PyTorch's meta kernels are wrong or cannot be asked, and what is true instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core.spec import Spec, contiguous_stride
from .call import OpCall, OutMeta, leaves, replace_leaves

_aten = torch.ops.aten


Correct = Callable[[OpOverload, tuple[OutMeta, ...], tuple, dict[str, Any]], tuple[OutMeta, ...]]


def _batch_statistics(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """Statistics of batch and layer normalisation: the meta kernels describe CUDA's also for the CPU."""
    if args[0].mesh.device_type != "cpu":
        return outs
    outs = _statistics(func, outs, args, kwargs)
    training = OpCall(func, args, kwargs).arg("training", not func.overloadpacket.__name__.endswith("no_training"))
    return outs if training else (outs[0], *(OutMeta(torch.Size([0]), (1,), m.dtype) for m in outs[1:]))


def _statistics(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """Statistics have the input's dtype, but float32 where parameters have another."""
    specs = leaves((args, kwargs), Spec)
    dtype = specs[0].dtype if all(s.dtype == specs[0].dtype for s in specs) else torch.float32
    return (outs[0], *(OutMeta(m.shape, m.stride, dtype) for m in outs[1:]))


def _convolution(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """With a tensor in channels-last layout, results are laid out as the kernel chosen for this device does."""
    specs = leaves((args, kwargs), Spec)
    if not any(channels_last(s.shape, s.stride) for s in specs):
        return outs
    if specs[0].mesh.device_type != "cpu":
        return tuple(m if len(m.shape) < 4 else OutMeta(m.shape, channels_last_stride(m.shape), m.dtype) for m in outs)
    with FakeTensorMode():
        fake = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype) for s in specs]
        given = iter(fake)
        args, kwargs = replace_leaves((args, kwargs), Spec, lambda _: next(given))
        return tuple(OutMeta(t.shape, t.stride(), t.dtype) for t in leaves(func(*args, **kwargs), torch.Tensor))


def channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor counts as laid out channels last; one that is contiguous as well does not."""
    wanted = channels_last_stride(shape) if len(shape) in (3, 4, 5) else None
    return wanted is not None and tuple(stride) == wanted and wanted != contiguous_stride(shape)


def channels_last_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Stride of a batch of lines, images or volumes in channels-last layout."""
    _, channels, *spatial = shape
    inner = contiguous_stride([*spatial, channels])
    return (max(math.prod(shape[1:]), 1), 1, *inner[:-1])


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


def _batch_gradients(*args: Any, **kwargs: Any) -> tuple:
    """Gradients of batch normalisation: only those that the mask asks for."""
    func = _aten.native_batch_norm_backward.default
    mask = OpCall(func, args, kwargs).arg("output_mask")
    return tuple(t if wanted else None for t, wanted in zip(func(*args, **kwargs), mask, strict=True))


def _attention_layer(*args: Any, **kwargs: Any) -> tuple:
    """A fused attention layer gives weights only where they are needed."""
    func = _aten._native_multi_head_attention.default
    out, weights = func(*args, **kwargs)
    return out, weights if OpCall(func, args, kwargs).arg("need_weights") else None


def _empty_mean(func: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of means over nothing, for which the meta kernels divide by zero, look like those of sums."""

    def stand_in(grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, *rest: Any) -> Any:
        return func(grad_output, self, target, 2 if self.numel() == 0 else reduction, *rest)

    return stand_in


def _nansum(self: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    """An empty list of dims means all, which its meta kernel takes for none."""
    return _aten.nansum.default(self, dim or None, keepdim, dtype=dtype)


def _power(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """A boolean to the power of a boolean, for which the meta kernel says integer; powers of a number lie row by row."""
    if not isinstance(args[0], Spec):
        return _row_major(func, outs, args, kwargs)
    if getattr(args[0], "dtype", None) is torch.bool and isinstance(args[1], bool):
        return tuple(OutMeta(out.shape, out.stride, torch.bool) for out in outs)
    return outs


def _bags(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """What the CPU's kernels give beside the bags depends on dtype, layout and mode: asked of them, with a table of one row."""
    if args[0].mesh.device_type != "cpu":
        return outs

    def blank(spec: Spec) -> torch.Tensor:
        if spec is args[0]:
            return torch.zeros(1, spec.shape[1], dtype=spec.dtype)
        return torch.zeros(spec.shape, dtype=spec.dtype)

    with torch.no_grad():
        results = func(*replace_leaves(args, Spec, blank), **replace_leaves(kwargs, Spec, blank))
    return tuple(OutMeta(t.shape, t.stride(), t.dtype) for t in results)


def _columns_of(number: int) -> Correct:
    """On the CPU one output is laid out by columns, where the meta kernel says rows."""

    def correct(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
        out = outs[number]
        if args[0].mesh.device_type != "cpu" or len(out.shape) < 2:
            return outs
        return (*outs[:number], OutMeta(out.shape, _by_columns(out.shape), out.dtype), *outs[number + 1 :])

    return correct


def _by_columns(shape: Sequence[int]) -> tuple[int, ...]:
    """Stride of a batch of matrices that lie column by column."""
    *outer, columns, rows = contiguous_stride([*shape[:-2], shape[-1], shape[-2]])
    return (*outer, rows, columns)


def _reflectors(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A QR factorisation's parts as LAPACK gives them; it has no meta kernel."""
    factors = self.new_empty_strided(self.shape, _by_columns(self.shape))
    return factors, self.new_empty((*self.shape[:-2], min(self.shape[-2:])))


def _bin_edges(self: torch.Tensor, bins: Sequence[int], **kwargs: Any) -> list[torch.Tensor]:
    """The edges of bins, one row for each dim; they have no meta kernel."""
    return [self.new_empty(n + 1) for n in bins]


def _bin_counts(self: torch.Tensor, bins: Sequence[Any], **kwargs: Any) -> torch.Tensor:
    """Counts of bins that are given by number or by their edges."""
    return self.new_empty([n if isinstance(n, int) else n.shape[0] - 1 for n in bins])


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Steps of optimizers return nothing; they have no meta kernel."""


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Contiguous tensors of one dtype that fit, end to end: a cache that grows asks at every token, and Python answers slowly."""
    first, along = tensors[0], dim % max(tensors[0].ndim, 1)
    around = [(t.shape[:along], t.shape[along + 1 :], t.dtype) for t in tensors]
    plain = all(part == around[0] for part in around) and -first.ndim <= dim < first.ndim
    if not (plain and all(t.is_contiguous() and not _is_channels_last(t) for t in tensors)):
        return _aten.cat.default(tensors, dim)
    return first.new_empty((*first.shape[:along], sum(t.shape[along] for t in tensors), *first.shape[along + 1 :]))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim])


def _where(condition: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Bytes, which the kernels take for truth, and the meta kernel refuses."""
    return _aten.where(condition.bool(), *rest)


def _picked(func: Callable[..., Any]) -> Callable[..., Any]:
    """Indexing by bytes, which count as a mask."""

    def stand_in(self: torch.Tensor, indices: Sequence[Any], *rest: Any, **kwargs: Any) -> Any:
        masks = [i.bool() if isinstance(i, torch.Tensor) and i.dtype == torch.uint8 else i for i in indices]
        return func(self, masks, *rest, **kwargs)

    return stand_in


def _shifted(packet: Any) -> Callable[..., Any]:
    """Booleans shifted count as numbers, which the meta kernel refuses: the result is as a sum's."""

    def stand_in(self: Any, other: Any) -> torch.Tensor:
        dtypes = [t.dtype for t in (self, other) if isinstance(t, torch.Tensor)]
        mixed = torch.bool in dtypes and torch.result_type(self, other) != torch.bool
        return torch.add(self, other) if mixed else packet(self, other)

    return stand_in


LAID_OUT_BY_KERNELS = (
    *("copysign", "div", "floor_divide", "heaviside", "logaddexp", "logaddexp2", "logical_and", "logical_or", "logical_xor"),
    *("special_xlog1py", "xlogy", "log_sigmoid_forward", "binary_cross_entropy", "native_dropout_backward", "_fft_r2c"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "elu_backward", "hardsigmoid_backward", "hardswish_backward"),
    *("hardtanh_backward", "logit_backward", "softplus_backward", "binary_cross_entropy_backward", "huber_loss_backward"),
    *("mse_loss_backward", "smooth_l1_loss_backward"),
)
"""Operators that take tensors of any size, and whose meta kernels lay results out otherwise than the kernels do."""

ROW_MAJOR = ("glu_backward", "native_layer_norm_backward", "nonzero_static")
"""Those whose kernels lay results out row by row, where the meta kernels follow an argument."""


def _laid_out_by_kernels(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """The order of dims in memory that the CPU's kernel gives, asked of it with dims no longer than two."""
    specs = leaves((args, kwargs), Spec)
    if all(s.meta.is_contiguous() for s in specs):
        return outs
    with torch.no_grad():
        results = leaves(func(*replace_leaves(args, Spec, _small), **replace_leaves(kwargs, Spec, _small)), torch.Tensor)
    return tuple(OutMeta(m.shape, _stride_in(_order(t.stride()), m.shape), m.dtype) for m, t in zip(outs, results, strict=True))


def _small(spec: Spec) -> torch.Tensor:
    """A tensor of the same dtype, order of dims in memory and expanded dims, with two elements along every dim of more."""
    shape = [min(n, 2) for n in spec.shape]
    dense = _stride_in(_order(spec.stride), shape)
    stride = [0 if step == 0 else n for step, n in zip(spec.stride, dense, strict=True)]
    return torch.ones(shape, dtype=spec.dtype).as_strided(shape, stride)


def _order(stride: Sequence[int]) -> list[int]:
    """Dims from the largest stride to the smallest."""
    return sorted(range(len(stride)), key=lambda d: -stride[d])


def _stride_in(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a dense tensor with its dims in this order in memory."""
    stride = dict(zip(order, contiguous_stride([shape[d] for d in order]), strict=True))
    return tuple(stride[d] for d in range(len(shape)))


def _row_major(func: OpOverload, outs: tuple[OutMeta, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[OutMeta, ...]:
    """On the CPU, row by row whatever the arguments' layout."""
    if leaves((args, kwargs), Spec)[0].mesh.device_type != "cpu":
        return outs
    return tuple(OutMeta(m.shape, contiguous_stride(m.shape), m.dtype) for m in outs)


CORRECTIONS: dict[str, Correct] = {
    **{f"aten::{name}": _laid_out_by_kernels for name in LAID_OUT_BY_KERNELS},
    **{f"aten::{name}": _row_major for name in ROW_MAJOR},
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_forward_only": _bags,
    "aten::_linalg_svd": _columns_of(2),
    "aten::linalg_eig": _columns_of(1),
    "aten::native_layer_norm": _batch_statistics,
    "aten::native_group_norm": _statistics,
    "aten::_native_batch_norm_legit": _batch_statistics,
    "aten::_native_batch_norm_legit_no_training": _batch_statistics,
    "aten::convolution": _convolution,
    "aten::pow": _power,
    "aten::convolution_backward": _convolution,
}
"""Where a meta kernel differs from the real one: what is true instead."""

STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::nansum": _nansum,
    **{f"aten::_fused_{name}_": _nothing for name in ("adagrad", "adam", "adamw", "sgd")},
    "aten::_linalg_check_errors": lambda info, api_name, *, is_matrix: None,
    "aten::_histogramdd_bin_edges": _bin_edges,
    "aten::_histogramdd_from_bin_cts": _bin_counts,
    "aten::_histogramdd_from_bin_tensors": _bin_counts,
    "aten::where": _where,
    "aten::cat": _joined,
    "aten::index": _picked(_aten.index.Tensor),
    "aten::__lshift__": _shifted(_aten.__lshift__),
    "aten::__rshift__": _shifted(_aten.__rshift__),
    "aten::bitwise_left_shift": _shifted(_aten.bitwise_left_shift),
    "aten::bitwise_right_shift": _shifted(_aten.bitwise_right_shift),
    "aten::_embedding_bag": _likelihood(_aten._embedding_bag.default),
    "aten::_embedding_bag_forward_only": _likelihood(_aten._embedding_bag_forward_only.default),
    "aten::geqrf": _reflectors,
    "aten::_grouped_mm": _grouped_product,
    "aten::nll_loss_forward": _likelihood(_aten.nll_loss_forward.default),
    "aten::nll_loss_backward": _likelihood(_aten.nll_loss_backward.default),
    "aten::nll_loss2d_forward": _likelihood(_aten.nll_loss2d_forward.default),
    "aten::nll_loss2d_backward": _likelihood(_aten.nll_loss2d_backward.default),
    "aten::_native_multi_head_attention": _attention_layer,
    "aten::native_batch_norm_backward": _batch_gradients,
    "aten::mse_loss_backward": _empty_mean(_aten.mse_loss_backward.default),
    "aten::smooth_l1_loss_backward": _empty_mean(_aten.smooth_l1_loss_backward.default),
    "aten::huber_loss_backward": _empty_mean(_aten.huber_loss_backward.default),
}
"""Operators whose meta kernel cannot be asked, and what is asked instead."""
