"""Operators that are no plain planned call: reading values, sharing memory, random draws, lists of tensors, mixing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..core.program import Call, Draw
from ..sharding.call import functional_of, leaves, replace_leaves, returns_written, schema_of, written_args
from ..sharding.table import rule_for
from . import aliasing, dispatch, foreach, fused, moving, silent, tables
from .client import current_client
from .sites import current_site
from .wrapper import wrap

_aten = torch.ops.aten


def shared(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``detach`` and ``alias``: another wrapper over the same value; no instruction at all."""
    return wrap(cls, args[0]._spec, args[0]._value, args[0])


def computed_view(compute: Any) -> Any:
    """A handler for a view that PyTorch makes by a mark on the tensor (conjugate, negative): computed, and linked to its base."""

    def handler(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = compute(args[0])
        aliasing.link(func, args, result, 0, moving.alias)
        return result

    return handler


def converted(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``to`` that reached us whole: the tensor itself where nothing changes, as in PyTorch; else its parts."""
    tensor = args[0]
    if len(args) == 2 and not kwargs and args[1] is tensor._spec.dtype:
        return tensor
    given = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
    dtype, device = given.get("dtype", tensor.dtype), given.get("device", tensor.device)
    same = dtype in (None, tensor.dtype) and device in (None, tensor.device)
    if same and not given.get("copy") and given.get("memory_format") in (None, torch.preserve_format):
        return tensor
    return func.decompose(*args, **kwargs)


def reshaped(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``reshape`` that reached us whole: a view where one is possible."""
    tensor, shape = args
    if _viewable(tensor.shape, tensor.stride(), tuple(shape)):
        return _aten.view.default(tensor, shape)
    return func.decompose(tensor, shape)


@lru_cache(maxsize=4096)
def _viewable(shape: torch.Size, stride: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(shape, stride, device="meta").view(target)
    except RuntimeError:
        return False
    return True


def read_scalar(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``item()``: waits for the value."""
    return moving.fetch_whole(args[0]).item()


def compared(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """``torch.equal``: waits for the answer."""
    a, b = args
    if a.shape != b.shape:
        return False
    return bool((a == b).all().item())


def all_close(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """``torch.allclose``: waits for the answer."""
    return bool(torch.isclose(*args, **kwargs).all().item())


def reshaped_in_place(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``squeeze_``, ``t_`` and their kin: the tensor becomes its own view."""
    tensor = args[0]
    functional = functional_of(func)
    assert functional is not None
    view = functional(*args, **kwargs)
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    tensor._spec, tensor._value = view._spec, view._value
    return tensor


def resized(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``resize_``: the tensor gets memory anew, replicated; as in PyTorch, what is new in it has no defined value."""
    tensor, size = args[0], args[1]
    if tensor.shape == torch.Size(size) or aliasing.resized_within(tensor, size):
        return tensor
    count = torch.Size(size).numel()
    flat = _aten.reshape.default(tensor, [-1])
    if count > tensor.numel():
        flat = _aten.cat.default([flat, _aten.new_empty.default(tensor, [count - tensor.numel()])])
    tensor.data = moving.replicated(_aten.slice.Tensor(flat, 0, 0, count)).clone().view(size)
    return tensor


def adopted(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``set_``: the tensor becomes a second hold on another's memory."""
    args[0].data = args[1]
    return args[0]


def drawn(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A random operator: the generator's state goes along and comes back, so every mesh draws the same numbers."""
    kwargs = dict(kwargs)
    generator = kwargs.pop("generator", None)
    args = tuple(None if isinstance(a, torch.Generator) else a for a in args)
    client = current_client()
    operator = dispatch.operator_of(func)
    flat = dispatch.flatten_call(cls, client, operator, args, kwargs)
    if flat is None:
        return mixed(cls, func, args, {**kwargs, "generator": generator} if generator is not None else kwargs)
    key, handles, scalars = flat
    entry = client.cache.get(key) or dispatch.plan(client, operator, key, args, kwargs)
    device = leaves((args, kwargs), cls)[0]._spec.device
    source = Source(generator, device) if entry.plan.define.random else None
    return dispatch.finish(
        cls, client, operator, entry, Call(entry.number, handles, [], scalars), current_site(), args, kwargs, source
    )


class Source:
    """Where random numbers come from: a generator, or the device type's default one."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        if generator is None:
            generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        self.generator = generator

    def draw(self, client: Any, call: Call, site: Any) -> None:
        """Run a call with this generator, and take its state back."""
        state = self.generator.get_state()
        after = client.request(Draw(call.plan, call.inputs, call.outputs, call.scalars, state), site)
        self.generator.set_state(after)


def mixed(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call with plain tensors mixed in: they are taken as replicated; a plain tensor that is written gets the result."""
    partners = leaves((args, kwargs), cls)
    mesh = next((t._spec.mesh for t in partners if t.ndim), partners[0]._spec.mesh)
    promoted: dict[int, Any] = {}

    def promote(t: torch.Tensor) -> Any:
        if type(t) is cls:
            return t
        if id(t) not in promoted:
            promoted[id(t)] = moving.put(cls, t, mesh)
        return promoted[id(t)]

    result = func(*replace_leaves(args, torch.Tensor, promote), **replace_leaves(kwargs, torch.Tensor, promote))
    placed = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
    written = leaves([placed.get(name) for name in written_args(func)], torch.Tensor)
    for t in written:
        if type(t) is not cls:
            made = promoted[id(t)]
            if t.shape != made.shape:
                t.resize_(made.shape).as_strided_(made.shape, made.stride())
            t.copy_(moving.fetch_whole(made))
    if not returns_written(func):
        return result
    return written[0] if len(written) == 1 else tuple(written)


def decomposed(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A composite operator that reached us whole: run its parts."""
    return func.decompose(*args, **kwargs)


def is_composite(func: Any) -> bool:
    """Whether PyTorch runs the operator as others, and no rule plans it as one.

    Some have a kernel besides: that is what plain tensors run, and its last bits are not those of the parts.
    """
    rule = rule_for(func)
    own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
    return func._can_decompose() and not own_kernel and not (rule is not None and rule.whole)


def install() -> None:
    """Register every handler with dispatch."""
    handlers = dispatch.HANDLERS
    for func in (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default):
        handlers[func] = shared
    handlers[_aten._conj.default] = computed_view(_aten._conj_physical.default)
    handlers[_aten._neg_view.default] = computed_view(_aten.neg.default)
    handlers[_aten._local_scalar_dense.default] = read_scalar
    handlers[_aten.equal.default] = compared
    handlers[_aten.allclose.default] = all_close
    handlers[_aten.resize_.default] = resized
    handlers[_aten.set_.source_Tensor] = adopted
    handlers[_aten.reshape.default] = reshaped
    for overload in ("dtype", "device", "dtype_layout"):
        handlers[getattr(_aten.to, overload)] = converted
    handlers.update({**silent.HANDLERS, **tables.HANDLERS})
    families = dispatch.HANDLER_FAMILIES
    families.append((lambda f: torch.Tag.inplace_view in f.tags, reshaped_in_place))
    families.append((foreach.is_foreach, foreach.one_by_one))
    families.append((fused.is_fused, fused.one_by_one))
    families.append((is_composite, decomposed))
    families.append((lambda f: torch.Tag.nondeterministic_seeded in f.tags, drawn))


install()
dispatch.bind_mixed(mixed)
