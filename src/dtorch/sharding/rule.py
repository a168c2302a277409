"""What a sharding rule is, and the table of all rules.

A rule is a function of an ``OpCall``. It returns a ``Labels`` (see ``labels.py``), an object with the same two methods
for operators that labels cannot describe, or None to decline. A *program* is the other half of an entry: how to compute
the operator when it is sharded along a dim that the rule must keep whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.spec import Spec
from .builder import Builder, Value, Varying
from .call import OpCall
from .labels import Candidate


class Sharding(Protocol):
    """The choices an operator call has on one mesh axis. ``Labels`` is the usual one."""

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """Legal placements of inputs and outputs on an axis; the last one replicates all."""


class Localizing(Protocol):
    """A sharding whose non-tensor arguments depend on the coordinate."""

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """Arguments, by schema name, that replace the global ones."""


class Stepping(Protocol):
    """A sharding whose rows take several local steps where the operator alone would not do."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> Sequence[Value] | None:
        """Append the steps on inputs placed as chosen and return the outputs, which have the specs ``outs``.

        None where the operator itself is the one step. Of an in-place operator the steps write the destination.
        """


RuleFn = Callable[[OpCall], "Sharding | None"]
ProgramFn = Callable[[Builder, OpCall, Any, Any], "Any | None"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table.

    Attributes:
        shard: the rule proper.
        program: ``program(builder, call, args, kwargs)`` with a ``Value`` for each tensor; returns the output values,
            or None to decline. Tried when ``shard`` would have to communicate inputs.
        changing: whether numbers among the arguments (not lists) may change without a new plan.
        writes: the program itself writes the destinations of an in-place operator; the others are given the functional form.
        random: the operator draws random numbers, and rule and program draw the same ones under every placement.
        whole: a composite operator that is planned as one and not by its parts.
    """

    shard: RuleFn
    program: ProgramFn | None = None
    changing: bool = False
    writes: bool = False
    random: bool = False
    whole: bool = False


Table = Mapping[str, Rule]
