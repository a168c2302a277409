"""Seeing communication: ``explain()`` lists it, ``communication()`` says what implicit redistribution may do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..core.errors import CommunicationForbidden, UsageError, four_parts
from ..sharding.plan import Comm, Plan
from .sites import Site, describe_site, line_of

_MODES = ("allow", "warn", "forbid")


@dataclass(frozen=True, slots=True)
class Event:
    """One collective as it was issued: what (``comm``), and the user's ``site`` (``file:line in function``)."""

    comm: Comm
    site: str

    def __str__(self) -> str:
        c = self.comm
        return f"{c.kind:<14} {c.axis:<8} {c.nbytes:>12,} B  {c.before} -> {c.after}  {c.operator}  at {self.site}"


@dataclass(eq=False)
class Report:
    """What ``explain()`` collects.

    Attributes:
        events: every collective, in order.
        replicated: names of operators that ran replicated for want of a rule, with how often.
        ways: how often an operator was more than itself run on pieces, by (operator, way). A way is ``program`` (by other
            operators, as its rule says), ``decomposition`` (by PyTorch's own) or ``replicated``. A program that moves nothing
            is not told from a rule.
    """

    events: list[Event] = field(default_factory=list)
    replicated: dict[str, int] = field(default_factory=dict)
    ways: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes received by all devices together."""
        return sum(e.comm.nbytes for e in self.events)

    def by_axis(self) -> dict[str, tuple[int, int]]:
        """(collectives, bytes) for each mesh axis."""
        out: dict[str, tuple[int, int]] = {}
        for e in self.events:
            count, nbytes = out.get(e.comm.axis, (0, 0))
            out[e.comm.axis] = (count + 1, nbytes + e.comm.nbytes)
        return out

    def __str__(self) -> str:
        lines = [str(e) for e in self.events] or ["no communication"]
        lines += [f"{name} ran replicated {count} times: it has no sharding rule" for name, count in self.replicated.items()]
        return "\n".join(lines)


_reports: list[Report] = []
_mode = "allow"
_told: set[str] = set()


@contextmanager
def explain() -> Iterator[Report]:
    """Collect every collective issued inside: kind, bytes, mesh axis, placements before and after, and the user's line."""
    report = Report()
    _reports.append(report)
    try:
        yield report
    finally:
        _reports.remove(report)


@contextmanager
def communication(mode: str) -> Iterator[None]:
    """What implicit redistribution may do inside: ``"allow"`` it, ``"warn"`` at each, or ``"forbid"`` it.

    Redistribution that you ask for by ``redistribute`` or by reading a value is never implicit.

    Raises:
        UsageError: unknown mode.
        CommunicationForbidden: from the operator that would communicate, in mode ``"forbid"``.
    """
    global _mode
    if mode not in _MODES:
        raise UsageError(
            four_parts(f"communication({mode!r})", f"a mode is one of {_MODES}", "communication(mode)", "use one of these")
        )
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def observe(plan: Plan, site: Site, explicit: bool = False) -> None:
    """Report a plan that is about to be called; raises or warns as the mode in force says."""
    name = plan.define.operator
    # What only a run can shape runs whole.
    way = "replicated" if plan.tree is None and plan.comms and plan.define.outputs else plan.how
    if way in ("program", "replicated") and not explicit:
        note(name, way)
    if not plan.comms and plan.how != "replicated":
        return
    if not explicit:
        _apply_mode(plan, name, site)
        if plan.how == "replicated" and name not in _told:
            _told.add(name)
            _warn(f"{name} has no sharding rule: it ran on replicated inputs (said once per operator)", site)
    for report in _reports:
        report.events += [Event(c, describe_site(site)) for c in plan.comms]
        if plan.how == "replicated" and not explicit:
            report.replicated[name] = report.replicated.get(name, 0) + 1


def note(name: str, way: str) -> None:
    """Report that an operator goes another way than by a row of its rule."""
    for report in _reports:
        report.ways[name, way] = report.ways.get((name, way), 0) + 1


def _apply_mode(plan: Plan, name: str, site: Site) -> None:
    if _mode == "allow" or not plan.comms:
        return
    moved = "; ".join(f"{c.kind} over {c.axis}, {c.nbytes:,} bytes, {c.before} -> {c.after}" for c in plan.comms)
    if _mode == "warn":
        _warn(f"{name} communicates: {moved}", site)
    else:
        raise CommunicationForbidden(
            four_parts(
                f"{name} needs {moved}",
                'communication("forbid") allows no implicit redistribution',
                describe_site(site),
                "redistribute the inputs yourself, or allow communication here",
            )
        )


def _warn(text: str, site: Site) -> None:
    """Warn at the user's line, which no depth of the stack finds: it differs by operator."""
    if site is None:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, RuntimeWarning, site[0].co_filename, line_of(site))
