"""What a sweep finds out about one operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

RIGHT = "right"
LAYOUT = "layout"
WRONG = ("wrong value", "wrong shape or dtype", "gradient wrong")
REFUSED = ("refused", "gradient refused")
BROKEN = ("timeout", "crash")
WAYS = ("rule", "program", "decomposition", "replicated")
"""How an operator was planned, the best first."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that is not right: its kind, its text (see ``Case``), and what was seen."""

    kind: str
    case: str
    text: str


@dataclass(slots=True)
class Record:
    """The outcome of one operator.

    Attributes:
        status: ``done``; ``cut short`` where time ran out between two cases; ``timeout`` or ``crash`` where its process ended.
        counts: number of cases, by ``variant:dtype``, then by kind.
        skipped: samples and variants that were not run, by reason; plain PyTorch refuses them, or they can't be placed.
        ways: number of sharded cases, by the worst way in which any operator in it was planned.
        fallbacks: operators that ran replicated, each with the number of cases.
        failures: each case that failed, and one example of a layout difference for each variant and dtype.
    """

    op: str
    status: str = "done"
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, group: str, failure: Failure | None) -> None:
        """Count a case of a ``variant:dtype``; ``failure`` is None for one that is right."""
        kinds = self.counts.setdefault(group, Counter())
        kinds[failure.kind if failure is not None else RIGHT] += 1
        if failure is not None and (failure.kind != LAYOUT or kinds[LAYOUT] == 1):
            self.failures.append(failure)

    def total(self, *kinds: str) -> int:
        """Number of cases of these kinds; of all kinds if none is named."""
        return sum(n for row in self.counts.values() for kind, n in row.items() if not kinds or kind in kinds)

    @property
    def planned(self) -> str:
        """The worst way in which it was planned; empty where no case was sharded."""
        return next((way for way in reversed(WAYS) if self.ways[way]), "")

    @property
    def verdict(self) -> str:
        """``wrong``, ``refused``, ``timeout``, ``crash``, ``right``, or ``not run``: the worst of its cases."""
        if self.total(*WRONG):
            return "wrong"
        if self.status in BROKEN:
            return self.status
        if self.total(*REFUSED):
            return "refused"
        return RIGHT if self.counts else "not run"

    def to_json(self) -> dict[str, Any]:
        """As plain dicts and lists."""
        return {
            "op": self.op,
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "counts": self.counts,
            "skipped": self.skipped,
            "ways": self.ways,
            "fallbacks": self.fallbacks,
            "failures": [[f.kind, f.case, f.text] for f in self.failures],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        """The inverse of ``to_json``."""
        return Record(
            op=data["op"],
            status=data["status"],
            counts={group: Counter(kinds) for group, kinds in data["counts"].items()},
            skipped=Counter(data["skipped"]),
            ways=Counter(data["ways"]),
            fallbacks=Counter(data["fallbacks"]),
            failures=[Failure(*row) for row in data["failures"]],
            seconds=data["seconds"],
        )
