"""``Plan``: what the planner hands to the client: a definition for workers, and what it yields and costs."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.mesh import DeviceMesh
from ..core.program import DefinePlan
from ..core.spec import Spec


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective of a plan.

    Attributes:
        kind: ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, ``ring_shift``, ``exchange`` or ``transfer``.
        axis: mesh axis name; several joined by ``+`` for an exchange.
        nbytes: bytes that all devices together receive.
        before, after: placements, as text.
        operator: the operator that needs it.
    """

    kind: str
    axis: str
    nbytes: int
    before: str
    after: str
    operator: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A straight-line program for one operator call.

    Attributes:
        define: what workers are taught, except the number, which the client allots.
        outs: spec of each tensor output; empty where only a run can tell the shapes.
        tree: shape of the result: nested containers with ``...`` in place of each tensor.
        comms: its collectives.
        how: ``rule``, ``program``, ``replicated`` or ``redistribute``.
        mesh: the mesh it runs on.
        settles: partial inputs that it reduces first, by number, with the spec they are reduced to.
        aliases: whether the outputs alias the first input on every worker (for views).
    """

    define: DefinePlan
    outs: tuple[Spec, ...]
    tree: object
    comms: tuple[Comm, ...]
    how: str
    mesh: DeviceMesh
    aliases: bool
    settles: tuple[tuple[int, Spec], ...] = ()
