"""What a sweep is asked to do; results of equal settings can be compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a sweep.

    Attributes:
        combinations: at most so many combinations of placements for each sample, mesh and variant.
        samples: at most so many samples of each dtype; None for all.
        seed: of samples, drawn combinations and random operators.
        main_only: only the main dtype of each operator.
        limit_s: time for one operator.
    """

    combinations: int = 16
    samples: int | None = None
    seed: int = 0
    main_only: bool = False
    limit_s: float = 600.0

    def header(self) -> dict[str, Any]:
        """What must be equal for two results to be comparable."""
        return {**{k: v for k, v in asdict(self).items() if k != "limit_s"}, "torch": torch.__version__.split("+")[0]}
