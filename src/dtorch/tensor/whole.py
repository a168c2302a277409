"""``linear`` on a batch of split sequences, taken whole before PyTorch flattens it.

PyTorch flattens the batch and the sequence of a linear layer's input into rows. Where the sequence is split, no device would
hold a run of these rows, so rows would have to move, twice for every layer. A linear layer does not need them flat.

The kernel that sees to it stands before every ``linear`` and takes about two microseconds, so it is put in place when a
mesh with an axis for the sequence is first used.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.mesh import DeviceMesh
from ..core.operators import own
from ..core.spec import Spec
from . import dispatch

SEQUENCE_AXES = ("ring_cp", "ulysses_cp")
SEQUENCE_DIM = 1
_KEY = torch._C.DispatchKey.PythonTLSSnapshot
_linear = torch.ops.aten.linear.default
_libraries: list[torch.library.Library] = []


class Linear(torch.autograd.Function):
    """``input @ weight.T + bias`` as one operator; (batch, sequence, features)."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(input, weight)
        ctx.biased = bias is not None
        return dispatch.ordinary(type(input), _linear, (input, weight, bias) if ctx.biased else (input, weight), {})

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any, Any]:
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_input = torch.nn.functional.linear(grad, weight.t()) if wanted[0] else None
        by_weight = _weight_gradient(grad, input) if wanted[1] else None
        return by_input, by_weight, grad.sum((0, 1)) if ctx.biased and wanted[2] else None


def _weight_gradient(grad: Any, input: Any) -> Any:
    """What a loss changes by with a weight; by operators that have gradients where these are wanted in turn."""
    if torch.is_grad_enabled():
        return torch.bmm(grad.transpose(1, 2), input).sum(0)
    return dispatch.ordinary(type(input), own("weight_gradient"), (grad, input), {})


def needs(mesh: DeviceMesh, cls: type) -> None:
    """See that the kernel is in place where a mesh has an axis for the sequence."""
    if not _libraries and any(name in SEQUENCE_AXES for name in mesh.axis_names()):
        library = torch.library.Library("aten", "IMPL", "PythonTLSSnapshot")
        library.impl("linear", _kernel(cls), with_keyset=True)
        _libraries.append(library)


def _kernel(cls: type) -> Any:
    def run(keys: Any, input: Any, weight: Any, bias: Any = None) -> Any:
        given = (input, weight) if bias is None else (input, weight, bias)
        if input.ndim != 3 or not all(type(t) is cls or isinstance(t, cls) for t in given) or not _unflattened(input._spec):
            return _linear.redispatch(keys.remove(_KEY), input, weight, bias)
        if torch.is_autocast_enabled("cpu" if input.is_cpu else "cuda"):
            input, weight, bias = (t if t is None else _autocast(t) for t in (input, weight, bias))
        return Linear.apply(input, weight, bias)

    return run


def _unflattened(spec: Spec) -> bool:
    """Whether batch and sequence cannot be flattened where they lie."""
    return spec.shape[0] > 1 and any(a in spec.axes for a in spec.sharding_axes(SEQUENCE_DIM))


def _autocast(tensor: Any) -> Any:
    """The tensor as autocast gives it to a product."""
    kind = tensor.device.type
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if narrow else tensor
