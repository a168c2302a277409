"""``out=``: any shape, any dtype, any tensor, as PyTorch takes it.

Nearly always the operator's functional form gives what belongs there. Where an ``out=`` has another dtype, or is read too,
PyTorch may refuse, or compute something else: some operators compute in the dtype of ``out=``. Then the operator itself is
run, whole, on stand-ins, and the session waits for what becomes of it before it touches the user's tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.placements import REPLICATE, Partial
from ..core.program import Fetch
from ..core.spec import Spec
from ..sharding.call import factory_of, functional_of, has_out, leaves, replace_leaves, returned_args, schema_of, written_args
from ..sharding.infer import infer_outputs
from ..sharding.probe import check_dtypes
from . import aliasing, dispatch, moving, special
from .client import current_client
from .wrapper import wrap

_aten = torch.ops.aten

IN_THE_DTYPE_OF_OUT = frozenset(("sum", "prod", "cumsum", "cumprod"))
"""Operators that compute in the dtype of ``out=``, as if that were their ``dtype``."""


Named = dict[str, Any]


def into_out(cls: type, func: Any, args: tuple, kwargs: Named) -> Any:
    """An operator with ``out=``: its functional form, copied to where it was asked for, resized as PyTorch does."""
    if any(type(t) is not cls for t in leaves((args, kwargs), torch.Tensor)):
        return special.mixed(cls, func, args, kwargs)
    names, functional = written_args(func), functional_of(func)
    outs = _outs(func, args, kwargs)
    named = {k: v for k, v in kwargs.items() if k not in names}
    read = any(_shares(t, out) for t in leaves((args, named), torch.Tensor) for out in outs)
    if functional is None or (read and not _may_read(functional, args, named, outs)):
        return itself(cls, func, args, kwargs)
    if _draws_otherwise(functional, args, named, outs):
        return itself(cls, func, args, kwargs)
    if _name(func) in IN_THE_DTYPE_OF_OUT and named.get("dtype") is None:
        named["dtype"] = outs[0].dtype
    results = [_global(t, outs[0]) for t in leaves(functional(*args, **named), torch.Tensor)]
    pairs = list(zip(outs, results, strict=True))
    cast, resized = (any(getattr(out, what) != getattr(made, what) for out, made in pairs) for what in ("dtype", "shape"))
    if (cast and torch.Tag.pointwise not in func.tags) or (read and resized):
        return itself(cls, func, args, kwargs)
    if cast:
        _check_cast(func, args, kwargs, pairs)
    for out, result in pairs:
        put_into(out, result)
    return _returned(func, args, kwargs)


def _outs(func: Any, args: tuple, kwargs: Named) -> list[Any]:
    """The tensors that a call writes, in schema order."""
    given = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
    return leaves([given[name] for name in written_args(func)], torch.Tensor)


def _name(func: Any) -> str:
    return schema_of(func).name.removeprefix("aten::")


def _returned(func: Any, args: tuple, kwargs: Named) -> Any:
    """What the operator returns of what it writes: not the statistics, say, that it keeps in its inputs."""
    given = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
    outs = leaves([given[name] for name in returned_args(func)], torch.Tensor)
    if not schema_of(func).returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)


def _shares(t: Any, out: Any) -> bool:
    return t is out or getattr(t, "_value", t) is out._value


def _may_read(functional: Any, args: tuple, kwargs: Named, outs: list[Any]) -> bool:
    """Whether PyTorch takes an ``out=`` that is an input too: element by element, or where the operator has an in-place form."""
    if torch.Tag.pointwise in functional.tags:
        return True
    others = leaves((args[1:], kwargs), torch.Tensor)
    return hasattr(_aten, f"{_name(functional)}_") and not any(_shares(t, out) for t in others for out in outs)


def _draws_otherwise(functional: Any, args: tuple, kwargs: Named, outs: list[Any]) -> bool:
    """Whether a random operator's functional form does not fit ``out=``. It is not tried: its draw can't be taken back."""
    if torch.Tag.nondeterministic_seeded not in functional.tags:
        return False
    inferred = infer_outputs(functional, *_specs((args, kwargs)))
    return inferred is None or [(m.shape, m.stride, m.dtype) for m in inferred[0]] != [
        (o.shape, o.stride(), o.dtype) for o in outs
    ]


def _specs(tree: Any) -> Any:
    return replace_leaves(tree, torch.Tensor, lambda t: t._spec)


def _check_cast(func: Any, args: tuple, kwargs: Named, pairs: list[tuple[Any, Any]]) -> None:
    """Raise what PyTorch raises where a result may not go into an ``out=`` of another dtype."""
    shaped = {id(o): Spec.make(o._spec.mesh, r._spec.placements, r.shape, o.dtype) for o, r in pairs}
    check_dtypes(func, *replace_leaves((args, kwargs), torch.Tensor, lambda t: shaped.get(id(t), t._spec)))
    for out, result in pairs:
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")


def _global(made: Any, like: Any) -> Any:
    """A result on the mesh: some composites make plain tensors where there is nothing to compute."""
    return made if isinstance(made, type(like)) else moving.put(type(like), made, like._spec.mesh)


def put_into(out: Any, result: Any) -> None:
    """Write a result where it was asked for.

    An ``out=`` of another shape gets memory anew, which lies as the result does; but if others share its memory, it stays
    in that.
    """
    if out.shape == result.shape or aliasing.resized_within(out, result.shape):
        _aten.copy_.default(out, result)
        return
    whole = [REPLICATE if isinstance(p, Partial) else p for p in result._spec.placements]
    moved = moving.move(result, result._spec.replace(whole))
    stride = moving.dense_stride(result._spec)
    fresh = _aten.new_empty_strided.default(moved, list(result.shape), list(stride), dtype=out.dtype)
    out.data = _aten.copy_.default(fresh, moved)


def itself(cls: type, func: Any, args: tuple, kwargs: Named) -> Any:
    """The operator as it is, run whole on copies of its inputs and on stand-ins of what it writes; waits for its end.

    Raises:
        Whatever PyTorch raises.
    """
    outs = _outs(func, args, kwargs)
    mesh = outs[0]._spec.mesh
    only_written = {a.name for a in schema_of(func).arguments if a.is_out}
    read, written = (
        {id(t._value) for t in leaves(tree, torch.Tensor)}
        for tree in ((args, [v for k, v in kwargs.items() if k not in only_written]), outs)
    )
    stand_ins: dict[int, Any] = {}

    def stand_in(t: Any) -> Any:
        key = id(t._value)
        if key not in stand_ins:
            shown = t if key in read else _aten.new_empty_strided.default(t, list(t.shape), list(t.stride()))
            whole = moving.move(shown, shown._spec.replace((REPLICATE,) * mesh.ndim, mesh))
            stand_ins[key] = whole.clone() if key in written and whole._value is t._value else whole
        return stand_ins[key]

    run = special.drawn if torch.Tag.nondeterministic_seeded in func.tags else dispatch.ordinary
    run(cls, func, *replace_leaves((args, kwargs), torch.Tensor, stand_in))
    made = [stand_in(out) for out in outs]
    told = [_described(t) for t in made]
    for out, of, (shape, stride, _) in zip(outs, made, told, strict=True):
        spec = Spec.make(mesh, (REPLICATE,) * mesh.ndim, shape, out.dtype, stride)
        put_into(out, wrap(cls, spec, of._value))
    return _returned(func, args, kwargs)


def _described(tensor: Any) -> Any:
    """Shape, stride and dtype as the workers have it."""
    return current_client().request(Fetch(tensor._value.handle, moving.mesh_info(tensor._spec.mesh), [], describe=True))[0]


def _is_ours(func: Any) -> bool:
    """Whether an operator has ``out=`` and is no factory: those make what they write of numbers alone."""
    return has_out(func) and (functional_of(func) is not None or factory_of(func) is None)


dispatch.HANDLER_FAMILIES.insert(0, (_is_ours, into_out))
