"""Pictures in text: a mesh, and how a weight lies on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch import DeviceMesh, Replicate, Shard

WIDTH, HEIGHT = 18, 6
"""Characters inside the frame of a weight, at most."""

SHADES = "█░▓▒"
MANY = 8
"""Devices drawn one by one; more are summed up."""


def draw_mesh(mesh: DeviceMesh, contents: Sequence[str]) -> str:
    """A mesh as a table: a row for each pipeline stage, with its devices and what it holds."""
    title = " x ".join(f"{n}={s}" for n, s in zip(mesh.axis_names(), mesh.shape, strict=True))
    lines = [f"mesh {title}: {mesh.size()} devices ({mesh.device_type}, simulated on this machine)"]
    rows = [_devices(stage.ids) for stage in mesh.unbind("pp")]
    width = max(len(row) for row in rows)
    lines += [f"  stage {n}   {row.ljust(width)}   {what}" for n, (row, what) in enumerate(zip(rows, contents, strict=True))]
    return "\n".join(lines)


def _devices(ids: Sequence[int]) -> str:
    """Ids in brackets, the middle of many left out."""
    shown = "".join(f"[{i}]" for i in ids[:MANY])
    return shown if len(ids) <= MANY else f"{shown}..[{ids[-1]}]"


def draw_weight(name: str, weight: Any, note: str = "") -> list[str]:
    """A weight, (rows, columns), as a frame whose shading says which device of ``tp`` holds what.

    Args:
        name: what to call it.
        weight: a global tensor.
        note: a further line of text.
    """
    cuts = _cuts(weight)
    dim, sizes = (0, [weight.shape[0]]) if cuts is None else cuts
    rows, columns = (HEIGHT if dim == 1 else max(HEIGHT, min(len(sizes), WIDTH))), WIDTH
    along = rows if dim == 0 else columns
    owner = _owners(sizes, along)
    cells = [[owner[r if dim == 0 else c] for c in range(columns)] for r in range(rows)]
    frame = [
        "┌" + "─" * columns + "┐",
        *("│" + "".join(SHADES[o % len(SHADES)] for o in row) + "│" for row in cells),
        "└" + "─" * columns + "┘",
    ]
    shape = " x ".join(map(str, weight.shape))
    if cuts is None:
        return [name, shape, *frame, "whole on every device", note]
    parts = [f"{SHADES[i % len(SHADES)]} {n}" for i, n in enumerate(sizes)]
    shown = "  ".join(parts[:4]) + (" .." if len(parts) > 4 else "")
    return [name, shape, *frame, f"{'rows' if dim == 0 else 'columns'} {shown}", note]


def side_by_side(blocks: Sequence[Sequence[str]], gap: int = 4) -> str:
    """Blocks of lines next to each other."""
    widths = [max(len(line) for line in block) for block in blocks]
    lines = []
    for i in range(max(len(block) for block in blocks)):
        row = [(block[i] if i < len(block) else "").ljust(w) for block, w in zip(blocks, widths, strict=True)]
        lines.append(("  " + (" " * gap).join(row)).rstrip())
    return "\n".join(lines).rstrip()


def _cuts(weight: Any) -> tuple[int, list[int]] | None:
    """The dim that ``tp`` splits, and the length of each piece; None where the weight is whole."""
    mesh = weight.device_mesh
    if "tp" not in mesh.axis_names() or isinstance(weight.placements[mesh.axis("tp")], Replicate) or mesh.size("tp") == 1:
        return None
    axis = mesh.axis("tp")
    shard = weight.placements[axis]
    assert isinstance(shard, Shard)
    coords = [[i if a == axis else 0 for a in range(mesh.ndim)] for i in range(mesh.size("tp"))]
    return shard.dim, [weight.local_shape(c)[shard.dim] for c in coords]


def _owners(sizes: Sequence[int], cells: int) -> list[int]:
    """Which piece each of ``cells`` equal parts of the dim is drawn as: the one that holds its middle."""
    total, out = sum(sizes), []
    for cell in range(cells):
        middle, piece, end = (cell + 0.5) * total / cells, 0, sizes[0]
        while middle >= end:
            piece += 1
            end += sizes[piece]
        out.append(piece)
    return out
