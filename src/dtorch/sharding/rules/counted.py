"""Labels whose call holds numbers that count along a sharded dim, such as groups or channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.spec import Spec
from ..builder import Varying
from ..call import OpCall
from ..labels import Labels


@dataclass(frozen=True)
class Counted(Labels):
    """Labels with local numbers.

    Attributes:
        counts: by schema argument name, the argument for a piece, given the local shapes of the tensor inputs.
    """

    counts: Mapping[str, Callable[[Sequence[tuple[int, ...]]], Any]] = field(default_factory=dict)

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """The counts, from each coordinate's local shapes."""

        def local(count: Callable[[Sequence[tuple[int, ...]]], Any]) -> Varying:
            return Varying(lambda coord: count([spec.local_box(coord)[1] for spec in ins]))

        return {name: local(count) for name, count in self.counts.items()}
