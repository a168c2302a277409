"""Views and writes: every write reaches everything that shares the memory, also where a view had to communicate."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import UsageError, four_parts
from ..sharding.call import leaves, schema_of
from ..sharding.plan import Plan
from .value import Group, Link
from .wrapper import wrap

_aten = torch.ops.aten
Scatter = Callable[..., Any]


def refresh(group: Group) -> None:
    """Take a linked group's memory anew if its base has changed since; bring absent memory back."""
    link = group.link
    if link is None:
        return
    if not isinstance(link, Link):
        link.bring()
        return
    base_group = link.base._value.group
    # A base that is absent has not changed.
    if isinstance(base_group.link, Link):
        refresh(base_group)
    if base_group.version != link.seen:
        link.seen = base_group.version
        group.version += 1
        _aten.copy_.default(_once(link.root), _once(link.view(link.base)))


def _once(tensor: Any) -> Any:
    """Each element of an expanded tensor once: PyTorch writes to no memory that shows several times."""
    for dim, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and n > 1:
            tensor = _aten.slice.Tensor(tensor, dim, 0, 1)
    return tensor


def written_tensors(operator: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a call writes, in schema order.

    Raises:
        UsageError: one of them is a copy for a view, and no inverse is known by which its base could be written too.
    """
    if not operator.written:
        return []
    written = named_tensors(operator, operator.written, args, kwargs)
    for tensor in written:
        group = tensor._value.group
        while group is not None and isinstance(group.link, Link):
            if group.link.scatter is None:
                raise _cannot_be_carried_back(group.link)
            group = group.link.base._value.group
    return written


def named_tensors(operator: Any, names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors given for these arguments, in this order."""
    placed = dict(zip([a.name for a in schema_of(operator.func).arguments], args, strict=False)) | kwargs
    return [t for name in names for t in leaves(placed.get(name), torch.Tensor)]


def _cannot_be_carried_back(link: Link) -> UsageError:
    return UsageError(
        four_parts(
            f"a write to a view of a tensor placed as {list(link.base._spec.placements)}",
            "this kind of view is a copy under these placements, and a write to it cannot be carried back",
            "the in-place operator on your line",
            "write to the base tensor, or redistribute it to Replicate() first",
        )
    )


def resized_within(tensor: Any, size: Sequence[int]) -> bool:
    """Give a tensor another shape in the memory that it shares with live tensors; False where it shares no element.

    Raises:
        UsageError: it shares memory, and that is too small, or not in the order of its elements.
    """
    if _alone(tensor) or not tensor.numel():
        return False
    count = math.prod(size)
    if count > tensor.numel() or not tensor.is_contiguous():
        # The frames of an error that was caught may hold a view until they are collected.
        gc.collect()
        if _alone(tensor):
            return False
        raise UsageError(
            four_parts(
                f"a new shape {tuple(size)} for a tensor of shape {tuple(tensor.shape)} of which there are views",
                "a tensor that grows gets memory anew, and its views would be left with what was there before",
                "resize_, or out= of another shape, on your line",
                "give out= a tensor of the result's shape, or an empty one",
            )
        )
    flat = _aten.slice.Tensor(_aten.view.default(tensor, [-1]), 0, 0, count)
    tensor.data = _aten.view.default(flat, list(size))
    return True


def _alone(tensor: Any) -> bool:
    """Whether nothing that the user still has shares a tensor's memory."""
    value, group, base = tensor._value, tensor._value.group, tensor._base
    # Each is held by its owner, by a name here, and by the question itself. A view's base is owned by autograd.
    bases = int(base is not None and sys.getrefcount(base) <= 3)
    if sys.getrefcount(value) > 3 or (group is not None and sys.getrefcount(group) > 3 + bases):
        return False
    return group is None or group.link is None or _alone(group.link.base)


def wrote(tensor: Any) -> None:
    """Note a write to a tensor; through a link it is carried on to the base."""
    tensor._value.settled = None
    group = tensor._value.group
    if group is None:
        return
    group.version += 1
    link = group.link
    if isinstance(link, Link):
        assert link.scatter is not None
        _aten.copy_.default(link.base, link.scatter(link.base, link.root))
        link.seen = link.base._value.group.version


def connect(operator: Any, plan: Plan, results: list[Any], args: tuple, alias: Callable[[Any], Any]) -> None:
    """Tie a view's results to their base: one group where they alias on the workers, else a link each.

    ``alias(t)`` makes a second hold on a tensor's memory, outside any group.
    """
    base = args[0]
    base_group = base._value.shared_group()
    for number, result in enumerate(results):
        if plan.aliases:
            result._value.group = base_group
            continue
        link(operator.func, args, result, number, alias)


def link(func: Any, args: tuple, result: Any, number: int, alias: Callable[[Any], Any]) -> None:
    """Tie a result that is a copy to the base that it is a view of."""
    base = args[0]
    group = result._value.group = Group(result._value.handle)
    seen = base._value.shared_group().version
    view, scatter = _view_of(func, args[1:], number), _scatter_of(func, args, number)
    group.link = Link(_apart(base), _apart(alias(result)), view, scatter, seen)


def _apart(tensor: Any) -> Any:
    """A wrapper of one's own, outside autograd: what the user does to his (``t_``, ``requires_grad_``) does not matter here."""
    with torch.inference_mode(False):
        return wrap(type(tensor), tensor._spec, tensor._value)


def _view_of(func: Any, rest: tuple, number: int) -> Callable[[Any], Any]:
    def view(base: Any) -> Any:
        out = func(base, *rest)
        return out[number] if isinstance(out, list | tuple) else out

    return view


def _scatter_of(func: Any, args: tuple, number: int) -> Scatter | None:
    inverse = INVERSES.get(func.overloadpacket.__name__)
    if inverse is None:
        return None
    arguments = schema_of(func).arguments
    bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound.update(zip([a.name for a in arguments[1:]], args[1:], strict=False))
    if func is _aten.unfold.default and args[3] < args[2] and args[0].numel() and args[0].shape[args[1]] >= args[2] + args[3]:
        # Windows that overlap: a copy cannot tell which of two writes to one element counts.
        return None
    return lambda base, view: inverse(base, view, bound, number)


def _into_slice(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    return _aten.slice_scatter.default(base, view, a.get("dim", 0), a["start"], a["end"], a["step"])


def _into_part(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    dim = a.get("dim", 0)
    sizes = a.get("split_sizes") or [
        min(a["split_size"], base.shape[dim] - start) for start in range(0, base.shape[dim], a["split_size"])
    ]
    start = sum(sizes[:number])
    return _aten.slice_scatter.default(base, view, dim, start, start + sizes[number])


def _permuted_back(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    order = [d % base.ndim for d in a["dims"]]
    return _aten.permute.default(view, [order.index(d) for d in range(base.ndim)])


def _expanded_back(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    """What an expanded tensor shows for each element of its base; nothing, where it shows none."""
    if view.numel() < base.numel():
        return base
    for dim in range(view.ndim):
        inner = dim - (view.ndim - base.ndim)
        if view.shape[dim] > 1 and (inner < 0 or base.shape[inner] == 1):
            view = _aten.slice.Tensor(view, dim, 0, 1)
    return _reshaped_back(base, view, a, number)


def _windows_back(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    places = torch.arange(base.numel()).view(base.shape).unfold(a["dimension"], a["size"], a["step"]).reshape(-1)
    flat = _aten.reshape.default(base, [-1])
    return _aten.reshape.default(flat.index_put((places,), _aten.reshape.default(view, [-1])), list(base.shape))


def _reshaped_back(base: Any, view: Any, a: dict[str, Any], number: int) -> Any:
    return _aten.reshape.default(view, list(base.shape))


INVERSES: dict[str, Scatter] = {
    "view": lambda base, view, a, n: _aten.view.dtype(view, base.dtype) if "dtype" in a else _reshaped_back(base, view, a, n),
    "_unsafe_view": _reshaped_back,
    "_reshape_alias": _reshaped_back,
    "squeeze": _reshaped_back,
    "unsqueeze": _reshaped_back,
    "transpose": lambda base, view, a, n: _aten.transpose.int(view, a["dim0"], a["dim1"]),
    "t": lambda base, view, a, n: _aten.t.default(view),
    "permute": _permuted_back,
    "slice": _into_slice,
    "select": lambda base, view, a, n: _aten.select_scatter.default(base, view, a["dim"], a["index"]),
    "unbind": lambda base, view, a, n: _aten.select_scatter.default(base, view, a.get("dim", 0), n),
    "split": _into_part,
    "split_with_sizes": _into_part,
    "diagonal": lambda base, view, a, n: _aten.diagonal_scatter.default(base, view, a["offset"], a["dim1"], a["dim2"]),
    "as_strided": lambda base, view, a, n: _aten.as_strided_scatter.default(
        base, view, a["size"], a["stride"], a.get("storage_offset")
    ),
    "expand": _expanded_back,
    "unfold": _windows_back,
    "_conj": lambda base, view, a, n: _aten._conj_physical.default(view),
    "_neg_view": lambda base, view, a, n: _aten.neg.default(view),
    "view_as_real": lambda base, view, a, n: _aten.view_as_complex.default(view),
    "view_as_complex": lambda base, view, a, n: _aten.view_as_real.default(view),
}
