"""Where plans come from: you, the model itself, or the structure of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh
from .decide import join
from .experts import are_experts
from .inferred import inferred_styles, inferred_within
from .plan import WHERE, Plan, Row
from .sequence import over_sequence
from .styles import STYLES

PlanArgument = Plan | Mapping[str, Any] | None


def plan_of(module: nn.Module, sp: bool = False) -> Plan:
    """The plan that ``parallelize`` follows for a module when it is given none.

    The module's own if it carries one, as most Hugging Face models do; else one that is guessed from its structure. A guess
    can cost communication, and nothing else: results do not depend on a plan.

    Args:
        sp: whether norms and residuals between tensor-parallel regions are split along the sequence.
    """
    plan = _found(module)
    return over_sequence(plan) if sp else plan


def read_plan(module: nn.Module, mesh: DeviceMesh, argument: PlanArgument, sp: bool = False) -> Plan:
    """The plan to follow: the argument, a dict of rows in its one form, or the module's.

    Raises:
        UsageError: a row that names an unknown style or axis, or matches nothing.
    """
    if argument is None:
        return plan_of(module, sp)
    own = {row.pattern for row in _found(module).rows}
    plan = argument if isinstance(argument, Plan) else Plan.of(argument, mesh)
    # A model's own plan may name modules that it lacks: one plan serves a whole family.
    _check_patterns(module, [row for row in plan.rows if row.pattern not in own])
    return over_sequence(plan) if sp else plan


def _found(module: nn.Module) -> Plan:
    config = getattr(module, "config", None)
    own = getattr(module, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    if own:
        plan = Plan("the model's own plan", tuple(Row(p, c if c in STYLES else "replicate") for p, c in own.items()))
        more = inferred_within(module, _unnamed_beside_experts(module, plan))
        return Plan(plan.source, (*plan.rows, *(Row(p, c) for p, c in more.items())))
    styles = inferred_styles(module)
    return Plan.of(styles, source="a plan inferred from its structure" if styles else "no plan")


def _unnamed_beside_experts(module: nn.Module, plan: Plan) -> list[str]:
    """Modules beside experts of which a plan says nothing: those that all tokens share. Some models' own plans leave them out."""
    out = []
    for name, holder in module.named_modules():
        if any(are_experts(part) for part in holder.children()):
            paths = {join(name, n): part for n, part in holder.named_children() if not are_experts(part)}
            out += [
                path
                for path, part in paths.items()
                if all(plan.choice(join(path, owner), n) is None for owner, m in part.named_modules() for n in m._parameters)
            ]
    return out


def _check_patterns(module: nn.Module, rows: Sequence[Row]) -> None:
    """A row that names nothing is a slip of the pen."""
    names = {
        *dict(module.named_modules(remove_duplicate=False)),
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    for row in rows:
        if not any(fnmatchcase(name, row.pattern) for name in names):
            raise UsageError(
                four_parts(
                    f"pattern {row.pattern!r}",
                    "every row of a plan names a module, parameter or buffer",
                    WHERE,
                    f"look names up with named_parameters(), e.g. {sorted(names)[-1]!r}",
                )
            )
