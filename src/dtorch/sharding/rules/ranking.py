"""Winners and order: along a split dim the pieces send their own winners, and the winner of winners is found everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import ProgramFn, Rule
from .compose import letters, settled, sharded_on
from .leafwise import gathered, part, with_room
from .pieces import by_leaf, leaves, lengths, resized

_aten = torch.ops.aten


def along(call: OpCall) -> Labels:
    """Every dim but the one that is ranked may be split."""
    ndim = len(call.specs[0].shape)
    dim = call.arg("dim", -1) % ndim if ndim else 0
    dims = letters(ndim, [dim] if ndim else [])
    gone = len(call.outs[0].shape) < ndim
    return Labels([dims], [dims[:dim] + dims[dim + 1 :] if gone else dims] * len(call.outs))


def arg_along(call: OpCall) -> Labels:
    """``argmax`` and ``argmin``: without a dim they rank the flattened input."""
    if call.arg("dim") is None:
        return Labels([[None] * len(call.specs[0].shape)], [[None] * len(call.outs[0].shape)])
    return along(call)


def everything(call: OpCall) -> Labels:
    """All elements are ranked together."""
    return Labels([[None] * len(s.shape) for s in call.specs], [[None] * len(m.shape) for m in call.outs])


def winners(builder: Builder, x: Value, dim: int, op: OpOverload) -> tuple[Value, Value]:
    """The best along a dim, which is kept, and its first place; a NaN beats all."""
    if not sharded_on(x.spec, [dim]):
        best, at = builder.op(op, x, dim, True)
        return best, at
    sizes, starts = lengths(x.spec, dim), [start for start, _ in leaves(x.spec, dim)]
    room = with_room(builder, x, {dim: [int(n == 0) for n in sizes]})
    ones = [1] * len(sizes)
    specs = [resized(x.spec, dim, ones), resized(x.spec, dim, ones, torch.int64)]
    best, at = builder.local(op, [room, dim, True], {}, specs)
    at = builder.local(_aten.add.Scalar, [at, by_leaf(x.spec, dim, starts)], {}, [specs[1]])[0]
    # What an empty piece chose is none of x.
    best, at = (gathered(builder, part(builder, v, dim, [0] * len(sizes), [min(n, 1) for n in sizes]), dim) for v in (best, at))
    final, number = builder.op(op, best, dim, True)
    return final, builder.op(_aten.gather.default, at, dim, number)


def best_along(op: OpOverload, with_values: bool) -> ProgramFn:
    """Program of ``max.dim`` and ``argmax`` (``min.dim`` and ``argmin``)."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        ndim = len(call.specs[0].shape)
        dims = list(range(ndim)) if call.arg("dim") is None else [call.arg("dim") % ndim] if ndim else []
        if not dims or not sharded_on(call.specs[0], dims):
            return None
        best, place = settled(builder, args[0]), None
        for d in reversed(dims):
            best, at = winners(builder, best, d, op)
            if place is None:
                place = at
                continue
            # Among equals the first row wins, and in it the first column: the order of the flattened input.
            row = builder.op(_aten.mul.Scalar, at, math.prod(call.specs[0].shape[d + 1 :]))
            place = builder.op(_aten.add.Tensor, builder.op(_aten.gather.default, place, d, at), row)
        assert place is not None
        results = [best, place] if with_values else [place]
        return results if call.arg("keepdim") else [builder.op(_aten.squeeze.dims, v, dims) for v in results]

    return program


def top(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``topk`` of a split dim: the best k of the best k of each piece, where those are fewer than all.

    Which of equal elements are chosen is as open here as it is in PyTorch.
    """
    spec, k = call.specs[0], call.arg("k")
    ndim = len(spec.shape)
    dim = call.arg("dim", -1) % ndim if ndim else 0
    if not ndim or not sharded_on(spec, [dim]):
        return None
    counts = [min(k, n) for n in lengths(spec, dim)]
    if sum(counts) * (spec.dtype.itemsize + 8) >= spec.shape[dim] * spec.dtype.itemsize:
        return None
    x, largest = settled(builder, args[0]), call.arg("largest", True)
    specs = [resized(x.spec, dim, counts), resized(x.spec, dim, counts, torch.int64)]
    best, at = builder.local(_aten.topk.default, [x, by_leaf(x.spec, dim, counts), dim, largest, True], {}, specs)
    at = builder.local(_aten.add.Scalar, [at, by_leaf(x.spec, dim, [start for start, _ in leaves(x.spec, dim)])], {}, [specs[1]])[
        0
    ]
    best, at = gathered(builder, best, dim), gathered(builder, at, dim)
    values, number = builder.op(_aten.topk.default, best, k, dim, largest, call.arg("sorted", True))
    return [values, builder.op(_aten.gather.default, at, dim, number)]


def searched(call: OpCall) -> Labels:
    """``searchsorted``: each row of the sequence is whole; what is looked up may be split."""
    sequence, wanted = call.specs[0], call.specs[1]
    ndim = len(wanted.shape)
    rows = letters(len(sequence.shape), [len(sequence.shape) - 1])
    if len(sequence.shape) == 1:
        return Labels([[None], letters(ndim), *[[None]] * (len(call.specs) - 2)], [letters(ndim)])
    return Labels([rows, letters(ndim), *[rows] * (len(call.specs) - 2)], [letters(ndim)])


def bucketed(call: OpCall) -> Labels:
    """``bucketize``: the boundaries are whole."""
    dims = letters(len(call.specs[0].shape))
    return Labels([dims, [None]], [dims])


TABLE = {
    "sort": Rule(along),
    "topk": Rule(along, top),
    "argmax": Rule(arg_along, best_along(_aten.max.dim, with_values=False)),
    "argmin": Rule(arg_along, best_along(_aten.min.dim, with_values=False)),
    "max.dim": Rule(along, best_along(_aten.max.dim, with_values=True)),
    "min.dim": Rule(along, best_along(_aten.min.dim, with_values=True)),
    "median.dim": Rule(along),
    "nanmedian.dim": Rule(along),
    "median.default": Rule(everything),
    "nanmedian.default": Rule(everything),
    "mode": Rule(along),
    "kthvalue": Rule(along),
    "searchsorted.Tensor": Rule(searched),
    "searchsorted.Scalar": Rule(everything),
    "bucketize.Tensor": Rule(bucketed),
    "bucketize.Scalar": Rule(everything),
}
