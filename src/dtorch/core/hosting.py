"""Which worker hosts which logical device. All parts of a session decide by one table, so none has to be told by another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec


class Hosting(msgspec.Struct, frozen=True):
    """The workers of a session, numbered from 0, and the logical devices of each.

    Attributes:
        workers: how many there are.
        counts: by device type, how many ids each worker hosts, the first worker the first ids. Ids of a type that is not
            named are dealt out in turn, as many as are asked for.
    """

    workers: int
    counts: dict[str, list[int]] = {}

    def worker(self, device_type: str, device: int) -> int:
        """Number of the worker that hosts a logical device, which must be within ``limit``."""
        counts = self.counts.get(device_type)
        if counts is None:
            return device % self.workers
        return bisect_right(list(accumulate(counts)), device)

    def hosts(self, device_type: str, ids: Sequence[int]) -> list[int]:
        """The worker of each of some devices."""
        return [self.worker(device_type, device) for device in ids]

    def told(self, worker: int) -> str:
        """The devices of a worker, for people."""
        if not self.counts:
            return f"devices {worker}, {worker + self.workers}, ..."
        ends = {kind: (sum(n[:worker]), sum(n[: worker + 1])) for kind, n in self.counts.items()}
        return ", ".join(f"{kind}:{_range(first, end - 1)}" for kind, (first, end) in ends.items() if end > first) or "no device"

    def limit(self, device_type: str) -> int | None:
        """How many devices of a type there are; None for as many as are asked for."""
        counts = self.counts.get(device_type)
        return None if counts is None else sum(counts)


def _range(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else f"{first}"


ALONE = Hosting(1)
"""One worker that hosts every device."""
