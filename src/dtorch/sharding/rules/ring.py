"""Attention over a split sequence: programs of the fused kernels, forward and backward.

Queries, keys and values are first laid as ``sequence.py`` decides: heads for positions where an axis is Ulysses, balanced
blocks where a ring is causal. Around a ring keys and values then travel together, one exchange a step, each sent on before
it is used. A device merges what its queries find in each block by the log-sum-exp of their scores. Backward does the same
with the gradients of keys and values travelling beside them. The merging itself is in ``worker/attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.mesh import coordinates
from ...core.placements import REPLICATE, Partial
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall, OutMeta
from ..redistribute import redistribute
from .blocks import blocks
from .compose import NARROW, named, settled
from .laid import Laid, Runs, count, moved
from .leafwise import with_room
from .pieces import by_leaf, leaf_number, leaves, lengths, resized
from .sequence import Layouts, roles_of

_aten = torch.ops.aten
SHIFT = "ring_shift"


class _Attention:
    """One attention call under construction."""

    def __init__(self, builder: Builder, call: OpCall, given: dict[str, Any], layouts: Layouts) -> None:
        self.builder, self.call, self.given, self.layouts = builder, call, given, layouts
        self.kernel = call.func.overloadpacket.__name__.removeprefix("_scaled_dot_product_").removesuffix("_backward")
        self.scale = call.arg("scale")
        self.wide = torch.float32 if call.arg("query").dtype in NARROW else call.arg("query").dtype
        self.query = self.brought("query", layouts.query_home, layouts.query)
        self.key = self.brought("key", layouts.key_home, layouts.key)
        self.value = self.brought("value", layouts.key_home, layouts.key)
        mask = given.get("attn_mask", given.get("attn_bias"))
        self.mask = None if mask is None else self.laid_mask(mask)
        self.alone = layouts.ring_size == 1 and not layouts.roles.rows and not layouts.roles.columns

    def brought(self, name: str, home: Spec, laid: Laid) -> Value:
        """A tensor of the call, first where it is at home and then as it is to be computed with."""
        value = self.given[name]
        shape = value.spec.shape
        home = Spec.make(home.mesh, home.placements, shape, value.spec.dtype, value.spec.stride)
        at_home = redistribute(self.builder, value, home)
        return moved(self.builder, at_home, Laid(home), laid.shaped(shape[3:], value.spec.dtype))

    def laid_mask(self, mask: Value) -> Value:
        whole = [REPLICATE if isinstance(p, Partial) else p for p in mask.spec.placements]
        mask = redistribute(self.builder, mask, mask.spec.replace(whole))
        return moved(self.builder, mask, Laid(mask.spec), self.layouts.mask(mask.spec))

    def pair(self) -> tuple[Value, Laid]:
        """Keys and values side by side, so that they travel as one."""
        width = self.key.spec.shape[3] + self.value.spec.shape[3]
        laid = self.layouts.key.shaped([width], self.key.spec.dtype)
        return self.builder.local(_aten.cat.default, [[self.key, self.value], -1], {}, [laid.spec])[0], laid

    def turned(self, value: Value, laid: Laid, step: int) -> Value:
        """A value of the keys' layout, sent on to the next device of each ring."""
        # A head that several devices have counts as many: each copy's gradient travels by itself.
        source, target = (
            Laid(t.spec, {2: t.of(2)}) for t in (self.layouts.turned(laid, step), self.layouts.turned(laid, step + 1))
        )
        return moved(self.builder, value, source, target, SHIFT)

    def blocks_at(self, step: int) -> Varying:
        """The blocks each device computes at a step, flat."""
        layouts, keys = self.layouts, self.keys_at(step)

        def fn(coord: tuple[int, ...]) -> list[int]:
            return [int(n) for b in blocks(layouts.query.at(2, coord), keys(coord), layouts.causal) for n in b]

        return Varying(fn)

    def keys_at(self, step: int) -> Callable[[tuple[int, ...]], Runs]:
        """The keys that a device holds at a step."""
        held, spec = self.layouts.keys(step), self.layouts.key.spec
        return lambda coord: held[leaf_number(spec, 2, coord)]

    def columns_at(self, step: int) -> Varying | list[int]:
        """Runs of the mask's columns that belong to the keys at hand, flat; none where one column serves all keys."""
        if self.mask is None or self.mask.spec.shape[-1] == 1:
            return []
        keys = self.keys_at(step)
        return Varying(lambda coord: [n for run in keys(coord) for n in run])

    def step_args(self, step: int) -> list[Any]:
        """What every step of a ring is told beside its tensors."""
        return [self.mask, self.columns_at(step), self.blocks_at(step), self.kernel, self.scale]


def forward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Program of a forward kernel."""
    roles = roles_of(call)
    if roles is None or call.arg("dropout_p") or _masked_twice(call):
        return None
    at = _Attention(builder, call, named(call, args, kwargs), Layouts(call, roles))
    laid = at.layouts.query
    out = laid.shaped([call.outs[0].shape[3]], call.outs[0].dtype)
    rows = laid.shaped([], call.outs[1].dtype)
    if at.alone:
        given = [at.query, at.key, at.value, at.mask, at.kernel, at.layouts.causal, at.scale]
        made = builder.local("dtorch::attend.default", given, {}, [out.spec, rows.spec])
    else:
        made = _around(at, out, rows)
    return [*_home(at, made, out, rows), *(_nothing(builder, at.layouts.mesh, m) for m in call.outs[2:])]


def _masked_twice(call: OpCall) -> bool:
    return bool(call.arg("is_causal")) and call.arg("attn_mask", call.arg("attn_bias")) is not None


def _around(at: _Attention, out: Laid, rows: Laid) -> list[Value]:
    """Output and log-sum-exp of a ring."""
    pair, laid = at.pair()
    apart = at.layouts.roles.columns
    sums, one = out.shaped(out.spec.shape[3:], at.wide).shared(apart), rows.shaped([], at.wide)
    specs = [sums.spec, one.shared(apart, "max").spec, one.shared(apart).spec]
    state = at.builder.local("dtorch::ring_start.default", [at.query, pair, out.spec.shape[3]], {}, specs)
    for step in range(at.layouts.ring_size):
        # Sent on before it is used, so that the transfer and the computation overlap.
        following = at.turned(pair, laid, step) if step + 1 < at.layouts.ring_size else pair
        at.builder.local("dtorch::ring_attend_.default", [*state, at.query, pair, *at.step_args(step)], {}, [])
        pair = following
    state = _put_together(at, state) if apart else state
    return at.builder.local("dtorch::ring_end.default", [*state, out.spec.dtype], {}, [out.spec, rows.spec])


def _put_together(at: _Attention, state: Sequence[Value]) -> list[Value]:
    """What devices that have other keys and the same queries have found."""
    builder, (total, top, weight) = at.builder, state
    best = settled(builder, top)
    shape = (*total.spec.shape[:3], total.spec.shape[3] + 1)
    spec = Spec.make(total.spec.mesh, total.spec.placements, shape, at.wide)
    both = settled(builder, builder.local("dtorch::ring_weighed.default", [total, top, weight, best], {}, [spec])[0])
    specs = [Spec.make(spec.mesh, both.spec.placements, n, at.wide) for n in (total.spec.shape, weight.spec.shape)]
    found = builder.local("dtorch::ring_parted.default", [both], {}, specs)
    return [found[0], best, found[1]]


def _home(at: _Attention, made: Sequence[Value], out: Laid, rows: Laid) -> list[Value]:
    """Output and log-sum-exp where the queries are at home, sent back together."""
    builder, call = at.builder, at.call
    home = Laid(at.layouts.query_home)
    width = out.spec.shape[3]
    extra = rows.spec.dtype.itemsize // out.spec.dtype.itemsize
    packed = out.shaped([width + extra], out.spec.dtype)
    target = home.shaped([width + extra], out.spec.dtype)
    if packed.same(target):
        value = list(made)
    else:
        one = builder.local("dtorch::packed.default", list(made), {}, [packed.spec])[0]
        one = moved(builder, one, packed, target)
        specs = [home.shaped([width], out.spec.dtype).spec, home.shaped([], rows.spec.dtype).spec]
        value = builder.local("dtorch::unpacked.default", [one, rows.spec.dtype], {}, specs)
    return [_as_promised(builder, value[0], call.outs[0]), _as_promised(builder, _padded(builder, value[1], call), call.outs[1])]


def _padded(builder: Builder, rows: Value, call: OpCall) -> Value:
    """The log-sum-exp in the shape that the kernel gives: more positions at the end, or one dim more."""
    shape = call.outs[1].shape
    room = shape[2] - rows.spec.shape[2]
    if room:
        leaves = len(lengths(rows.spec, 2))
        rows = with_room(builder, rows, {2: [0] * (leaves - 1) + [room]}, float("inf"))
    return builder.op(_aten.unsqueeze.default, rows, -1) if len(shape) == 4 else rows


def _as_promised(builder: Builder, value: Value, meta: OutMeta) -> Value:
    """The value in the order of strides that the operator's own output has, so that the same views are possible."""
    target = Spec.make(value.spec.mesh, value.spec.placements, meta.shape, meta.dtype, meta.stride)
    return builder.local("dtorch::ordered.default", [value, list(target.order)], {}, [target])[0]


def _nothing(builder: Builder, mesh: Any, meta: OutMeta) -> Value:
    """State of a kernel that only dropout needs."""
    spec = Spec.make(mesh, [REPLICATE] * mesh.ndim, meta.shape, meta.dtype)
    options = {"dtype": meta.dtype, "device": spec.device}
    return builder.local(_aten.zeros.default, [list(meta.shape)], options, [spec], mesh)[0]


def backward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Program of a backward kernel: gradients of query, key and value. A mask that wants one is left to the rule."""
    roles = roles_of(call)
    wanted = call.arg("grad_input_mask")
    if roles is None or call.arg("dropout_p") or _masked_twice(call) or (wanted and wanted[3]):
        return None
    at = _Attention(builder, call, named(call, args, kwargs), Layouts(call, roles))
    results = _results_in(at)
    homes = _at_once_backward(at, results) if at.alone else _around_backward(at, results)
    return [_as_promised(builder, v, m) for v, m in zip(homes, call.outs, strict=False)]


def _results_in(at: _Attention) -> list[Value]:
    """Gradient of the output, the output and the log-sum-exp, laid as the queries are; the last two travel together."""
    builder, home = at.builder, at.layouts.query_home
    names = ("grad_out_" if "grad_out_" in at.given else "grad_out", "out")
    both = [at.brought(name, home, at.layouts.query) for name in names]
    rows = at.given["logsumexp"]
    if len(rows.spec.shape) == 4:
        rows = builder.op(_aten.squeeze.dim, rows, -1)
    extra = rows.spec.shape[2] - home.shape[2]
    if extra:
        rows = builder.op(_aten.slice.Tensor, rows, 2, 0, home.shape[2])
    placed = Laid(home).shaped([], rows.spec.dtype).spec
    rows = redistribute(builder, rows, Spec.make(placed.mesh, placed.placements, placed.shape, placed.dtype, rows.spec.stride))
    return [*both, moved(builder, rows, Laid(placed), at.layouts.query.shaped([], placed.dtype))]


def _at_once_backward(at: _Attention, results: Sequence[Value]) -> list[Value]:
    """Gradients where every device has whole sequences."""
    inputs = [at.query, at.key, at.value]
    given = [*results, *inputs, at.mask, at.kernel, at.layouts.causal, at.scale]
    grads = at.builder.local("dtorch::attend_backward.default", given, {}, [v.spec for v in inputs])
    laids = [at.layouts.key.shaped(v.spec.shape[3:], v.spec.dtype) for v in inputs[1:]]
    return [_query_home(at, grads[0]), *(_key_home(at, g, laid) for g, laid in zip(grads[1:], laids, strict=True))]


def _around_backward(at: _Attention, results: Sequence[Value]) -> list[Value]:
    """Gradients of a ring: keys, values and their gradients travel."""
    builder, layouts = at.builder, at.layouts
    pair, laid = at.pair()
    total = laid.shaped(laid.spec.shape[3:], at.wide).shared(layouts.roles.rows)
    sums = layouts.query.shaped(at.query.spec.shape[3:], at.wide).shared(layouts.roles.columns)
    grad_query = builder.local("dtorch::zeros.default", [at.query, pair, at.wide], {}, [sums.spec])[0]
    grad_pair = builder.local("dtorch::zeros.default", [pair, at.query, at.wide], {}, [total.spec])[0]
    for step in range(layouts.ring_size):
        following = at.turned(pair, laid, step) if step + 1 < layouts.ring_size else pair
        given = [grad_query, grad_pair, *results, at.query, pair, *at.step_args(step)]
        builder.local("dtorch::ring_backward_.default", given, {}, [])
        pair = following
        if step + 1 < layouts.ring_size:
            grad_pair = at.turned(grad_pair, total, step)
    last = layouts.turned(total, layouts.ring_size - 1)
    width = at.key.spec.shape[3]
    grad_pair = _key_home(at, _cast(builder, grad_pair, at.key.spec.dtype), last)
    ends = [(0, width), (width, total.spec.shape[3])]
    both = [_columns(builder, grad_pair, *end) for end in ends]
    return [_query_home(at, _cast(builder, grad_query, at.query.spec.dtype)), *both]


def _columns(builder: Builder, value: Value, start: int, end: int) -> Value:
    spec = Spec.make(value.spec.mesh, value.spec.placements, (*value.spec.shape[:3], end - start), value.spec.dtype)
    return builder.local("dtorch::columns.default", [value, start, end], {}, [spec])[0]


def _cast(builder: Builder, value: Value, dtype: torch.dtype) -> Value:
    spec = Spec.make(value.spec.mesh, value.spec.placements, value.spec.shape, dtype)
    return value if dtype == value.spec.dtype else builder.local(_aten._to_copy.default, [value], {"dtype": dtype}, [spec])[0]


def _query_home(at: _Attention, grad: Value) -> Value:
    """A gradient of queries where these are at home."""
    tail, dtype, apart = grad.spec.shape[3:], grad.spec.dtype, grad.spec.partial_axes
    source, target = at.layouts.query.shaped(tail, dtype), Laid(at.layouts.query_home).shaped(tail, dtype)
    return moved(at.builder, grad, source.shared(apart), target.shared(apart))


def _key_home(at: _Attention, grad: Value, laid: Laid) -> Value:
    """A gradient of keys or values where these are at home; a head that several devices had is summed."""
    builder, home = at.builder, at.layouts.key_home
    tail = laid.spec.shape[3:]
    target = Laid(home).shaped(tail, grad.spec.dtype).shared(laid.spec.partial_axes).spec
    laid = laid.shaped(tail, grad.spec.dtype)
    if laid.spec.shape[1] == home.shape[1]:
        return moved(builder, grad, laid, Laid(target))
    numbered, owners = _numbered(laid, at.layouts.roles.heads)
    held = [range(start, start + n) for start, n in leaves(target, 1)]
    repeated = resized(target, 1, [sum(o in own for o in owners) for own in held])
    grad = moved(builder, grad, numbered, Laid(repeated))
    counts = [[owners.count(o) for o in own] for own in held]
    return builder.local("dtorch::summed.default", [grad, by_leaf(target, 1, counts)], {}, [target])[0]


def _numbered(laid: Laid, first: Sequence[int]) -> tuple[Laid, list[int]]:
    """The layout with every copy of a head a head of its own, and which head each is a copy of, in order.

    Args:
        first: the axes that split the heads themselves, so that what they split stays together.
    """
    axes, runs = laid.spec.sharding_axes(1), laid.of(1)
    places = list(coordinates([laid.spec.mesh.shape[a] for a in axes]))
    outer = [axes.index(a) for a in first]
    order = sorted(range(len(places)), key=lambda i: ([places[i][o] for o in outer], places[i]))
    owners: list[int] = []
    numbered: list[Runs] = [[] for _ in places]
    for i in order:
        numbered[i] = [(len(owners), count(runs[i]))] if runs[i] else []
        owners += [h for start, n in runs[i] for h in range(start, start + n)]
    return Laid(laid.spec, {**laid.runs, 1: numbered}), owners
