"""A plan for a module that carries none, guessed from which linear layer feeds which.

Layers that take the same input and feed a common one are split by output features, that one by input features: query, key
and value, be they one matrix, before the output projection, gate and up before down. What feeds what is guessed from
containers, the order of definition and shapes. Any guess gives right results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .heads import KEY_VALUE_NAMES
from .styles import feature_dims

LINEAR = ("Linear", "Conv1D")
"""Names of base classes of linear layers."""

PACKED = 3
"""Query, key and value in one matrix, one after the other."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer: (..., ins) to (..., outs)."""

    name: str
    ins: int
    outs: int

    @property
    def key_value(self) -> bool:
        """Whether it makes keys or values: these are fewer than queries at times, and feed nothing alone."""
        return self.name.rpartition(".")[2] in KEY_VALUE_NAMES


def inferred_styles(module: nn.Module) -> dict[str, str]:
    """Pattern -> style; names that differ in a number only are one pattern where they are alike."""
    styles = _vocabulary(module)
    _walk("", module, styles)
    return _as_patterns(styles, [name for name, _ in module.named_modules(remove_duplicate=False)])


def inferred_within(module: nn.Module, parts: Sequence[str]) -> dict[str, str]:
    """The same of parts of a module, each looked at for itself."""
    styles: dict[str, str] = {}
    for part in parts:
        _walk(part, module.get_submodule(part), styles)
    return _as_patterns(styles, [name for name, _ in module.named_modules(remove_duplicate=False)])


def _walk(name: str, module: nn.Module, styles: dict[str, str]) -> list[_Linear]:
    """Find pairs within a module; returns its linear layers, in order, that feed none in there."""
    chain = isinstance(module, nn.Sequential | nn.ModuleList)
    found: list[list[_Linear]] = []
    for n, child in module.named_children():
        path = f"{name}.{n}" if name else n
        linear = _linear(path, child)
        found.append(_walk(path, child, styles) if linear is None else [linear] if path not in styles else [])
        # Layers of a list are alike, and what one leaves over is no partner for the next.
        if isinstance(module, nn.ModuleList) and list(child.children()):
            found.clear()
    order = [one for group in found for one in group]
    waiting: list[_Linear] = []
    for place, one in enumerate(order, 1):
        waiting = _met(one, waiting, chain or _nothing_joins(waiting, order[place:]), styles)
    return waiting


def _nothing_joins(waiting: Sequence[_Linear], later: Sequence[_Linear]) -> bool:
    """Whether no more layers will take the input that those waiting take: none follow, or query, key and value are there."""
    kinds = {one.key_value for one in waiting}
    return not later or (kinds == {True, False} and not any(one.key_value for one in later))


def _met(one: _Linear, waiting: list[_Linear], last: bool, styles: dict[str, str]) -> list[_Linear]:
    """Those that wait for a partner after another layer has come: it ends the wait, or joins, or begins another.

    Args:
        last: what settles square layers, which could end as well as join: no more will join, or they stand in a chain.
    """
    feeding = [w for w in waiting if w.outs == one.ins]
    beside = [w for w in waiting if w.key_value and any(w.ins == f.ins for f in feeding)]
    joins = bool(waiting) and one.ins == waiting[-1].ins
    packed = [w for w in waiting if w.outs == PACKED * one.ins and w.ins == one.outs] if last and not feeding else []
    if packed or (feeding and not one.key_value and (last or not joins)):
        styles |= {w.name: "colwise" for w in (*feeding, *beside)}
        styles |= {w.name: "colwise_gather_output" for w in packed}
        styles[one.name] = "rowwise"
        return []
    return [*waiting, one] if joins else [one]


def _linear(name: str, module: nn.Module) -> _Linear | None:
    bases = {base.__name__ for base in type(module).__mro__}
    # One that is computed anew whenever it is asked for, as a spectral norm's, is not to be asked for.
    weight = module._parameters.get("weight")
    if not bases & set(LINEAR) or weight is None or weight.ndim != 2:
        return None
    out_dim, in_dim = feature_dims(module)
    return _Linear(name, weight.shape[in_dim], weight.shape[out_dim])


def _vocabulary(module: nn.Module) -> dict[str, str]:
    """Tables of embeddings, and the linear layers of the same shape that give a number for each of their rows."""
    modules = dict(module.named_modules(remove_duplicate=False))
    tables = {n: (m.num_embeddings, m.embedding_dim) for n, m in modules.items() if isinstance(m, nn.Embedding)}
    linears = [found for n, m in modules.items() if (found := _linear(n, m)) is not None]
    heads = {one.name: (one.outs, one.ins) for one in linears if (one.outs, one.ins) in tables.values() and one.outs > one.ins}
    return {n: "embedding_rowwise" for n, shape in tables.items() if shape in heads.values()} | dict.fromkeys(
        heads, "colwise_gather_output"
    )


def _as_patterns(styles: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """One row for names that differ in a number only, where all that the pattern names are alike."""
    groups: dict[str, list[str]] = {}
    for name in styles:
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), []).append(name)
    out: dict[str, str] = {}
    for pattern, members in groups.items():
        alike = len({styles.get(n) for n in names if fnmatchcase(n, pattern)}) == 1
        out |= {pattern: styles[members[0]]} if alike else {n: styles[n] for n in members}
    return out
