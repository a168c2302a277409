"""``describe``: what ``parallelize`` did, in words and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.mesh import coordinates
from ..core.placements import REPLICATE
from ..core.spec import Spec
from .layout import Layout, layout_of
from .writing import size, table, times


def describe(module: nn.Module) -> Description:
    """How ``parallelize`` placed a module: the mesh, stages, weights with local shapes and bytes, and remarks.

    Raises:
        UsageError: the module was not parallelized.
    """
    layout = layout_of(module)
    if layout is None:
        raise UsageError(
            four_parts(
                f"a {type(module).__name__} that lies on no mesh",
                "describe() tells what parallelize() did",
                "dtorch.describe(module)",
                "call dtorch.parallelize(module, mesh) first, and give the same module",
            )
        )
    return Description(layout)


@dataclass(frozen=True)
class Weights:
    """Weights that lie alike and whose names differ in a number only.

    Attributes:
        name: the one name, or the pattern of all.
        count: how many there are.
        spec: of each.
    """

    name: str
    count: int
    spec: Spec

    @property
    def how(self) -> str:
        """Placements, by axis."""
        axes = zip(self.spec.mesh.axis_names(), self.spec.placements, strict=True)
        return ", ".join(f"{a} {p!r}" for a, p in axes if p != REPLICATE) or "replicated"

    @property
    def here(self) -> str:
        """Shapes of the pieces; one where all are alike, none where nothing is split."""
        shapes = [times(size) for _, size in self.spec.boxes]
        if len(set(shapes)) > 1:
            return " ".join(shapes[:SHOWN]) + (f" and {len(shapes) - SHOWN} more" if len(shapes) > SHOWN else "")
        return "" if shapes[0] == times(self.spec.shape) else shapes[0]

    @property
    def held(self) -> str:
        """Bytes of each of the weights on a device: least and most."""
        held = bytes_held(self.spec)
        return size(held[0]) if len(set(held)) == 1 else f"{size(min(held))} to {size(max(held))}"


@dataclass(frozen=True)
class Description:
    """What there is to tell of a layout: ``str()`` is text, ``to_html()`` a table, which a notebook draws by itself.

    Attributes:
        layout: the data that it tells of.
    """

    layout: Layout

    @cached_property
    def nbytes(self) -> dict[int, int]:
        """Bytes of parameters and buffers on each device, by logical id. A tied parameter counts once."""
        total = dict.fromkeys(self.layout.mesh.ids, 0)
        for name, spec in self.layout.specs.items():
            if name not in self.layout.tied:
                for device, nbytes in zip(spec.mesh.ids, bytes_held(spec), strict=True):
                    total[device] += nbytes
        return total

    @cached_property
    def weights(self) -> list[Weights]:
        """Parameters and buffers, in order; tied ones by their first name."""
        groups: dict[tuple, list[str]] = {}
        for name, spec in self.layout.specs.items():
            if name not in self.layout.tied:
                pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
                groups.setdefault((pattern, tuple(spec.shape), spec.placements, spec.dtype), []).append(name)
        return [
            Weights(key[0] if len(names) > 1 else names[0], len(names), self.layout.specs[names[0]])
            for key, names in groups.items()
        ]

    def __str__(self) -> str:
        lines = [self._title(), *self._stages(), *table([COLUMNS, *self._rows()])]
        lines += [f"bytes per device: {', '.join(f'{size(n)} on {ids}' for n, ids in self._alike())}"]
        lines += ["remarks", *(f"  {r}" for r in self.layout.remarks)] if self.layout.remarks else []
        return "\n".join(lines)

    __repr__ = __str__

    def to_html(self) -> str:
        """The same as HTML without style sheets: stages, a table of weights, and a bar for each device."""
        most = max(self.nbytes.values(), default=0) or 1
        bars = [
            f'<tr><td>{device}</td><td>{size(n)}</td><td><svg width="{WIDTH}" height="10"><rect width="{n / most * WIDTH:.0f}" '
            f'height="10" fill="{COLOUR}"/></svg></td></tr>'
            for device, n in self.nbytes.items()
        ]
        notes = [*self._stages(), *self.layout.remarks]
        return "".join(
            (
                f"<div><b>{escape(self._title())}</b>",
                *(f"<p>{escape(line)}</p>" for line in notes),
                "<table><tr>",
                *(f"<th>{head}</th>" for head in COLUMNS),
                "</tr>",
                *(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._rows()),
                "</table><table><tr><th>device</th><th>bytes</th><th></th></tr>",
                *bars,
                "</table></div>",
            )
        )

    _repr_html_ = to_html

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (w.name, f"{w.count} of" if w.count > 1 else "", times(w.spec.shape), w.how, w.held, w.here) for w in self.weights
        ]

    def _title(self) -> str:
        return f"{self.layout.title} on {self.layout.mesh!r}, by {self.layout.source}"

    def _stages(self) -> list[str]:
        lines = []
        for number, mesh in enumerate(self.layout.meshes if len(self.layout.meshes) > 1 else ()):
            layers = self.layout.stages.layers_of(number)
            others = ", ".join(self._outside(number))
            lines.append(
                f"stage {number} on ids {', '.join(map(str, mesh.ids))}: {len(layers)} layers, {layers[0]} to {layers[-1]}"
                + (f"; {others}" if others else "")
            )
        return lines

    def _outside(self, stage: int) -> Iterator[str]:
        """Modules of a stage that own weights and are in no layer."""
        owners = {name.rpartition(".")[0] for name in self.layout.specs}
        for name, number in self.layout.stages.of.items():
            if number == stage and name in owners and not any(_inside(name, layer) for layer in self.layout.stages.layers):
                yield name

    def _alike(self) -> list[tuple[int, str]]:
        """Bytes, and the ids of the devices that hold so many."""
        groups: dict[int, list[int]] = {}
        for device, n in self.nbytes.items():
            groups.setdefault(n, []).append(device)
        return [(n, _ranges(sorted(ids))) for n, ids in groups.items()]


def bytes_held(spec: Spec) -> list[int]:
    """Bytes of a tensor on each device of its mesh, row-major."""
    return [math.prod(spec.local_box(c)[1]) * spec.dtype.itemsize for c in coordinates(spec.mesh.shape)]


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers with runs drawn together: ``0-3, 6``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


COLUMNS = ("weights", "", "shape", "placements", "bytes per device", "local shapes")
SHOWN = 8
"""How many pieces' shapes are told."""

WIDTH, COLOUR = 240, "#4c78a8"
"""Of the longest bar in HTML, in pixels."""
