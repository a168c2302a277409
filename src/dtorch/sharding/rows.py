"""Rows sent along a mesh axis, each to the device that is named for it: all-to-all with counts known by value only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..core.mesh import coordinates
from ..core.placements import Placement, Shard, starts
from ..core.spec import Spec
from .builder import Builder
from .exchange import Parts
from .plan import Plan
from .planner import plan_into

Counts = tuple[tuple[int, ...], ...]
"""For each piece, how many of its rows go to each device along the axis; its rows stand in that order."""


def answered(spec: Spec, axis: int, counts: Counts) -> Counts:
    """The counts of what is received: with those the same rows go back to where they came from."""
    return tuple(tuple(counts[s][at] for s in line) for line, at in lines(spec, axis))


def plan_rows(spec: Spec, axis: int, counts: Counts) -> Plan:
    """The plan that sends the rows of a tensor of which no other dim is split; a piece receives them by who sent them.

    Args:
        axis: the mesh axis along which they travel.
    """
    builder = Builder("rows", [spec], plan_into)
    target = _received(spec, axis, counts)
    parts, moved = _parts(spec, axis, counts)
    shapes = [list(size) for _, size in target.boxes]
    width = spec.nbytes // max(spec.shape[0], 1)
    nbytes = moved * width * (spec.mesh.size() // len(counts))
    name = spec.mesh.axis_names()[axis]
    out = builder.exchange(builder.inputs[0], target, parts, shapes, "all_to_all", name, nbytes)
    return Plan(builder.define([out]), (target,), ..., tuple(builder.comms), "redistribute", spec.mesh, False)


def lines(spec: Spec, axis: int) -> list[tuple[list[int], int]]:
    """For each piece, the pieces on its line along an axis, and which of those it is itself."""
    at = spec.axes.index(axis)
    numbers = {coord: n for n, coord in enumerate(coordinates(spec.piece_grid))}
    steps = range(spec.piece_grid[at])
    return [([numbers[(*coord[:at], i, *coord[at + 1 :])] for i in steps], coord[at]) for coord in numbers]


def _received(spec: Spec, axis: int, counts: Counts) -> Spec:
    """The spec of what arrives."""
    leaves = [sum(row) for row in answered(spec, axis, counts)]
    final: list[Placement] = list(spec.placements)
    for a in reversed(spec.axes):
        final[a] = Shard(0, tuple(leaves))
        k = spec.mesh.shape[a]
        leaves = [sum(leaves[i : i + k]) for i in range(0, len(leaves), k)]
    return Spec.make(spec.mesh, final, spec.shape, spec.dtype)


def _parts(spec: Spec, axis: int, counts: Counts) -> tuple[Parts, int]:
    """What each piece is made of, and how many rows come from another one."""
    begins: list[Sequence[int]] = [starts(row) for row in counts]
    rest, parts, moved = list(spec.shape[1:]), [], 0
    for line, at in lines(spec, axis):
        got = [counts[s][at] for s in line]
        ends = itertools.accumulate(got)
        zeros = [0] * len(rest)
        parts.append(
            [(s, [begins[s][at], *zeros], [end - n, *zeros], [n, *rest]) for s, n, end in zip(line, got, ends, strict=True) if n]
        )
        moved += sum(got) - got[at]
    return parts, moved
