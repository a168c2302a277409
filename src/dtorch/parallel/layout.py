"""``Layout``: what ``parallelize`` decided, as data, and in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh, Family, coordinates
from ..core.placements import REPLICATE
from ..core.spec import Spec
from .stages import Stages

ATTRIBUTE = "_dtorch_layout"
"""Where a module keeps its layout."""


@dataclass(frozen=True)
class Layout:
    """How a module lies on a mesh.

    Attributes:
        title: the module's class.
        mesh: the mesh given.
        meshes: the mesh of each pipeline stage.
        stages: which module is on which stage.
        source: where the plan comes from.
        specs: of every parameter and buffer by qualified name; tied ones appear under each name.
        tied: further names of a parameter -> its first name.
        remarks: what a reader should know.
        family: what lets operators meet tensors of several stages while the module lives.
    """

    title: str
    mesh: DeviceMesh
    meshes: tuple[DeviceMesh, ...]
    stages: Stages
    source: str
    specs: Mapping[str, Spec]
    tied: Mapping[str, str]
    remarks: tuple[str, ...]
    family: Family

    def mesh_of(self, module_name: str) -> DeviceMesh:
        """The mesh of the stage that a module is on."""
        return self.meshes[self.stages.of[module_name]]

    def __deepcopy__(self, memo: dict) -> Layout:
        return self

    def __str__(self) -> str:
        lines = [f"{self.title} on {self.mesh!r}, by {self.source}"]
        lines += _stage_lines(self)
        lines += ["weights"] + _table(_weight_rows(self))
        lines += ["remarks", *(f"  {r}" for r in self.remarks)] if self.remarks else []
        return "\n".join(lines)


def describe(module: nn.Module) -> str:
    """How ``parallelize`` placed a module: the mesh, stages, every kind of weight with its local shapes, and remarks.

    Raises:
        UsageError: the module was not parallelized.
    """
    layout = getattr(module, ATTRIBUTE, None)
    if layout is None:
        raise UsageError(
            four_parts(
                f"a {type(module).__name__} that lies on no mesh",
                "describe() tells what parallelize() did",
                "dtorch.parallel.describe(module)",
                "call dtorch.parallelize(module, mesh) first, and give the same module",
            )
        )
    return str(layout)


def layout_of(module: nn.Module) -> Layout | None:
    """The layout that ``parallelize`` left on a module."""
    return getattr(module, ATTRIBUTE, None)


def local_shapes(spec: Spec) -> list[tuple[int, ...]]:
    """Local shape on each device of the spec's mesh, row-major, runs of equal ones given once."""
    shapes = [spec.local_box(c)[1] for c in coordinates(spec.mesh.shape)]
    return [shapes[0]] if len(set(shapes)) == 1 else shapes


def _stage_lines(layout: Layout) -> list[str]:
    lines = []
    for number, mesh in enumerate(layout.meshes if len(layout.meshes) > 1 else ()):
        layers = layout.stages.layers_of(number)
        others = [
            n
            for n, s in layout.stages.of.items()
            if s == number and _owns(layout, n) and not any(_inside(n, i) for i in layout.stages.layers)
        ]
        lines.append(
            f"stage {number} on ids {', '.join(map(str, mesh.ids))}: {len(layers)} layers, {layers[0]} to {layers[-1]}"
            + (f"; {', '.join(others)}" if others else "")
        )
    return lines


def _owns(layout: Layout, module_name: str) -> bool:
    return any(name.rpartition(".")[0] == module_name for name in layout.specs)


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def _weight_rows(layout: Layout) -> list[tuple[str, ...]]:
    """One row for each set of weights whose names differ in a number only and that lie alike."""
    groups: dict[tuple, list[str]] = {}
    for name, spec in layout.specs.items():
        if name not in layout.tied:
            pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
            groups.setdefault((pattern, tuple(spec.shape), spec.placements), []).append(name)
    rows: list[tuple[str, ...]] = []
    for (pattern, shape, placements), names in groups.items():
        spec = layout.specs[names[0]]
        axes = zip(spec.mesh.axis_names(), placements, strict=True)
        how = ", ".join(f"{a} {p!r}" for a, p in axes if p != REPLICATE) or "replicated"
        here = " ".join(times(s) for s in local_shapes(spec)) if how != "replicated" else ""
        rows.append(
            (pattern if len(names) > 1 else names[0], f"{len(names)} of" if len(names) > 1 else "", times(shape), how, here)
        )
    return rows


def times(shape: Sequence[int]) -> str:
    """A shape as ``2x3``."""
    return "x".join(map(str, shape)) or "scalar"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    return [("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows]
