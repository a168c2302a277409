"""Which blocks of queries and keys a device attends to, and how a sequence is cut so that all devices do the same work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ...core.placements import balanced
from .laid import Runs, count, joined


class Block(NamedTuple):
    """Queries ``[row, row + rows)`` and keys ``[key, key + keys)`` of a device's own; causal blocks are square."""

    row: int
    rows: int
    key: int
    keys: int
    causal: bool

    @property
    def work(self) -> int:
        """Pairs of a query and a key that it may see."""
        return self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.keys


def zigzag(length: int, devices: int) -> list[Runs]:
    """Of 2 n blocks of a sequence, device i takes block i and block 2 n - 1 - i: one early, one late.

    Under a causal mask late queries see many keys and early ones few, so every pair of blocks is equally much work.
    """
    parts = balanced(length, 2 * devices)
    starts = [0, *accumulate(parts)]
    pieces = [(start, n) for start, n in zip(starts, parts, strict=False)]
    return [joined([pieces[i], pieces[2 * devices - 1 - i]]) for i in range(devices)]


def blocks(rows: Runs, keys: Runs, causal: bool) -> list[Block]:
    """The blocks to compute between the queries and the keys of these positions; what a causal mask hides is left out."""
    m, n = count(rows), count(keys)
    if not m or not n:
        return []
    if not causal:
        return [Block(0, m, 0, n, False)]
    if rows == keys and rows == sorted(rows):
        return [Block(0, m, 0, n, True)]
    found, row = [], 0
    for start, length in rows:
        key = 0
        for first, width in keys:
            found += _seen(row, (start, length), key, (first, width))
            key += width
        row += length
    whole = _merged(_merged(sorted(b for b in found if not b.causal), beside=True), beside=False)
    return [*whole, *(b for b in found if b.causal)]


def _seen(row: int, queries: tuple[int, int], key: int, keys: tuple[int, int]) -> list[Block]:
    """Blocks between one run of queries and one of keys: those before the first query, the diagonal, and what is below it."""
    (a, m), (c, n) = queries, keys
    before = max(0, min(a - c, n))
    diagonal = max(a, c)
    side = max(0, min(a + m, c + n) - diagonal)
    below = diagonal + side
    found = [
        Block(row, m, key, before, False),
        Block(row + diagonal - a, side, key + diagonal - c, side, True),
        Block(row + below - a, a + m - below, key + diagonal - c, side, False),
    ]
    return [b for b in found if b.rows > 0 and b.keys > 0]


def _merged(found: Sequence[Block], beside: bool) -> list[Block]:
    """Blocks put together where they share their queries and their keys follow each other, or the other way round."""
    out: list[Block] = []
    for b in sorted(found, key=lambda b: (b.row, b.rows, b.key) if beside else (b.key, b.keys, b.row)):
        last = out[-1] if out else None
        if last and beside and (last.row, last.rows, last.key + last.keys) == (b.row, b.rows, b.key):
            out[-1] = last._replace(keys=last.keys + b.keys)
        elif last and not beside and (last.key, last.keys, last.row + last.rows) == (b.key, b.keys, b.row):
            out[-1] = last._replace(rows=last.rows + b.rows)
        else:
            out.append(b)
    return out
