"""A cell: a model, the axes of a mesh in order, and options. Its text names it, as in ``llama:dp=2,tp=3:zero=2``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import UsageError, four_parts
from ...core.mesh import DeviceMesh, init_device_mesh
from ...parallel.axes import PIPELINE, SHARDED, TENSOR, check_axes


@dataclass(frozen=True, slots=True)
class Option:
    """What a cell may say besides its axes.

    Attributes:
        default: its value in a cell that does not name it.
        drawn: the values to draw from.
        axis: it is drawn only where this axis has several devices; empty for everywhere.
    """

    default: int
    drawn: tuple[int, ...]
    axis: str = ""


KEYWORDS = {
    "sp": Option(0, (0, 1), TENSOR),
    "zero": Option(3, (1, 2, 3), SHARDED),
    "virtual_stages": Option(1, (1, 1, 1, 2), PIPELINE),
}
"""Options that ``parallelize`` takes."""

INPUTS = {
    "batch": Option(5, (1, 2, 5, 7)),
    "length": Option(7, (6, 7, 11)),
}
"""Options that say what the model is given."""

OPTIONS = {**KEYWORDS, **INPUTS}


@dataclass(frozen=True, slots=True)
class Cell:
    """A model of the zoo by name, the axes of its mesh in order, and the options that are not the default."""

    model: str
    axes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        parts = (self.model, *(",".join(f"{k}={v}" for k, v in pairs) for pairs in (self.axes, self.options) if pairs))
        return ":".join(parts)

    @property
    def devices(self) -> int:
        """Devices of its mesh."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Devices along an axis, 1 where the mesh has none of that name."""
        return dict(self.axes).get(axis, 1)

    def option(self, name: str) -> int:
        """The value of an option."""
        return dict(self.options).get(name, OPTIONS[name].default)

    def keywords(self) -> dict[str, Any]:
        """What ``parallelize`` is given besides module and mesh."""
        return {name: value for name, value in self.options if name in KEYWORDS}

    def inputs(self) -> tuple[int, int]:
        """Samples, and tokens of each."""
        return self.option("batch"), self.option("length")

    def mesh(self) -> DeviceMesh:
        """Its mesh of simulated devices."""
        names, sizes = zip(*self.axes, strict=True)
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def named(model: str, axes: Mapping[str, int], options: Mapping[str, int]) -> Cell:
    """The cell of these; options that have their default are left out, so that equal cells have one text."""
    kept = tuple((name, options[name]) for name in OPTIONS if options.get(name, OPTIONS[name].default) != OPTIONS[name].default)
    return Cell(model, tuple(axes.items()), kept)


def parse_cell(text: str) -> Cell:
    """The cell that a text names.

    Raises:
        UsageError: the text is malformed, or names an axis or option that there is not.
    """
    match = re.fullmatch(r"(\w+):(\w+=[1-9]\d*(?:,\w+=[1-9]\d*)*)(?::(\w+=\d+(?:,\w+=\d+)*))?", text)
    if match is None:
        raise _unknown(text, "a cell is MODEL:AXIS=DEVICES,...[:OPTION=NUMBER,...]")
    axes, options = _pairs(match[2]), _pairs(match[3] or "")
    wrong = [name for name in options if name not in OPTIONS]
    if wrong:
        raise _unknown(text, f"option {wrong[0]!r} is none of {', '.join(OPTIONS)}")
    cell = named(match[1], axes, options)
    check_axes(cell.mesh())
    return cell


def _pairs(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (part.split("=") for part in text.split(",") if part)}


def _unknown(text: str, rule: str) -> UsageError:
    return UsageError(four_parts(f"cell {text!r}", rule, "--cell", "write e.g. llama:dp=2,fsdp=3:zero=2,batch=7"))
