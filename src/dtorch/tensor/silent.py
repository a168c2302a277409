"""Batch normalisation kernels that write the running statistics without saying so in their schema.

Such a write would be missed: by views, by pieces that are copies, by plain tensors mixed in. The same kernels have another
name under which they say it.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def native_batch_norm(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``native_batch_norm``: (output, mean, inverse deviation)."""
    return _normalise(*args, **kwargs)


def cudnn_batch_norm(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """cuDNN's forward, run by PyTorch's own kernel: (output, mean, inverse deviation, empty reserve)."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "exponential_average_factor", "epsilon")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    out = _normalise(*[given[name] for name in names])
    return *out, _aten.new_empty.default(given["input"], [0], dtype=torch.uint8)


def cudnn_batch_norm_backward(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """cuDNN's backward, run by PyTorch's own kernel."""
    names = ("input", "grad_output", "weight", "running_mean", "running_var", "save_mean", "save_var", "epsilon")
    x, grad, weight, mean, var, saved_mean, saved_invstd, eps = [
        {**dict(zip(names, args, strict=False)), **kwargs}[n] for n in names
    ]
    every = [True, True, True]
    return _aten.native_batch_norm_backward.default(grad, x, weight, mean, var, saved_mean, saved_invstd, True, eps, every)


def batch_norm_with_update(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A training step by its newer name: (output, mean, inverse deviation, empty reserve)."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias, mean, var, momentum, eps = [given[name] for name in names]
    return *_normalise(x, weight, bias, mean, var, True, momentum, eps), _aten.new_empty.default(x, [0], dtype=torch.uint8)


def _normalise(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    if mean is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    if not training:
        return _aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, var, momentum, eps)
    return _aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, momentum, eps)


HANDLERS = {
    _aten.native_batch_norm.default: native_batch_norm,
    _aten._batch_norm_with_update.default: batch_norm_with_update,
    _aten.cudnn_batch_norm.default: cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
}
