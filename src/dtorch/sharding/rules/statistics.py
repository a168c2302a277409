"""Variance, norms and log-sum-exp: over split dims they are composed of partial sums and maxima."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.placements import Partial
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import ProgramFn, Rule
from .compose import average, cast, has_empty_piece, letters, settled, sharded_on, total, wide
from .reductions import filled, reduced_dims, reduction, when_sharded

_aten = torch.ops.aten


def _finished(builder: Builder, call: OpCall, value: Value, number: int = 0) -> Value:
    """A result whose reduced dims were kept, in the dtype and with the dims that the call asks for."""
    value = cast(builder, value, call.outs[number].dtype)
    return value if call.arg("keepdim") else builder.op(_aten.squeeze.dims, value, list(reduced_dims(call)))


def whole(call: OpCall) -> Labels:
    """The reduced dims are whole, and no piece is empty: PyTorch warns of a variance of nothing."""
    labels = reduction(None)(call)
    return Labels(
        labels.inputs, labels.outputs, nonempty=frozenset(c for c in letters(len(call.specs[0].shape)) if c is not None)
    )


def spread(root: bool, with_mean: bool) -> ProgramFn:
    """Program of ``var`` and its kin: the mean square distance from the global mean, in two passes."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        dims, spec = list(reduced_dims(call)), call.specs[0]
        if not sharded_on(spec, dims) and not has_empty_piece(spec, range(len(spec.shape))):
            return None
        x = wide(builder, settled(builder, args[0]))
        middle = average(builder, x, dims)
        distance = builder.op(_aten.sub.Tensor, x, middle)
        if x.spec.dtype.is_complex:
            distance = builder.op(_aten.abs.default, distance)
        squares = total(builder, builder.op(_aten.mul.Tensor, distance, distance), dims)
        freedom = max(math.prod(x.spec.shape[d] for d in dims) - call.arg("correction", 1), 0)
        out = builder.op(_aten.div.Tensor, squares, float(freedom))
        out = builder.op(_aten.sqrt.default, out) if root else out
        results = [out, middle] if with_mean else [out]
        return [_finished(builder, call, v, i) for i, v in enumerate(results)]

    return program


def _order(call: OpCall) -> float:
    return float(call.arg("ord" if "ord" in call.bound else "p", 2))


def norm(call: OpCall) -> Labels:
    """A norm: those that are sums, counts or extremes of absolute values have a reduce op."""
    ops = {1.0: "sum", 0.0: "sum", math.inf: "max", -math.inf: "min"}
    op = ops.get(_order(call))
    return reduction(op, nonempty=op in ("max", "min"))(call)


def norm_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Any other norm of split dims: the norms of the pieces, to the power, summed, and the root of that."""
    order, dims = _order(call), reduced_dims(call)
    x = settled(builder, args[0])
    if not sharded_on(x.spec, dims) or order in (0.0, 1.0):
        return None
    if order < 0 or order == math.inf:
        x = filled(builder, x, dims, 0 if order > 0 else math.inf)
    if order in (math.inf, -math.inf):
        if not has_empty_piece(call.specs[0], dims):
            return None
        out = builder.op(_aten.linalg_vector_norm.default, x, order, list(dims), True, dtype=call.arg("dtype"))
        return [_finished(builder, call, out)]
    spec = _norms(call, x.spec, dims)
    power = float(order)
    norms = builder.local(_aten.linalg_vector_norm.default, [x, power, list(dims), True], {"dtype": _computed(call, x)}, [spec])[
        0
    ]
    powers = settled(builder, builder.local(_aten.pow.Tensor_Scalar, [norms, power], {}, [spec])[0])
    root = builder.op(_aten.sqrt.default, powers) if power == 2 else builder.op(_aten.pow.Tensor_Scalar, powers, 1 / power)
    return [_finished(builder, call, root)]


def _computed(call: OpCall, x: Value) -> torch.dtype:
    """The dtype in which the pieces' norms are taken: complex for complex, never half."""
    wanted = call.arg("dtype", x.spec.dtype)
    return torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted


def _norms(call: OpCall, spec: Spec, dims: tuple[int, ...]) -> Spec:
    """The spec of the pieces' norms: partial where a reduced dim is split."""
    gone = {a for d in dims for a in spec.sharding_axes(d)}
    placements = [Partial() if a in gone else p for a, p in enumerate(spec.placements)]
    shape = [1 if d in dims else n for d, n in enumerate(spec.shape)]
    real = torch.empty(0, dtype=_computed(call, Value(0, spec))).abs().dtype
    return Spec.make(spec.mesh, placements, shape, real)


def logsumexp(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """log(sum(exp(x - max))) + max, the maximum taken as 0 where it is infinite."""
    dims = list(reduced_dims(call))
    if call.outs[0].dtype.is_complex or not all(call.specs[0].shape[d] for d in dims):
        # Of nothing there is no maximum.
        return None
    x = wide(builder, cast(builder, settled(builder, args[0]), call.outs[0].dtype))
    top = settled(builder, builder.op(_aten.amax.default, x, dims, True))
    infinite = builder.op(_aten.eq.Scalar, builder.op(_aten.abs.default, top), math.inf)
    top = builder.op(_aten.masked_fill.Scalar, top, infinite, 0)
    powers = builder.op(_aten.exp.default, builder.op(_aten.sub.Tensor, x, top))
    out = builder.op(_aten.add.Tensor, builder.op(_aten.log.default, total(builder, powers, dims)), top)
    return [_finished(builder, call, out)]


def slices(call: OpCall) -> Labels:
    """``renorm``: the slices along its dim are independent."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, [d for d in range(ndim) if d != call.arg("dim") % ndim])
    return Labels([dims], [dims])


def renorm(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """A slice whose norm is above a limit is scaled to have that norm, or a little less."""
    x, limit = settled(builder, args[0]), call.arg("maxnorm")
    ndim = len(x.spec.shape)
    rest = [d for d in range(ndim) if d != call.arg("dim") % ndim]
    norms = builder.op(_aten.linalg_vector_norm.default, wide(builder, x), call.arg("p"), rest, True)
    norms = settled(builder, norms)
    scale = builder.op(_aten.mul.Tensor, builder.op(_aten.reciprocal.default, builder.op(_aten.add.Scalar, norms, 1e-7)), limit)
    over = builder.op(_aten.gt.Scalar, norms, limit)
    scale = builder.op(_aten.where.ScalarOther, over, scale, 1.0)
    return [builder.op(_aten.mul.Tensor, x, cast(builder, scale, call.outs[0].dtype))]


_NORM = Rule(norm, norm_split)

TABLE = {
    "var.correction": Rule(whole, spread(root=False, with_mean=False)),
    "std.correction": Rule(whole, spread(root=True, with_mean=False)),
    "var_mean.correction": Rule(whole, spread(root=False, with_mean=True)),
    "std_mean.correction": Rule(whole, spread(root=True, with_mean=True)),
    "linalg_vector_norm": _NORM,
    "norm": _NORM,
    "renorm": Rule(slices, renorm),
    "logsumexp": Rule(reduction(None), when_sharded(logsumexp)),
}
