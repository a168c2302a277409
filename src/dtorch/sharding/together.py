"""Several values redistributed in one plan, their collectives of one kind over one axis put together as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ..core.program import Collective, Step, Together
from ..core.spec import Spec
from .builder import Builder, Value
from .plan import Comm
from .redistribute import redistribute

Chain = list[tuple[Step, Comm | None]]
"""The steps that redistribute one value, each with what it moves; later ones need earlier ones."""

Kind = tuple[object, ...]
"""What steps have in common that may become one."""


def redistribute_together(builder: Builder, values: Sequence[Value], targets: Sequence[Spec]) -> list[Value]:
    """Append the steps that bring each value to its target; the values do not depend on each other."""
    outs, chains = [], []
    for value, target in zip(values, targets, strict=True):
        out, chain = _apart(builder, value, target)
        outs.append(out)
        chains.append(chain)
    _join(builder, chains)
    return outs


def refill_together(builder: Builder, values: Sequence[Value], wholes: Sequence[Value]) -> None:
    """Gather values anew into the memory of what earlier gathers, of one axis each, made of them."""
    chains: list[Chain] = []
    for value, whole in zip(values, wholes, strict=True):
        _, ((step, comm),) = _apart(builder, value, whole.spec)
        assert isinstance(step, Collective) and step.kind == "all_gather", "a refill is one gather"
        chains.append([(msgspec.structs.replace(step, output=whole.slot, refill=True), comm)])
    _join(builder, chains)


def _apart(builder: Builder, value: Value, target: Spec) -> tuple[Value, Chain]:
    """Plan one redistribution, and take its steps out of the plan again."""
    step, comm = len(builder.steps), len(builder.comms)
    out = redistribute(builder, value, target)
    comms = iter(builder.comms[comm:])
    chain = [(s, next(comms) if i in builder.moving else None) for i, s in enumerate(builder.steps[step:], step)]
    builder.moving -= set(range(step, len(builder.steps)))
    del builder.steps[step:], builder.comms[comm:]
    return out, chain


def _join(builder: Builder, chains: list[Chain]) -> None:
    """Append the steps of all chains, as few as may be."""
    chains = [chain for chain in chains if chain]
    while chains:
        kind = _next_kind(chains)
        taken = [chain.pop(0) for chain in chains if _kind(chain[0][0]) == kind]
        chains = [chain for chain in chains if chain]
        parts = [step for step, _ in taken]
        comms = [comm for _, comm in taken if comm is not None]
        builder.steps.append(parts[0] if len(parts) == 1 else Together(parts))  # type: ignore[arg-type]
        if comms:
            builder.moving.add(len(builder.steps) - 1)
            builder.comms.append(comms[0] if len(comms) == 1 else _sum(comms))


def _next_kind(chains: list[Chain]) -> Kind:
    """The kind to do next: that of which the fewest come up later, so that most are done at one stroke."""
    later = Counter(_kind(step) for chain in chains for step, _ in chain[1:])
    return min((_kind(chain[0][0]) for chain in chains), key=lambda kind: later[kind])


def _kind(step: Step) -> Kind:
    return ("collective", step.kind, step.axis, step.mesh) if isinstance(step, Collective) else ("alone", id(step))


def _sum(comms: Sequence[Comm]) -> Comm:
    """Several collectives as one."""
    first = comms[0]
    before, after = (_several([getattr(c, side) for c in comms]) for side in ("before", "after"))
    return Comm(first.kind, first.axis, sum(c.nbytes for c in comms), before, after, first.operator)


def _several(texts: Sequence[str]) -> str:
    """Placements of several tensors, each once, with how many have them."""
    return ", ".join(f"{count} x {text}" for text, count in Counter(texts).items())
