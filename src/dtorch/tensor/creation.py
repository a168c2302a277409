"""Factory functions: ``torch``'s own, plus ``device_mesh=`` and ``placements=``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.mesh import DeviceMesh, checked_mesh
from ..core.placements import REPLICATE, Partial, Placement
from ..core.program import Call
from ..core.spec import Spec
from ..sharding.builder import Builder, Varying
from ..sharding.call import factory_of, functional_of, has_out, leaves, replace_leaves, schema_of
from ..sharding.infer import infer_outputs
from ..sharding.plan import Plan
from ..sharding.planner import plan_into
from ..sharding.redistribute import redistribute as plan_redistribute
from . import construct, outs
from .client import current_client
from .defaults import default_mesh, pop_mesh, push_mesh
from .dispatch import HANDLER_FAMILIES
from .hotpath import Value
from .moving import PlannedMove
from .sites import current_site
from .special import Source
from .tensor import Tensor
from .wrapper import wrap

_aten = torch.ops.aten
_FILLS = (_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format)


def create(func: Any, args: tuple, options: dict[str, Any]) -> Tensor:
    """Run an ATen factory on a mesh.

    Args:
        func: the factory, e.g. ``aten.zeros.default``; its first argument is the shape for fills.
        options: ``device_mesh``, ``placements``, ``requires_grad``, ``generator``, and the factory's own keywords.
    """
    mesh = checked_mesh(options.pop("device_mesh", None) or default_mesh())
    placements = options.pop("placements", None)
    placements = (REPLICATE,) * mesh.ndim if placements is None else tuple(placements)
    requires_grad, generator = options.pop("requires_grad", False), options.pop("generator", None)
    kwargs = {k: v for k, v in options.items() if v is not None}
    # As in PyTorch, a 0-d tensor is good for a number.
    args, kwargs = replace_leaves((args, kwargs), torch.Tensor, lambda t: t.item())
    client = current_client()
    client.check_mesh(mesh)
    key = (id(func), repr((args, kwargs)), mesh, placements)
    entry = client.cache.get(key)
    if entry is None:
        made = _plan(func, args, kwargs, mesh, placements)
        entry = PlannedMove(made, client.define(made))
        client.remember(key, entry)
    spec, value = entry.plan.outs[0], Value(client, client.new_handle())
    call, site = Call(entry.number, [], [value.handle], []), current_site()
    if entry.plan.define.random:
        Source(generator, spec.device).draw(client, call, site)
    else:
        client.call(call, site)
    return wrap(Tensor, spec, value).requires_grad_(requires_grad)


def _plan(func: Any, args: tuple, kwargs: dict[str, Any], mesh: DeviceMesh, placements: Sequence[Placement]) -> Plan:
    """A factory's plan: fills are made piece by piece, everything else whole (so values do not depend on the mesh)."""
    inferred = infer_outputs(func, args, kwargs)
    assert inferred is not None
    meta = inferred[0][0]
    target = Spec.make(mesh, placements, meta.shape, meta.dtype, meta.stride)
    builder = Builder(func._schema.name, [], plan_into)
    builder.random = torch.Tag.nondeterministic_seeded in func.tags
    by_piece = func in _FILLS and not any(isinstance(p, Partial) for p in target.placements)
    start = target if by_piece else target.replace((REPLICATE,) * mesh.ndim)
    shape = Varying(lambda coord: list(start.local_box(coord)[1]))
    local = (shape, *args[1:]) if func in _FILLS else args
    out = builder.local(func, local, {**kwargs, "device": start.device}, [start], mesh)[0]
    out = plan_redistribute(builder, out, target)
    return Plan(builder.define([out]), (target,), ..., (), "rule", mesh, False)


def tensor(data: Any, **options: Any) -> Tensor:
    """A tensor of given values; options as ``Tensor``'s: ``device_mesh``, ``placements``, ``dtype``, ``requires_grad``."""
    return Tensor(data, **options)


def from_local(local: construct.Pieces, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """A global tensor made of local tensors.

    Args:
        local: one plain tensor per device in the mesh's row-major order, or a function from a mesh coordinate to one.
            Sizes along sharded dims may differ; they become explicit shard sizes.
        placements: one per mesh axis. Devices along replicated axes must agree; the first one's tensor is taken.

    Raises:
        UsageError: not one tensor per device.
        PlacementError: local shapes or dtypes that do not fit together.
    """
    return construct.assemble(Tensor, local, device_mesh, placements)


def _shape(size: tuple, options: dict[str, Any]) -> list[int]:
    size = size or (options.pop("size", ()),)
    return list(size[0]) if len(size) == 1 and isinstance(size[0], list | tuple) else [int(n) for n in size]


def zeros(*size: Any, **options: Any) -> Tensor:
    """Zeros of a global shape. Options as ``torch.zeros``, plus ``device_mesh`` and ``placements``."""
    return create(_aten.zeros.default, (_shape(size, options),), _typed(options))


def ones(*size: Any, **options: Any) -> Tensor:
    """Ones of a global shape. Options as ``torch.ones``, plus ``device_mesh`` and ``placements``."""
    return create(_aten.ones.default, (_shape(size, options),), _typed(options))


def empty(*size: Any, **options: Any) -> Tensor:
    """Uninitialised memory of a global shape. Options as ``torch.empty``, plus ``device_mesh`` and ``placements``."""
    return create(_aten.empty.memory_format, (_shape(size, options),), _typed(options))


def full(size: Sequence[int], fill_value: Any, **options: Any) -> Tensor:
    """A constant of a global shape. Options as ``torch.full``, plus ``device_mesh`` and ``placements``."""
    return create(_aten.full.default, (list(size), fill_value), options)


def rand(*size: Any, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1): for one seed, the same global values on every mesh and placement."""
    return create(_aten.rand.default, (_shape(size, options),), _typed(options))


def randn(*size: Any, **options: Any) -> Tensor:
    """Standard normal numbers: for one seed, the same global values on every mesh and placement."""
    return create(_aten.randn.default, (_shape(size, options),), _typed(options))


def randint(low: int = 0, high: Any = None, size: Any = None, **options: Any) -> Tensor:
    """Integers in [low, high), or [0, low) when called as ``randint(high, size)``; int64 unless told."""
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    return create(_aten.randint.low, (low, high, list(size)), {"dtype": torch.int64, **options})


def arange(start: Any = 0, end: Any = None, step: Any = 1, **options: Any) -> Tensor:
    """Evenly spaced numbers from start (0 unless given) to end, as ``torch.arange``."""
    return create(_aten.arange.start_step, (0, start, step) if end is None else (start, end, step), options)


def linspace(start: Any, end: Any, steps: int, **options: Any) -> Tensor:
    """``steps`` numbers from start to end, both included."""
    ends = [t.item() if isinstance(t, torch.Tensor) else t for t in (start, end)]
    kind = torch.get_default_dtype()
    kind = kind.to_complex() if any(isinstance(n, complex) for n in ends) else kind
    return create(_aten.linspace.default, (*ends, steps), {**options, "dtype": options.get("dtype") or kind})


def eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    """An (n, m) matrix with ones on the diagonal; m is n unless given."""
    return create(_aten.eye.m, (n, n if m is None else m), _typed(options))


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": torch.get_default_dtype(), **{k: v for k, v in options.items() if v is not None or k != "dtype"}}


def _like(factory: Callable[..., Tensor], template: torch.Tensor, first: tuple, options: dict[str, Any]) -> Tensor:
    placed: dict[str, Any] = {}
    if isinstance(template, Tensor):
        settled = [REPLICATE if isinstance(p, Partial) else p for p in template.placements]
        placed = {"device_mesh": template.device_mesh, "placements": settled}
    return factory(*first, **{"dtype": template.dtype, **placed, **options})


def zeros_like(template: torch.Tensor, **options: Any) -> Tensor:
    """Zeros with the template's shape, dtype, mesh and placements."""
    return _like(zeros, template, tuple(template.shape) or ((),), options)


def ones_like(template: torch.Tensor, **options: Any) -> Tensor:
    """Ones with the template's shape, dtype, mesh and placements."""
    return _like(ones, template, tuple(template.shape) or ((),), options)


def empty_like(template: torch.Tensor, **options: Any) -> Tensor:
    """Uninitialised memory with the template's shape, dtype, mesh and placements."""
    return _like(empty, template, tuple(template.shape) or ((),), options)


def full_like(template: torch.Tensor, fill_value: Any, **options: Any) -> Tensor:
    """A constant with the template's shape, dtype, mesh and placements."""
    return _like(full, template, (tuple(template.shape), fill_value), options)


def rand_like(template: torch.Tensor, **options: Any) -> Tensor:
    """Uniform numbers with the template's shape, dtype, mesh and placements."""
    return _like(rand, template, tuple(template.shape) or ((),), options)


def randn_like(template: torch.Tensor, **options: Any) -> Tensor:
    """Standard normal numbers with the template's shape, dtype, mesh and placements."""
    return _like(randn, template, tuple(template.shape) or ((),), options)


_TORCH_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    torch.zeros: zeros,
    torch.ones: ones,
    torch.empty: empty,
    torch.full: full,
    torch.rand: rand,
    torch.randn: randn,
    torch.randint: randint,
    torch.arange: arange,
    torch.linspace: linspace,
    torch.eye: eye,
}


def _is_factory_into_out(func: Any) -> bool:
    """Whether an operator with ``out=`` makes what it writes of numbers alone; 0-d tensors are good for numbers."""
    tensors = [a.name for a in schema_of(func).arguments if not a.is_out and "Tensor" in str(a.type)]
    return has_out(func) and functional_of(func) is None and factory_of(func) is not None and set(tensors) <= {"start", "end"}


def _into_out(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A factory with ``out=``: made on the mesh of what is written, in its dtype, and copied there, resized as PyTorch does."""
    out = kwargs["out"]
    numbers = replace_leaves(args, torch.Tensor, lambda t: t.item())
    if leaves(args, torch.Tensor):
        return func.overloadpacket(*numbers, **kwargs)
    factory = factory_of(func)
    same = factory in _FILLS and list(numbers[0]) == list(out.shape)
    placements = [REPLICATE if isinstance(p, Partial) else p for p in out.placements] if same else None
    options = {**kwargs, "dtype": out.dtype, "device_mesh": out.device_mesh, "placements": placements}
    made = create(factory, numbers, {k: v for k, v in options.items() if k != "out"})
    if func.overloadpacket in _SERIES and out.numel() == made.numel():
        made = _aten.view.default(made, list(out.shape))
    outs.put_into(out, made)
    return out


_SERIES = (_aten.arange, _aten.range, _aten.linspace, _aten.logspace)
"""Factories that PyTorch lets fill an ``out=`` of any shape that has as many elements."""

# Before the random operators: some factories draw.
HANDLER_FAMILIES.insert(0, (_is_factory_into_out, _into_out))


class _Factories(TorchFunctionMode):
    """Sends plain ``torch`` factories to the default mesh, so that model code need not be changed."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        ours = _TORCH_FACTORIES.get(func)
        if ours is None or "out" in kwargs:
            return func(*args, **kwargs)
        for name in ("device", "layout", "pin_memory"):
            kwargs.pop(name, None)
        return ours(*args, **kwargs)


@contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Make ``mesh`` the default of factory functions inside, also of plain ``torch`` ones in model code."""
    push_mesh(checked_mesh(mesh))
    try:
        with _Factories():
            yield mesh
    finally:
        pop_mesh()
