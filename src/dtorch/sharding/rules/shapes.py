"""Views that rearrange dims: the data stays where it is, exactly, or the cut moves to where the new dims allow it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..call import OpCall
from ..labels import ANY_OP, Dim, Labels, PartialRow
from ..rule import Rule

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOVES = [PartialRow((True,), ANY_OP)]


def reshaped(call: OpCall) -> Labels | None:
    """``view`` and its kin: dims are grouped where sizes agree; a group is sharded along its first dim of size above 1.

    Within a group the first such dim on either side carries the group's label, in the smallest unit
    that is whole on both, so a piece of one side is exactly a piece of the other.
    """
    old, new = tuple(call.specs[0].shape), tuple(call.outs[0].shape)
    ins: list[Dim] = [None] * len(old)
    outs: list[Dim] = [None] * len(new)
    for number, (old_dims, new_dims) in enumerate(_groups(old, new)):
        _label_group(_LETTERS[number % 26] + str(number), old, old_dims, ins, new, new_dims, outs)
    return Labels([ins], [outs], partial=_MOVES, shape_args={"size": 0})


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Minimal runs of dims of equal product on both sides; empty when the tensor has no elements."""
    if 0 in old or 0 in new:
        return []
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = (old[i] if left else 1), (new[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                b, right, j = b * new[j], [*right, j], j + 1
        groups.append((left, right))
    return groups


def _label_group(
    label: str, old: Sequence[int], old_dims: list[int], ins: list[Dim], new: Sequence[int], new_dims: list[int], outs: list[Dim]
) -> None:
    i = next((d for d in old_dims if old[d] > 1), None)
    j = next((d for d in new_dims if new[d] > 1), None)
    if i is None or j is None:
        return
    inner_old = math.prod(old[d] for d in old_dims if d > i)
    inner_new = math.prod(new[d] for d in new_dims if d > j)
    unit = math.lcm(inner_old, inner_new)
    ins[i], outs[j] = (label, unit // inner_old), (label, unit // inner_new)


def permuted(call: OpCall) -> Labels:
    """``permute``, ``transpose`` and ``t``."""
    ndim = len(call.specs[0].shape)
    order = list(range(ndim))
    if "dims" in call.bound:
        order = [d % ndim for d in call.arg("dims")]
    elif "dim0" in call.bound:
        a, b = call.arg("dim0", 0) % max(ndim, 1), call.arg("dim1", 0) % max(ndim, 1)
        if ndim:
            order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return Labels([_LETTERS[:ndim]], [[_LETTERS[d] for d in order]], partial=_MOVES)


def expanded(call: OpCall) -> Labels:
    """``expand``: stretched and new dims are whole, the others as they were."""
    old, new = call.specs[0].shape, call.outs[0].shape
    skip = len(new) - len(old)
    ins: list[Dim] = [_LETTERS[skip + d] if n == new[skip + d] else None for d, n in enumerate(old)]
    return Labels([ins], [[*[None] * skip, *ins]], partial=_MOVES, shape_args={"size": 0})


def unsqueezed(call: OpCall) -> Labels:
    """``unsqueeze``: one new dim of size 1."""
    ndim = len(call.specs[0].shape)
    at = call.arg("dim") % (ndim + 1)
    return Labels([_LETTERS[:ndim]], [[*_LETTERS[:at], None, *_LETTERS[at:ndim]]], partial=_MOVES)


def squeezed(call: OpCall) -> Labels:
    """``squeeze``: dims of global size 1 go; a local size of 1 does not count."""
    shape = call.specs[0].shape
    # An empty list of dims is no dim here, where reductions take it for all.
    dims = () if call.arg("dim") == [] else call.dims("dim", len(shape))
    gone = [d for d in dims if d < len(shape) and shape[d] == 1]
    ins = [None if n == 1 else _LETTERS[d] for d, n in enumerate(shape)]
    kept = [ins[d] for d in range(len(shape)) if d not in gone]
    return Labels([ins], [kept], partial=_MOVES, instead=(torch.ops.aten.squeeze.dims, (gone,)))


def reinterpreted(call: OpCall) -> Labels | None:
    """``view(dtype)`` between dtypes of one size: the bits stay, so no partial does."""
    ndim = len(call.specs[0].shape)
    same = call.specs[0].dtype.itemsize == call.outs[0].dtype.itemsize
    return Labels([_LETTERS[:ndim]], [_LETTERS[:ndim]]) if same else None


def as_real(call: OpCall) -> Labels:
    """``view_as_real``: a last dim of two numbers; so a partial sum of complex numbers is one of real ones."""
    dims = _LETTERS[: len(call.specs[0].shape)]
    return Labels([dims], [[*dims, None]], partial=[PartialRow((True,))])


def as_complex(call: OpCall) -> Labels:
    """``view_as_complex``: the last dim of two numbers is whole."""
    dims = _LETTERS[: len(call.outs[0].shape)]
    return Labels([[*dims, None]], [dims], partial=[PartialRow((True,))])


TABLE = {
    "view_as_real": Rule(as_real),
    "view_as_complex": Rule(as_complex),
    "view.default": Rule(reshaped),
    "view.dtype": Rule(reinterpreted),
    "_unsafe_view": Rule(reshaped),
    "view_copy": Rule(reshaped),
    "permute": Rule(permuted),
    "transpose": Rule(permuted),
    "t": Rule(permuted),
    "numpy_T": Rule(permuted),
    "expand": Rule(expanded),
    "unsqueeze": Rule(unsqueezed),
    "squeeze": Rule(squeezed),
}
