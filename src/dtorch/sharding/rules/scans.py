"""Running sums, products and maxima: along a split dim each piece scans its own, then adds what comes before it.

Only one number per piece and row is sent. Every other dim may be split at no cost.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch._ops import OpOverload

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import LINEAR_OPS, Labels, PartialRow
from ..rule import ProgramFn, Rule
from .compose import cast, letters, settled, sharded_on, wide
from .leafwise import gathered, laid, part, part_of_whole
from .pieces import by_leaf, leaves, lengths, resized

_aten = torch.ops.aten


def scan(call: OpCall) -> Labels:
    """Every dim but the scanned one may be split."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, [call.arg("dim") % ndim] if ndim else [])
    return Labels([dims], [dims] * len(call.outs))


def linear_scan(call: OpCall) -> Labels:
    """``cumsum``: the same, and linear."""
    labels = scan(call)
    same = call.specs[0].dtype == call.outs[0].dtype
    return Labels(labels.inputs, labels.outputs, partial=[PartialRow((True,), LINEAR_OPS)] if same else [])


def _split_dim(call: OpCall, value: Value) -> int | None:
    """The scanned dim, if it is split and there is something to scan."""
    ndim = len(value.spec.shape)
    dim = call.arg("dim") % ndim if ndim else 0
    return dim if ndim and value.spec.shape.numel() and sharded_on(value.spec, [dim]) else None


def running(op: OpOverload, total: OpOverload, as_list: bool, combine: OpOverload) -> ProgramFn:
    """Program of a scan: scan each piece, and combine the totals of the pieces before it into every element.

    Args:
        op: the scan.
        total: reduces a dim to what the scan ends with; ``as_list`` if it takes a list of dims.
        combine: adds what comes before.
    """

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        dim = _split_dim(call, args[0])
        if dim is None or (call.outs[0].dtype.is_complex and combine is _aten.logaddexp.default):
            return None
        x = wide(builder, cast(builder, settled(builder, args[0]), call.outs[0].dtype))
        own = builder.local(op, [x, dim], {}, [x.spec])[0]
        number = len(leaves(x.spec, dim))
        one = resized(x.spec, dim, [1] * number)
        totals = gathered(builder, builder.local(total, [x, [dim] if as_list else dim, True], {}, [one])[0], dim)
        before = part_of_whole(builder, totals, x.spec, dim, [0] * number, range(number))
        offset = builder.local(total, [before, [dim] if as_list else dim, True], {}, [one])[0]
        out = builder.local(combine, [own, offset], {}, [x.spec])[0]
        return [laid(builder, cast(builder, out, call.outs[0].dtype), call)]

    return program


def extreme(op: OpOverload) -> ProgramFn:
    """Program of ``cummax`` and ``cummin``, with the last index among equals, as PyTorch has it."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        dim = _split_dim(call, args[0])
        if dim is None:
            return None
        x = settled(builder, args[0])
        sizes, starts = lengths(x.spec, dim), [start for start, _ in leaves(x.spec, dim)]
        index = resized(x.spec, dim, sizes, torch.int64)
        best, at = builder.local(op, [x, dim], {}, [x.spec, index])
        at = builder.local(_aten.add.Scalar, [at, by_leaf(x.spec, dim, starts)], {}, [index])[0]
        # One row for each piece that has any: the best up to its end.
        ends = [gathered(builder, part(builder, v, dim, [max(n - 1, 0) for n in sizes], sizes), dim) for v in (best, at)]
        tops, among = builder.local(op, [ends[0], dim], {}, [ends[0].spec, ends[1].spec])
        tops_at = builder.local(_aten.gather.default, [ends[1], dim, among], {}, [ends[1].spec])[0]
        earlier = [0, *accumulate(min(n, 1) for n in sizes)][:-1]
        carried = [min(n, 1) for n in earlier]
        before = [part_of_whole(builder, v, x.spec, dim, [max(n - 1, 0) for n in earlier], earlier) for v in (tops, tops_at)]
        longer = [n + c for n, c in zip(sizes, carried, strict=True)]
        specs = [resized(x.spec, dim, longer), resized(x.spec, dim, longer, torch.int64)]
        joined = [
            builder.local(_aten.cat.default, [[b, v], dim], {}, [s])[0] for b, v, s in zip(before, (best, at), specs, strict=True)
        ]
        values, among = builder.local(op, [joined[0], dim], {}, specs)
        indices = builder.local(_aten.gather.default, [joined[1], dim, among], {}, [specs[1]])[0]
        return [laid(builder, part(builder, v, dim, carried, longer), call, i) for i, v in enumerate((values, indices))]

    return program


_LOG = Rule(scan, running(_aten.logcumsumexp.default, _aten.logsumexp.default, True, _aten.logaddexp.default))

TABLE = {
    "cumsum": Rule(linear_scan, running(_aten.cumsum.default, _aten.sum.dim_IntList, True, _aten.add.Tensor)),
    "cumprod": Rule(scan, running(_aten.cumprod.default, _aten.prod.dim_int, False, _aten.mul.Tensor)),
    "logcumsumexp": _LOG,
    "_logcumsumexp": _LOG,
    "cummax": Rule(scan, extreme(_aten.cummax.default)),
    "cummin": Rule(scan, extreme(_aten.cummin.default)),
}
