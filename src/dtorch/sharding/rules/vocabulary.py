"""The loss of a language model from its last hidden states: a linear layer and cross entropy, with their gradients, at once.

PyTorch's operators go through the batch in chunks, so that not all logits are in memory. Each device does that with its part
of a split batch. Where the vocabulary or the features are split, what a device has of the logits is in memory whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import Rule
from .compose import cast, changed, named, settled, sharded_on, wide

_aten = torch.ops.aten


@dataclass(frozen=True)
class Samples(Labels):
    """Rows of a split batch: sums over each part, divided by the weight of all."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Of a mean over a split batch: the parts' sums and their quotient; else None, for the operator itself will do."""
        given = named(call, args, kwargs)
        if given["reduction"] != "mean" or not sharded_on(given["input"].spec, [0]):
            return None
        count = settled(builder, weight_of_all(builder, given))
        args, kwargs = changed(call, args, kwargs, reduction="sum")
        sums = builder.local(call.func, args, kwargs, outs)
        return [builder.op(_aten.div.Tensor, value, cast(builder, count, value.spec.dtype)) for value in sums]


def weight_of_all(builder: Builder, given: dict[str, Any]) -> Value:
    """The weights of all rows that are not ignored, added up: their number where classes have none."""
    target = given["target"]
    counted = builder.op(_aten.ne.Scalar, target, given["ignore_index"])
    if given["weight"] is None:
        return builder.op(_aten.sum.default, counted, dtype=torch.float32)
    inside = builder.op(_aten.mul.Tensor, target, counted)
    weights = builder.op(_aten.index_select.default, wide(builder, given["weight"]), 0, inside)
    return builder.op(_aten.sum.default, builder.op(_aten.mul.Tensor, weights, counted))


def by_samples(call: OpCall) -> Samples | None:
    """The batch may be split. Half precision cannot hold the sums that a mean of parts is made of."""
    if call.specs[0].dtype == torch.float16 and call.arg("reduction") == "mean":
        return None
    rows: dict[str, list[str | None]] = {"input": ["n", None], "target": ["n"]}
    given = [name for name in ("input", "linear_weight", "target", "linear_bias", "weight") if call.arg(name) is not None]
    ins = [rows.get(name, [None] * len(call.arg(name).shape)) for name in given]
    found: list[str | None] = ["n" if call.outs[1].shape == call.specs[0].shape else None, None]
    outs: list[list[str | None]] = [[None] * len(m.shape) for m in call.outs]
    return Samples(ins, [outs[0], found, *outs[2:]], {"n": "sum"})


def by_parts(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """The logits, their cross entropy, and the gradients of both, each by its own rule."""
    given = named(call, args, kwargs)
    x, weight, target, classes = (given[k] for k in ("input", "linear_weight", "target", "weight"))
    x, weight = settled(builder, x), settled(builder, weight)
    logits = builder.op(_aten.mm.default, wide(builder, x), builder.op(_aten.t.default, wide(builder, weight)))
    if given["linear_bias"] is not None:
        logits = builder.op(_aten.add.Tensor, logits, wide(builder, given["linear_bias"]))
    logits = settled(builder, logits)
    scores = builder.op(_aten._log_softmax.default, logits, 1, False)
    classes = None if classes is None else wide(builder, classes)
    how = [target, classes, 2, given["ignore_index"]]
    loss, count = [settled(builder, v) for v in builder.op(_aten.nll_loss_forward.default, scores, *how)]
    divide = given["reduction"] == "mean"

    def slope() -> Value:
        """The gradient of the logits; where all is ignored it is NaN, as the loss."""
        one = builder.op(_aten.full_like.default, loss, 1)
        out = builder.op(_aten.nll_loss_backward.default, one, scores, *how, count)
        out = settled(builder, builder.op(_aten._log_softmax_backward_data.default, out, scores, 1, scores.spec.dtype))
        return builder.op(_aten.div.Tensor, out, count) if divide else out

    found = gradients(builder, call, given, x, weight, slope)
    mean = builder.op(_aten.div.Tensor, loss, count) if divide else loss
    return [cast(builder, mean, call.outs[0].dtype), *found]


def gradients(
    builder: Builder, call: OpCall, given: dict[str, Any], x: Value, weight: Value, slope: Callable[[], Value]
) -> list[Value]:
    """Gradients of input, weight and bias from that of the logits; an empty tensor for each that is not asked for."""
    made: dict[str, Callable[[Value], Value]] = {
        "input": lambda s: builder.op(_aten.mm.default, s, wide(builder, weight)),
        "linear_weight": lambda s: builder.op(_aten.mm.default, builder.op(_aten.t.default, s), wide(builder, x)),
        "linear_bias": lambda s: builder.op(_aten.sum.dim_IntList, s, [0]),
    }
    wanted = {name for name in made if given[f"compute_{name}_grad"]}
    start = slope() if wanted else x
    outs = []
    for (name, make), meta in zip(made.items(), call.outs[1:], strict=True):
        value = make(start) if name in wanted else builder.op(_aten.new_zeros.default, x, list(meta.shape))
        outs.append(cast(builder, value, meta.dtype))
    return outs


TABLE = {
    "torch_nn::_linear_cross_entropy_batch_chunked": Rule(by_samples, by_parts),
}
