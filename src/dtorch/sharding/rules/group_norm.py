"""Group normalisation: images and whole groups are labels; split positions and parted groups are composed of channel sums."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Dim
from ..rule import Rule
from .compose import aligned, cast, named, product, settled, sharded_on, total, wide
from .counted import Counted
from .normalization import inverse_root

_aten = torch.ops.aten
_NONEMPTY = frozenset("g")


class Geometry:
    """Labels of the tensors, and how many channels a group has."""

    def __init__(self, call: OpCall) -> None:
        self.per_group = call.arg("C") // call.arg("group")
        channels: Dim = ("g", self.per_group)
        self.input: list[Dim] = ["n", channels, *[None] * (len(call.arg("input").shape) - 2)]
        self.weight: list[Dim] = [channels]
        self.statistics: list[Dim] = ["n", "g"]

    def counts(self, at: int) -> dict[str, Any]:
        """Local numbers from the local shape of tensor number ``at``, which has the input's shape."""
        return {
            "N": lambda shapes: shapes[at][0],
            "C": lambda shapes: shapes[at][1],
            "group": lambda shapes: shapes[at][1] // self.per_group,
        }


def forward(call: OpCall) -> Counted:
    """(output, mean, rstd)."""
    at = Geometry(call)
    weights = [at.weight] * (len(call.specs) - 1)
    return Counted([at.input, *weights], [at.input, at.statistics, at.statistics], nonempty=_NONEMPTY, counts=at.counts(0))


def backward(call: OpCall) -> Counted:
    """Gradients of input, weight and bias; the last two are partial sums over split images."""
    at, mask = Geometry(call), call.arg("output_mask")
    weights = [at.weight] * (len(call.specs) - 4)
    inputs = [at.input, at.input, at.statistics, at.statistics, *weights]
    outputs = [dims for dims, wanted in zip((at.input, at.weight, at.weight), mask, strict=True) if wanted]
    return Counted(inputs, outputs, {"n": "sum"}, nonempty=_NONEMPTY, counts=at.counts(0))


class Groups:
    """Going between images (n, c, positions), channels (n, c) and groups (n, g)."""

    def __init__(self, builder: Builder, call: OpCall, like: Value) -> None:
        self.builder, self.shape = builder, like.spec.shape
        self.groups, self.per_group = call.arg("group"), call.arg("C") // call.arg("group")
        self.positions = list(range(2, len(self.shape)))
        self.count = like.spec.shape.numel() // max(self.shape[0] * self.groups, 1)

    def channel_sums(self, value: Value) -> Value:
        """Sums over positions."""
        return total(self.builder, value, self.positions, keepdim=False)

    def group_means(self, channels: Value) -> Value:
        """Means of groups from the sums of their channels."""
        rows = self.builder.op(_aten.view.default, channels, [self.shape[0], self.groups, self.per_group])
        return self.builder.op(_aten.div.Tensor, total(self.builder, rows, [2], keepdim=False), self.count)

    def spread(self, groups: Value) -> Value:
        """A number per group, shaped to broadcast over the images."""
        rows = self.builder.op(_aten.unsqueeze.default, groups, 2)
        rows = self.builder.op(_aten.expand.default, rows, [self.shape[0], self.groups, self.per_group])
        rows = self.builder.op(_aten.clone.default, rows, memory_format=torch.contiguous_format)
        return self.builder.op(_aten.view.default, rows, [*self.shape[:2], *[1] * len(self.positions)])

    def column(self, vector: Value) -> Value:
        """A number per channel, shaped to broadcast over the images."""
        return self.builder.op(_aten.view.default, settled(self.builder, vector), [1, self.shape[1], *[1] * len(self.positions)])


def normalise(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """(x - mean) * rstd * weight + bias, the statistics from sums per channel."""
    given = named(call, args, kwargs)
    if call.outs[0].shape.numel() == 0 or not _split(call):
        return None
    x = wide(builder, settled(builder, given["input"]))
    at = Groups(builder, call, x)
    mean = at.group_means(at.channel_sums(x))
    centred = builder.op(_aten.sub.Tensor, x, at.spread(mean))
    rstd = inverse_root(builder, at.group_means(at.channel_sums(product(builder, centred, centred))), given["eps"])
    out = product(builder, centred, at.spread(rstd))
    if given["weight"] is not None:
        out = product(builder, out, at.column(given["weight"]))
    if given["bias"] is not None:
        out = builder.op(_aten.add.Tensor, out, at.column(given["bias"]))
    return [cast(builder, v, m.dtype) for v, m in zip((out, mean, rstd), call.outs, strict=True)]


def gradients(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Gradients of input, weight and bias, from two sums per channel."""
    given = named(call, args, kwargs)
    if call.arg("input").shape.numel() == 0 or not _split(call):
        return None
    x = settled(builder, given["input"])
    grad = wide(builder, aligned(builder, settled(builder, given["grad_out"]), x))
    at = Groups(builder, call, x)
    mean, rstd = (at.spread(wide(builder, settled(builder, given[n]))) for n in ("mean", "rstd"))
    unit = product(builder, builder.op(_aten.sub.Tensor, wide(builder, x), mean), rstd)
    sums = [at.channel_sums(v) for v in (product(builder, grad, unit), grad)]
    outs: list[Value] = []
    if given["output_mask"][0]:
        outs.append(_of_input(builder, given, at, grad, unit, rstd, sums))
    outs += [total(builder, v, [0], keepdim=False) for v, wanted in zip(sums, given["output_mask"][1:], strict=True) if wanted]
    return [cast(builder, v, m.dtype) for v, m in zip(outs, call.outs, strict=True)]


def _of_input(
    builder: Builder, given: dict[str, Any], at: Groups, grad: Value, unit: Value, rstd: Value, sums: list[Value]
) -> Value:
    if given["weight"] is not None:
        weight = settled(builder, given["weight"])
        sums = [product(builder, v, weight) for v in sums]
        grad = product(builder, grad, at.column(weight))
    slope, offset = (at.spread(at.group_means(v)) for v in sums)
    inner = builder.op(_aten.sub.Tensor, builder.op(_aten.sub.Tensor, grad, product(builder, unit, slope)), offset)
    return product(builder, inner, rstd)


def _split(call: OpCall) -> bool:
    """Whether channels or positions are split."""
    full = call.arg("input").shape
    return any(sharded_on(s, range(1, len(full))) for s in call.specs if s.shape == full)


TABLE = {
    "native_group_norm": Rule(forward, normalise),
    "native_group_norm_backward": Rule(backward, gradients),
}
