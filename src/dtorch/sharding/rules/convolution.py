"""Convolution: batch, output channels, input channels (a partial sum), groups, and spatial dims whose windows do not overlap.

Shapes: input (n, c, spatial), weight (o, c / groups, window), output (n, o, spatial); transposed, the weight is
(c, o / groups, window).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall, leaves
from ..labels import Dim, PartialRow
from ..metakernels import channels_last
from ..rule import Rule
from .compose import changed, named, settled, sharded_on
from .counted import Counted

_aten = torch.ops.aten
_NONEMPTY = frozenset(["c", "o", "g", "y0", "y1", "y2"])


class Geometry:
    """Labels of a convolution's tensors."""

    def __init__(self, call: OpCall) -> None:
        self.x, self.w = call.arg("input").shape, call.arg("weight").shape
        self.groups, self.transposed = call.arg("groups"), call.arg("transposed")
        self.out_channels = self.w[1] * self.groups if self.transposed else self.w[0]
        spatial = [self._spatial(call, d) for d in range(len(self.x) - 2)]
        inner, outer = self._channels()
        window = [None] * len(spatial)
        first, second = (inner, outer) if self.transposed else (outer, inner)
        self.input: list[Dim] = ["n", inner, *[s[0] for s in spatial]]
        self.weight: list[Dim] = [first, None if self.groups > 1 else second, *window]
        self.bias: list[Dim] = [outer]
        self.output: list[Dim] = ["n", outer, *[s[1] for s in spatial]]

    def _channels(self) -> tuple[Dim, Dim]:
        """Labels of input and output channels; a cut of grouped channels never parts a group."""
        if self.groups == 1:
            return "c", "o"
        return ("g", self.x[1] // self.groups), ("g", self.out_channels // self.groups)

    def _spatial(self, call: OpCall, d: int) -> tuple[Dim, Dim]:
        """Labels of a spatial dim of input and output, None where windows overlap, reach over the rim or leave a rest."""

        def of(name: str) -> int:
            values = call.arg(name)
            return values[d] if len(values) > d else values[0]

        stride, extent = of("stride"), of("dilation") * (self.w[2 + d] - 1) + 1
        if of("padding") or extent > stride:
            return None, None
        label = f"y{d}"
        if self.transposed:
            return (label, (label, stride)) if extent + of("output_padding") == stride else (None, None)
        return ((label, stride), label) if self.x[2 + d] % stride == 0 else (None, None)

    def groups_of(self, channels: int, of_input: bool) -> int:
        """How many groups a piece with so many channels holds."""
        per_group = (self.x[1] if of_input else self.out_channels) // self.groups
        return channels // per_group


class Convolution(Counted):
    """A convolution whose results on every piece are laid out in memory as those of the whole."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Kernels are chosen by local sizes, and not every one keeps the layout of the whole: bring their results into it."""
        specs = [v.spec for v in leaves((args, kwargs), Value)]
        if all(s.meta.is_contiguous() for s in (*specs, *outs)):
            return None
        local = self.local_args(call, specs, outs)
        args, kwargs = changed(call, args, kwargs, **local)
        wanted = iter(outs)
        gaps = call.arg("output_mask") or [True]
        results = builder.local(call.func, args, kwargs, [next(wanted) if m else None for m in gaps])
        return [self._laid_out(builder, v) for v in results]

    def _laid_out(self, builder: Builder, value: Value) -> Value:
        spec = value.spec
        if len(spec.shape) < 3 or spec.meta.is_contiguous():
            return builder.local(_aten.contiguous.default, [value], {}, [spec])[0]
        if len(spec.shape) > 3 and channels_last(spec.shape, spec.stride):
            last = torch.channels_last if len(spec.shape) == 4 else torch.channels_last_3d
            return builder.local(_aten.contiguous.default, [value], {"memory_format": last}, [spec])[0]
        value = builder.local(_aten.permute.default, [value, list(spec.order)], {}, [spec])[0]
        value = builder.local(_aten.contiguous.default, [value], {}, [spec])[0]
        back = [spec.order.index(d) for d in range(len(spec.order))]
        return builder.local(_aten.permute.default, [value, back], {}, [spec])[0]


def forward(call: OpCall) -> Convolution | None:
    """Input channels give a partial sum only without a bias; with one the product is composed."""
    if len(call.arg("input").shape) != len(call.arg("weight").shape):
        return None
    at = Geometry(call)
    bias = call.arg("bias") is not None
    counts = {"groups": lambda shapes: at.groups_of(shapes[0][1], of_input=True)} if at.groups > 1 else {}
    rows = [] if bias else [PartialRow((True, False)), PartialRow((False, True))]
    inputs = [at.input, at.weight, *[at.bias] * bias]
    return Convolution(inputs, [at.output], {} if bias else {"c": "sum"}, rows, nonempty=_NONEMPTY, counts=counts)


def without_bias(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """The product of split input channels, summed over the pieces, and the bias once."""
    given = named(call, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    inner = 0 if given["transposed"] else 1
    if bias is None or given["groups"] > 1 or not (sharded_on(x.spec, [1]) or sharded_on(weight.spec, [inner])):
        return None
    args, kwargs = changed(call, args, kwargs, bias=None)
    out = settled(builder, builder.op(call.func, *args, **kwargs))
    column = builder.op(_aten.view.default, bias, [1, bias.spec.shape[0], *[1] * (len(x.spec.shape) - 2)])
    return [builder.op(_aten.add.Tensor, out, column)]


def backward(call: OpCall) -> Convolution | None:
    """Gradients of input, weight and bias, as the mask wants them; the bias' does not depend on input channels."""
    if len(call.arg("input").shape) != len(call.arg("weight").shape):
        return None
    at, mask = Geometry(call), call.arg("output_mask")
    outputs = [dims for dims, wanted in zip((at.input, at.weight, at.bias), mask, strict=True) if wanted]
    counts: dict[str, Any] = {}
    if at.groups > 1:
        counts["groups"] = lambda shapes: at.groups_of(shapes[1][1], of_input=True)
    if call.arg("bias_sizes") is not None:
        counts["bias_sizes"] = lambda shapes: [shapes[0][1]]
    reduce = dict.fromkeys(["n", "o", "y0", "y1", "y2"], "sum")
    alike = {"c": (len(outputs) - 1,)} if mask[2] else {}
    rows = [PartialRow((True, False, False))]
    inputs = [at.output, at.input, at.weight]
    return Convolution(inputs, outputs, reduce, rows, nonempty=_NONEMPTY, alike=alike, counts=counts)


TABLE = {
    "convolution": Rule(forward, without_bias),
    "convolution_backward": Rule(backward),
}
