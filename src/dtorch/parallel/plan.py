"""Plans: which parameter is placed how. A model's own tensor-parallel plan, or yours.

A plan is data: patterns of names, each with the name of a style or with placements. What no pattern names is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh
from ..core.placements import Partial, Placement, Replicate, Shard
from .axes import by_axis_name, check_axis_name
from .styles import STYLES, style_named

Choice = str | Mapping[str, Placement]
"""A style's name, or placements by axis name."""

PlanArgument = Mapping[str, Any] | None

WHERE = "parallelize(module, mesh, plan)"


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a plan: names that match ``pattern`` (``*`` stands for anything) are placed by ``choice``."""

    pattern: str
    choice: Choice


@dataclass(frozen=True)
class Plan:
    """Rows, in order. ``source`` says where they come from, for ``describe``."""

    source: str
    entries: tuple[Entry, ...]

    def choice(self, module_name: str, parameter_name: str) -> Choice | None:
        """What the plan says of a parameter: by its own name if a row matches that, else by its module's; later rows win."""
        full = f"{module_name}.{parameter_name}" if module_name else parameter_name
        for name in (full, module_name):
            for entry in reversed(self.entries):
                if fnmatchcase(name, entry.pattern):
                    return entry.choice
        return None


def read_plan(module: nn.Module, mesh: DeviceMesh, argument: PlanArgument) -> Plan:
    """The plan to follow: the argument's, else the model's own, else that of its kind, else an empty one.

    Raises:
        UsageError: a row that names an unknown style or axis, or matches nothing.
    """
    if argument is not None:
        plan = Plan("the plan given", tuple(Entry(p, _checked(p, c, mesh)) for p, c in argument.items()))
        _check_patterns(module, plan)
        return plan
    own = getattr(module, "_tp_plan", None) or _base_plan(module)
    if own:
        return Plan("the model's own plan", tuple(Entry(p, c if c in STYLES else "replicate") for p, c in own.items()))
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind in PLANS:
        return Plan(f"a plan for {kind} models", tuple(Entry(p, c) for p, c in PLANS[kind].items()))
    return Plan("no plan", ())


def _base_plan(module: nn.Module) -> Mapping[str, str]:
    return getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}


def _checked(pattern: str, choice: Any, mesh: DeviceMesh) -> Choice:
    """A row's right side in its one form."""
    where = f"{WHERE}, row {pattern!r}"
    if isinstance(choice, str):
        style_named(choice, where)
        return choice
    if isinstance(choice, Sequence):
        choice = by_axis_name(mesh, choice, where)
    if isinstance(choice, Mapping):
        for name, placement in choice.items():
            check_axis_name(name, where)
            if isinstance(placement, Shard | Replicate | Partial):
                continue
            raise UsageError(
                four_parts(
                    f"placement {placement!r}",
                    "a placement is Shard, Replicate or Partial",
                    where,
                    "use dtorch.Shard(dim) or dtorch.Replicate()",
                )
            )
        return choice
    raise UsageError(
        four_parts(
            f"{choice!r}",
            "a row says a style's name, placements by axis, or a list of placements",
            where,
            "write e.g. 'colwise', {'tp': Shard(0)} or [Replicate(), Shard(0)]",
        )
    )


def _check_patterns(module: nn.Module, plan: Plan) -> None:
    """A row that names nothing is a slip of the pen."""
    names = {
        *dict(module.named_modules(remove_duplicate=False)),
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    for entry in plan.entries:
        if not any(fnmatchcase(name, entry.pattern) for name in names):
            raise UsageError(
                four_parts(
                    f"pattern {entry.pattern!r}",
                    "every row of a plan names a module, parameter or buffer",
                    WHERE,
                    f"look names up with named_parameters(), e.g. {sorted(names)[-1]!r}",
                )
            )


# Model type -> plan, for models that carry none. Query, key and value lie in one matrix in GPT-2 and stay whole.
PLANS: dict[str, dict[str, str]] = {
    "gpt2": {
        "*h.*.mlp.c_fc": "colwise",
        "*h.*.mlp.c_proj": "rowwise",
        "*wte": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    },
    "bert": {
        "*.attention.self.query": "colwise",
        "*.attention.self.key": "colwise",
        "*.attention.self.value": "colwise",
        "*.attention.output.dense": "rowwise",
        "*.intermediate.dense": "colwise",
        "*layer.*.output.dense": "rowwise",
    },
}
