"""``Figure``: one row of the table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure.

    Attributes:
        name: stable key, group first: ``"add.client"``.
        title: what is measured.
        measured: the figure, in ``unit``; smaller is better.
        limit: what it must not exceed, in ``unit``; infinite where no aim is set.
        unit: ``"x"`` for a ratio, else as printed: ``"ms"``, ``"plans"``, ``"B a step"``.
        spread: the middle half of the samples, in ``unit``; None where there is one sample.
        peer: the best figure known of another system.
        notes: what else was seen, one line each.
    """

    name: str
    title: str
    measured: float
    limit: float
    unit: str = "x"
    spread: tuple[float, float] | None = None
    peer: str = "-"
    notes: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the figure is where it must be."""
        return self.measured <= self.limit

    def text(self, value: float) -> str:
        """A value in the figure's unit."""
        number = f"{value:.0f}" if float(value).is_integer() and self.unit != "x" else f"{value:.2f}"
        return f"{number}x" if self.unit == "x" else f"{number} {self.unit}"

    def measured_text(self) -> str:
        """The figure with its spread."""
        if self.spread is None:
            return self.text(self.measured)
        low, high = self.spread
        return f"{self.text(self.measured)} ({low:.2f}-{high:.2f})"

    def limit_text(self) -> str:
        """What must be reached."""
        return f"<= {self.text(self.limit)}" if math.isfinite(self.limit) else "-"

    def as_json(self) -> dict[str, Any]:
        """All of it, for a JSON file."""
        row = asdict(self)
        row["limit"] = self.limit if math.isfinite(self.limit) else None
        return {**row, "reached": self.reached}
