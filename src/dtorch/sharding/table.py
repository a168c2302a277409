"""All rules, family by family: the one place where an operator meets its rule."""

from __future__ import annotations

from functools import cache

from torch import Tag
from torch._ops import OpOverload

from .call import schema_of
from .rule import Rule, Table
from .rules import (
    attention,
    batch_norm,
    batched,
    classification,
    convolution,
    creation,
    distances,
    embedding,
    group_norm,
    indexing,
    joining,
    losses,
    matmul,
    moves,
    normalization,
    optimizing,
    padding,
    pointwise,
    pooling,
    random,
    ranking,
    reductions,
    scans,
    shapes,
    slicing,
    softmax,
    spectral,
    spreading,
    statistics,
)

FAMILIES: tuple[Table, ...] = (
    pointwise.TABLE,
    matmul.TABLE,
    reductions.TABLE,
    shapes.TABLE,
    slicing.TABLE,
    creation.TABLE,
    moves.TABLE,
    joining.TABLE,
    indexing.TABLE,
    scans.TABLE,
    ranking.TABLE,
    statistics.TABLE,
    spreading.TABLE,
    padding.TABLE,
    optimizing.TABLE,
    softmax.TABLE,
    normalization.TABLE,
    batch_norm.TABLE,
    group_norm.TABLE,
    embedding.TABLE,
    attention.TABLE,
    losses.TABLE,
    classification.TABLE,
    random.TABLE,
    convolution.TABLE,
    pooling.TABLE,
    batched.TABLE,
    spectral.TABLE,
    distances.TABLE,
)
_custom: dict[str, Rule] = {}


def register(name: str, rule: Rule) -> None:
    """Add a rule for an operator, by qualified name, e.g. ``"mylib::op"``."""
    _custom[name] = rule
    rule_for.cache_clear()


@cache
def rule_for(func: OpOverload) -> Rule | None:
    """The rule of an operator: by name and overload, then by name; an in-place form has its functional form's rule."""
    schema = schema_of(func)
    if any(a.is_out for a in schema.arguments):
        return None
    name = schema.name.removeprefix("aten::")
    base = name if name.endswith("__") else name.removesuffix("_")
    for key in (f"{base}.{schema.overload_name or 'default'}", base):
        for table in (*FAMILIES, _custom):
            if key in table:
                return table[key]
    return pointwise.ANY if Tag.pointwise in func.tags else None
