"""Plans: how weights lie, and what is given to and comes from modules. A plan is data: rows, in order.

A row is a pattern of names (``*`` stands for anything) and up to three things: ``weights``, placements by axis name or the
name of a style that works them out from the module; ``inputs`` and ``outputs``, placements by axis name. Of each of the
three the last row that says something holds. What no row names is replicated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh
from ..core.placements import Partial, Placement, Replicate, Shard
from .axes import by_axis_name, check_axis_name
from .styles import style_named
from .writing import placement_named, table

Choice = str | Mapping[str, Placement]
"""A style's name, or placements by axis name."""

PARTS = ("weights", "inputs", "outputs")
WHERE = "parallelize(module, mesh, plan)"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a plan.

    Attributes:
        pattern: names of modules, parameters or buffers.
        weights: how these lie; None where the row does not say.
        inputs: how the first tensor given to a module lies, on the axes named.
        outputs: how the first tensor that it returns lies, on the axes named.
    """

    pattern: str
    weights: Choice | None = None
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    outputs: Mapping[str, Placement] = field(default_factory=dict)

    @staticmethod
    def of(pattern: str, choice: Any, mesh: DeviceMesh | None = None) -> Row:
        """A row from what is written in a dict: a ``Choice``, or a dict of any of ``weights``, ``inputs``, ``outputs``.

        Args:
            mesh: what a list of placements, one per axis other than ``pp``, goes by.

        Raises:
            UsageError: a style, axis or placement that there is not.
            PlacementError: a list of the wrong length.
        """
        where = f"{WHERE}, row {pattern!r}"
        named = choice if isinstance(choice, Mapping) and set(choice) & set(PARTS) else {"weights": choice}
        if unknown := [name for name in named if name not in PARTS]:
            raise _refused(unknown[0], f"a row of parts says any of {', '.join(PARTS)}", where)
        parts: dict[str, Any] = {part: _checked(value, mesh, where) for part, value in named.items()}
        for part in ("inputs", "outputs"):
            if isinstance(parts.get(part), str):
                raise _refused(parts[part], f"{part} are placements by axis", where)
        return Row(pattern, **parts)

    def said(self) -> dict[str, Any]:
        """The parts that the row says something of."""
        return {part: v for part in PARTS if (v := getattr(self, part)) is not None and (v or part == "weights")}


@dataclass(frozen=True)
class Plan:
    """Rows, in order; of each part the last row that names a thing holds.

    ``str(plan)`` is a table; ``to_json`` and ``from_json`` keep a plan in a file; ``override`` changes any part of it, and
    ``diff`` tells two apart. ``source`` says where it comes from.
    """

    source: str
    rows: tuple[Row, ...]

    @staticmethod
    def of(rows: Mapping[str, Any], mesh: DeviceMesh | None = None, source: str = "the plan given") -> Plan:
        """A plan written as a dict from pattern to what ``Row.of`` takes.

        Raises:
            UsageError, PlacementError: see ``Row.of``.
        """
        if not isinstance(rows, Mapping) or not all(isinstance(pattern, str) for pattern in rows):
            raise _refused(rows, "a plan is a Plan, or a dict from patterns of names to choices", WHERE)
        return Plan(source, tuple(Row.of(pattern, choice, mesh) for pattern, choice in rows.items()))

    def choice(self, module_name: str, parameter_name: str) -> Choice | None:
        """What the plan says of a parameter: by its own name if a row matches that, else by its module's."""
        full = f"{module_name}.{parameter_name}" if module_name else parameter_name
        own = self._last(full, "weights")
        return self._last(module_name, "weights") if own is None else own

    def inputs(self, module_name: str) -> Mapping[str, Placement]:
        """How the first tensor given to a module lies, on the axes that the plan names."""
        return self._last(module_name, "inputs") or {}

    def outputs(self, module_name: str) -> Mapping[str, Placement]:
        """How the first tensor that a module returns lies, on the axes that the plan names."""
        return self._last(module_name, "outputs") or {}

    def override(self, rows: Mapping[str, Any] | Plan, mesh: DeviceMesh | None = None) -> Plan:
        """This plan, but for what other rows say: a part that one of them names for a module or parameter is theirs.

        Raises:
            UsageError, PlacementError: see ``Row.of``.
        """
        new = rows if isinstance(rows, Plan) else Plan.of(rows, mesh)
        said = {row.pattern: set(row.said()) for row in new.rows}
        kept = tuple(row for row in self.rows if not set(row.said()) <= said.get(row.pattern, set()))
        return Plan(f"{self.source}, changed by hand", kept + new.rows)

    def diff(self, other: Plan) -> PlanDiff:
        """What leads from this plan to another, row by row."""
        before, after = self._by_pattern(), other._by_pattern()
        return PlanDiff(
            tuple(row for pattern, row in after.items() if pattern not in before),
            tuple(row for pattern, row in before.items() if pattern not in after),
            tuple((row, after[pattern]) for pattern, row in before.items() if pattern in after and after[pattern] != row),
        )

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` reads it."""
        rows = [{"pattern": row.pattern, **{part: _written(v) for part, v in row.said().items()}} for row in self.rows]
        return json.dumps({"source": self.source, "rows": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan from the text that ``to_json`` gave.

        Raises:
            UsageError: other text, or a style, axis or placement that there is not.
        """
        try:
            read = json.loads(text)
            rows = [(row["pattern"], {part: _read(v) for part, v in row.items() if part != "pattern"}) for row in read["rows"]]
            return Plan(read["source"], tuple(Row.of(pattern, said) for pattern, said in rows))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            rule = 'it is JSON with a "source" and "rows", each of which has a "pattern"'
            raise UsageError(
                four_parts(f"text that is no plan ({error!r})", rule, "Plan.from_json(text)", "give what Plan.to_json wrote")
            ) from error

    def __str__(self) -> str:
        return "\n".join([self.source, *table([("name", *PARTS), *(_cells(row) for row in self.rows)])])

    def _last(self, name: str, part: str) -> Any:
        rows = (row for row in reversed(self.rows) if part in row.said() and fnmatchcase(name, row.pattern))
        return next((row.said()[part] for row in rows), None)

    def _by_pattern(self) -> dict[str, Row]:
        found: dict[str, Row] = {}
        for row in self.rows:
            found[row.pattern] = replace(found.get(row.pattern, row), **row.said())
        return found


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Rows that one plan has and another lacks, and those they have both but differently. False where there are none."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]
    changed: tuple[tuple[Row, Row], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        signed = [("-", row) for row in self.removed] + [("+", row) for row in self.added]
        signed += [line for before, after in self.changed for line in (("-", before), ("+", after))]
        return "\n".join(table([(sign, *_cells(row)) for sign, row in signed], indent="")) or "no difference"


def _checked(choice: Any, mesh: DeviceMesh | None, where: str) -> Choice:
    """One part of a row in its one form."""
    if isinstance(choice, str):
        style_named(choice, where)
        return choice
    if isinstance(choice, Sequence) and mesh is not None:
        choice = by_axis_name(mesh, choice, where)
    if not isinstance(choice, Mapping):
        raise _refused(choice, "a row says a style's name, placements by axis, or a list of placements", where)
    for name, placement in choice.items():
        check_axis_name(name, where)
        if not isinstance(placement, Shard | Replicate | Partial):
            raise UsageError(
                four_parts(
                    f"placement {placement!r}",
                    "a placement is Shard, Replicate or Partial",
                    where,
                    "use dtorch.Shard(dim) or dtorch.Replicate()",
                )
            )
    return dict(choice)


def _refused(given: Any, rule: str, where: str) -> UsageError:
    remedy = "write e.g. 'colwise', {'tp': Shard(0)}, [Replicate(), Shard(0)] or {'outputs': {'tp': Shard(1)}}"
    return UsageError(four_parts(f"{given!r}", rule, where, remedy))


def _written(choice: Choice) -> Any:
    return choice if isinstance(choice, str) else {axis: repr(placement) for axis, placement in choice.items()}


def _read(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {axis: placement_named(text) for axis, text in choice.items()}


def _cells(row: Row) -> tuple[str, ...]:
    said = (getattr(row, part) for part in PARTS)
    return (row.pattern, *(c if isinstance(c, str) else ", ".join(f"{a} {p!r}" for a, p in (c or {}).items()) for c in said))
