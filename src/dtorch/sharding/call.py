"""``OpCall``: one operator call as rules see it, with a ``Spec`` wherever the user passed a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch._ops import OpOverload

from ..core.spec import Spec


@dataclass(frozen=True, slots=True)
class OutMeta:
    """Shape, stride and dtype of one tensor output, as PyTorch's meta kernel gives them (global)."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OpCall:
    """An operator with its arguments.

    Attributes:
        func: the ATen overload.
        args, kwargs: as called; a ``Spec`` stands for each tensor, also inside lists.
        outs: metadata of each tensor output, lists and tuples flattened.
        specs: every ``Spec`` among the arguments, in order.
    """

    func: OpOverload
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[OutMeta, ...] = ()
    specs: tuple[Spec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(leaves((self.args, self.kwargs), Spec)))

    @cached_property
    def bound(self) -> dict[str, Any]:
        """Arguments by schema name, defaults filled in."""
        schema = schema_of(self.func)
        values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        values.update({a.name: v for a, v in zip(schema.arguments, self.args, strict=False)})
        return {**values, **self.kwargs}

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument of that schema name; ``default`` where it is absent or None."""
        value = self.bound.get(name)
        return default if value is None else value

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """A dim argument (int, list or None = all), as sorted non-negative dims."""
        value = self.arg(name)
        if value is None or value == []:
            return tuple(range(ndim))
        return tuple(sorted(d % max(ndim, 1) for d in ([value] if isinstance(value, int) else value)))


def leaves(tree: Any, kind: type) -> list[Any]:
    """Every object of a kind in nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    _collect(tree, kind, found)
    return found


def _collect(tree: Any, kind: type, found: list[Any]) -> None:
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for item in tree:
            if item.__class__ not in _ATOMS:
                _collect(item, kind, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, kind, found)


def replace_leaves(tree: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists and dicts with ``fn`` applied to every object of a kind."""
    if isinstance(tree, kind):
        return fn(tree)
    if tree.__class__ is tuple or tree.__class__ is list:
        return tree.__class__([item if item.__class__ in _ATOMS else replace_leaves(item, kind, fn) for item in tree])
    if isinstance(tree, dict):
        return {k: replace_leaves(v, kind, fn) for k, v in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return tuple(replace_leaves(item, kind, fn) for item in tree)
    return tree


_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype))
"""Types that hold nothing; ``kind`` is never one of them."""


@cache
def schema_of(func: OpOverload) -> torch.FunctionSchema:
    """The operator's schema. ``_schema`` is the only place PyTorch keeps it."""
    return func._schema


@cache
def operator_name(func: OpOverload) -> str:
    """Qualified name with overload, e.g. ``aten::add.Tensor``."""
    schema = schema_of(func)
    return f"{schema.name}.{schema.overload_name or 'default'}"


@cache
def written_args(func: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    return tuple(a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def has_out(func: OpOverload) -> bool:
    """Whether the operator writes its results to ``out=`` arguments."""
    return any(a.is_out for a in schema_of(func).arguments)


@cache
def returns_written(func: OpOverload) -> bool:
    """Whether what the operator returns are the arguments it writes."""
    returns = schema_of(func).returns
    return bool(returns) and all(r.alias_info is not None and r.alias_info.is_write for r in returns)


@cache
def returned_args(func: OpOverload) -> tuple[str, ...]:
    """Names of the written arguments that the operator returns, in the order of its returns."""
    schema = schema_of(func)
    by_set = {frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info is not None}
    return tuple(
        by_set[frozenset(r.alias_info.before_set)] for r in schema.returns if r.alias_info is not None and r.alias_info.is_write
    )


@cache
def is_view(func: OpOverload) -> bool:
    """Whether outputs alias an input that the operator does not write to."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns)


def draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; an operator with a dropout probability of zero does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for argument, value in zip(schema_of(func).arguments, args, strict=False):
        if argument.name == "dropout_p":
            return value != 0
    return "dropout_p" not in {a.name for a in schema_of(func).arguments} or kwargs.get("dropout_p", 0.0) != 0


@cache
def functional_of(func: OpOverload) -> OpOverload | None:
    """The overload that computes the same without writing to its arguments, or None."""
    return _unwriting(func, ())


@cache
def factory_of(func: OpOverload) -> OpOverload | None:
    """The overload that makes, in a dtype and at a place to be told, what this one writes to ``out=``; or None."""
    return _unwriting(func, ("dtype", "layout", "device", "pin_memory"))


def _unwriting(func: OpOverload, more: Sequence[str]) -> OpOverload | None:
    """The overload of the same arguments, but for ``out=`` and some more, that writes nothing."""
    schema = schema_of(func)
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    wanted = [str(a.type) for a in schema.arguments if not a.is_out]
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        given = schema_of(candidate).arguments
        names = {a.name for a in given}
        if not written_args(candidate) and names >= {*more} and [str(a.type) for a in given if a.name not in more] == wanted:
            return candidate
    return None
