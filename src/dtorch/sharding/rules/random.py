"""Random draws: every device draws the same numbers, those that plain torch draws for this seed, whatever the placement.

A draw that reads only a shape is made on fresh memory for the whole tensor, and each piece keeps its own part. One that reads
values, such as probabilities, is made on each device on memory for the whole that holds ones but for the device's own piece:
how many numbers a kernel draws, and in which order, depends on the shape alone. Nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.placements import REPLICATE, Partial, Placements
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall, leaves, replace_leaves, written_args
from ..labels import Labels
from ..redistribute import redistribute
from ..rule import Rule
from .compose import aligned, letters, named, settled
from .leafwise import gathered, laid
from .pieces import by_leaf
from .pieces import leaves as leaves_of

_aten = torch.ops.aten


def no_row(call: OpCall) -> None:
    """No piece can draw its own numbers."""


def blank(builder: Builder, spec: Spec) -> Value:
    """Uninitialised memory for the whole tensor, laid out in memory like it, since that decides the order of draws."""
    whole = spec.replace((REPLICATE,) * spec.mesh.ndim)
    options = {"dtype": spec.dtype, "device": spec.device}
    return builder.local(_aten.empty_strided.default, [list(spec.shape), list(spec.stride)], options, [whole], spec.mesh)[0]


def drawn(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """Draw on blank memory in place of the first tensor, and copy or keep each piece's part; other tensors are replicated."""
    target = args[0]
    rest = iter([whole(builder, v) for v in leaves((args[1:], kwargs), Value)])
    others, kwargs = replace_leaves((args[1:], kwargs), Value, lambda _: next(rest))
    meta = call.outs[0]
    out = Spec.make(target.spec.mesh, (REPLICATE,) * target.spec.mesh.ndim, meta.shape, meta.dtype, meta.stride)
    full = builder.local(call.func, [blank(builder, target.spec), *others], kwargs, [out])[0]
    if not written_args(call.func):
        return [redistribute(builder, full, out.replace(settled(builder, target).spec.placements))]
    placed = redistribute(builder, full, out.replace(target.spec.placements))
    builder.local(_aten.copy_.default, [target, placed], {}, [target.spec])
    return [target]


def drawn_from_values(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Draw each element with parameters of its own; declines where they only broadcast to the output's shape."""
    meta = call.outs[0]
    values = [settled(builder, v) for v in leaves((args, kwargs), Value)]
    like = next((v for v in values if v.spec.shape == meta.shape), None)
    if like is None:
        return None
    placed = [aligned(builder, v, like) if v.spec.shape == meta.shape else whole(builder, v) for v in values]
    return [_drawn_around(builder, call, args, kwargs, placed, like.spec.placements)]


def drawn_by_rows(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """``multinomial``: numbers drawn by the probabilities in each row, which must be whole."""
    rows = gathered(builder, settled(builder, args[0]), len(args[0].spec.shape) - 1)
    return [_drawn_around(builder, call, args, kwargs, [rows], rows.spec.placements)]


def _drawn_around(
    builder: Builder, call: OpCall, args: Any, kwargs: Any, placed: Sequence[Value], placements: Placements
) -> Value:
    """Draw with the whole around each piece, and keep what belongs to the piece."""
    widened = iter([around(builder, v) for v in placed])
    args, kwargs = replace_leaves((args, kwargs), Value, lambda _: next(widened))
    meta, mesh = call.outs[0], placed[0].spec.mesh
    out = Spec.make(mesh, placements, meta.shape, meta.dtype, meta.stride)
    full = builder.local(call.func, args, kwargs, [_varying_whole(out)])[0]
    return laid(builder, cut(builder, full, out), call)


def around(builder: Builder, value: Value) -> Value:
    """On each device memory for the whole tensor: ones but for the device's own piece; laid out as an output like it is."""
    if not value.spec.axes:
        return value
    own = _varying_whole(value.spec.replace(value.spec.placements), torch.empty_like(value.spec.meta).stride())
    options = {"dtype": own.dtype, "device": own.device}
    out = builder.local(_aten.empty_strided.default, [list(own.shape), list(own.stride)], options, [own], own.mesh)[0]
    out = builder.local(_aten.fill_.Scalar, [out, 1], {}, [own])[0]
    builder.local(_aten.copy_.default, [cut(builder, out, value.spec), value], {}, [value.spec])
    return out


def _varying_whole(spec: Spec, stride: tuple[int, ...] | None = None) -> Spec:
    """The spec of a value that is whole on every device, and not the same where pieces of another are not."""
    placements = [Partial() if a in spec.axes else REPLICATE for a in range(spec.mesh.ndim)]
    return Spec.make(spec.mesh, placements, spec.shape, spec.dtype, stride or spec.stride)


def cut(builder: Builder, value: Value, target: Spec) -> Value:
    """Each device's own part, a view, of a value that is whole on every device."""
    placements = list(value.spec.placements)
    for d in range(len(target.shape)):
        axes = [a for a in target.sharding_axes(d) if a in target.axes]
        if not axes:
            continue
        for a in axes:
            placements[a] = target.placements[a]
        spec = Spec.make(target.mesh, placements, target.shape, target.dtype, value.spec.stride)
        ends = by_leaf(target, d, [start + n for start, n in leaves_of(target, d)])
        starts = by_leaf(target, d, [start for start, _ in leaves_of(target, d)])
        value = builder.local(_aten.slice.Tensor, [value, d, starts, ends], {}, [spec])[0]
    return value


def whole(builder: Builder, value: Value) -> Value:
    """The value replicated."""
    return redistribute(builder, value, value.spec.replace((REPLICATE,) * value.spec.mesh.ndim))


def dropout_row(call: OpCall) -> Labels | None:
    """Outside training nothing is drawn. An empty piece would give a mask of another dtype."""
    if call.arg("train", True):
        return None
    dims = letters(len(call.specs[0].shape))
    return Labels([dims], [dims, dims], nonempty=frozenset(d for d in dims if d is not None))


def dropout(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Draw the mask on ones; scale what it keeps as the kernel does."""
    if not call.arg("train", True):
        return None
    given = named(call, args, kwargs)
    x, p = settled(builder, given["input"]), given["p"]
    ones = blank(builder, x.spec)
    ones = builder.local(_aten.fill_.Scalar, [ones, 1], {}, [ones.spec])[0]
    meta = call.outs[1]
    full = Spec.make(x.spec.mesh, ones.spec.placements, meta.shape, meta.dtype, meta.stride)
    mask = builder.local(call.func, [ones, p, given["train"]], {}, [ones.spec, full])[1]
    mask = redistribute(builder, mask, full.replace(x.spec.placements))
    return [builder.op(_aten.native_dropout_backward.default, x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask]


DRAW = Rule(no_row, drawn, writes=True, random=True)
_FROM_VALUES = Rule(no_row, drawn_from_values, random=True)

TABLE = {
    "bernoulli.float": DRAW,
    "bernoulli.p": DRAW,
    "bernoulli.Tensor": DRAW,
    "bernoulli.default": _FROM_VALUES,
    "normal.Tensor_Tensor": _FROM_VALUES,
    "normal.Tensor_float": _FROM_VALUES,
    "normal.float_Tensor": _FROM_VALUES,
    "multinomial": Rule(no_row, drawn_by_rows, random=True),
    "uniform": DRAW,
    "normal.default": DRAW,
    "normal_functional": DRAW,
    "exponential": DRAW,
    "log_normal": DRAW,
    "cauchy": DRAW,
    "geometric": DRAW,
    "random": DRAW,
    "rand_like": DRAW,
    "randn_like": DRAW,
    "randint_like": DRAW,
    "native_dropout": Rule(dropout_row, dropout, random=True),
}
