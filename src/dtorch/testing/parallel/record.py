"""What came of one cell."""

from __future__ import annotations

from dataclasses import dataclass

RIGHT, WRONG, REFUSED, FAILED = "right", "wrong", "refused", "failed"

KINDS = {
    RIGHT: "as plain PyTorch",
    WRONG: "another number, shape or token than plain PyTorch",
    REFUSED: "cannot work, and was refused before anything was allocated",
    FAILED: "an error, a refusal of what can work, none of what cannot, a process that ended or took too long",
}
GOOD = (RIGHT, REFUSED)


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of a cell.

    Attributes:
        cell: its text.
        kind: one of ``KINDS``.
        text: what was seen, where it is neither right nor refused rightly.
        forward: largest error of the outputs, by their largest value.
        backward: the same of gradients, the largest of all parameters.
    """

    cell: str
    kind: str
    text: str = ""
    forward: float = 0.0
    backward: float = 0.0
    seconds: float = 0.0

    @property
    def model(self) -> str:
        """Name of its model."""
        return self.cell.split(":")[0]
