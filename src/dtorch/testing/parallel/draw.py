"""Which cells are run: every combination of axes, in random orders, with random options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

from ...parallel.axes import MEANINGS
from .cell import OPTIONS, Cell, named

SIZES = (1, 2, 3)
MOST_DEVICES = 24
PATIENCE = 50
"""Draws of a cell that is there already, for each that is wanted, after which there are taken to be no more."""


def combinations() -> list[dict[str, int]]:
    """All sizes of the axes that ``parallelize`` understands."""
    sizes = itertools.product(SIZES, repeat=len(MEANINGS))
    return [dict(zip(MEANINGS, each, strict=True)) for each in sizes if math.prod(each) <= MOST_DEVICES]


def drawn(model: str, count: int, seed: int) -> list[Cell]:
    """The first cells of a seed for a model, all different; all combinations come before any comes a second time."""
    found: dict[Cell, None] = {}
    for cell in itertools.islice(_endless(model, Random(f"{seed} {model}")), PATIENCE * count):
        found[cell] = None
        if len(found) == count:
            break
    return list(found)


def _endless(model: str, random: Random) -> Iterator[Cell]:
    while True:
        every = combinations()
        random.shuffle(every)
        for sizes in every:
            yield _cell(model, sizes, random)


def _cell(model: str, sizes: dict[str, int], random: Random) -> Cell:
    """A cell of these sizes; an axis of one device stands in the mesh or not."""
    names = [name for name, size in sizes.items() if size > 1 or random.random() < 0.5] or [random.choice(list(sizes))]
    random.shuffle(names)
    axes = {name: sizes[name] for name in names}
    options = {n: random.choice(o.drawn) for n, o in OPTIONS.items() if not o.axis or sizes[o.axis] > 1}
    return named(model, axes, options)
