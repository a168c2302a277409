"""How a tensor shows itself: values, global shape, dtype, mesh and placements; and how it is split, drawn."""

from __future__ import annotations

import html as escape
import math
import re
from typing import Any

import torch

from ..core.mesh import coordinates
from ..core.spec import Spec

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_WIDTH = 320
_REPEATED = re.compile(r"(,\s+(dtype=[\w.]+|size=\([\d, ]*\)|device='[^']*'))+$")


def text(tensor: Any) -> str:
    """The ``repr`` of a tensor; waits for its values."""
    spec: Spec = tensor._spec
    body = _REPEATED.sub("", repr(tensor.to_torch()).removeprefix("tensor(")[:-1]).replace("\n       ", "\n              ")
    grad = ""
    if tensor.grad_fn is not None:
        grad = f", grad_fn=<{tensor.grad_fn.name()}>"
    elif tensor.requires_grad:
        grad = ", requires_grad=True"
    head = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
    where = f"mesh={spec.mesh!r}, placements={list(spec.placements)}"
    return f"{head}dtorch.Tensor({body},\n              shape={tuple(spec.shape)}, dtype={spec.dtype}, {where}{grad})"


def split_lines(spec: Spec) -> list[str]:
    """How a tensor is split, in words: one line per distinct piece with its devices, offset and size."""
    holders: dict[int, list[int]] = {}
    for coord in coordinates(spec.mesh.shape):
        holders.setdefault(spec.piece_of(coord), []).append(spec.mesh.device_at(coord))
    lines = []
    for piece, devices in holders.items():
        offset, size = spec.boxes[piece]
        ranges = " x ".join(f"[{o}:{o + n}]" for o, n in zip(offset, size, strict=True)) or "scalar"
        lines.append(f"{_ids(devices)}: {ranges}")
    return lines


def _ids(devices: list[int]) -> str:
    return (
        "device " + str(devices[0])
        if len(devices) == 1
        else "devices " + ",".join(map(str, devices[:8])) + (",..." if len(devices) > 8 else "")
    )


def html(tensor: Any) -> str:
    """An SVG of the split over the first two dims, for notebooks; reads no values."""
    spec: Spec = tensor._spec
    rows, cols = (list(spec.shape) + [1, 1])[:2] if spec.shape else (1, 1)
    height = max(24, min(_WIDTH, int(_WIDTH * rows / max(cols, 1))))
    cells = []
    for number, line in enumerate(split_lines(spec)):
        offset, size = spec.boxes[number]
        (y, x), (h, w) = (list(offset) + [0, 0])[:2], (list(size) + [1, 1])[:2]
        box = (x / max(cols, 1) * _WIDTH, y / max(rows, 1) * height, w / max(cols, 1) * _WIDTH, h / max(rows, 1) * height)
        cells.append(
            f'<rect x="{box[0]:.1f}" y="{box[1]:.1f}" width="{box[2]:.1f}" height="{box[3]:.1f}" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}" stroke="white"><title>{escape.escape(line)}</title></rect>'
        )
    where = f"{spec.mesh!r}, placements {list(spec.placements)}"
    head = escape.escape(f"shape {tuple(spec.shape)}, {spec.dtype}, {where}, {math.prod(spec.shape):,} elements")
    return f'<div><code>{head}</code><br><svg width="{_WIDTH}" height="{height}">{"".join(cells)}</svg></div>'
