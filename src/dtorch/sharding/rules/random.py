"""Random draws that read only a shape: the whole tensor is drawn on fresh memory, and each piece keeps its own.

Every device draws the same numbers, those that plain torch draws for this seed, whatever the placement; nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.placements import REPLICATE
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall, leaves, replace_leaves, written_args
from ..labels import Labels
from ..redistribute import redistribute
from ..rule import Rule
from .compose import letters, named, settled

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

TABLE = {
    "bernoulli.float": DRAW,
    "bernoulli.p": DRAW,
    "bernoulli.Tensor": DRAW,
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
