"""The demo's mesh: read from text, and held against what the model can use."""

from __future__ import annotations

import math
import re

from dtorch import DeviceMesh, init_device_mesh

from .model import HEADS, LAYERS
from .problem import problem

MOST_DEVICES = 512
WHERE = "option --mesh"

# Axis -> the most devices that have something to do, and why.
LIMITS = {
    "dp": (MOST_DEVICES, "a mesh of the demo has that many devices at most"),
    "tp": (HEADS, "no more devices than the model has attention heads"),
    "pp": (LAYERS, "no more stages than the model has layers"),
}


def parse_mesh(text: str, device_type: str) -> DeviceMesh:
    """The mesh that a text such as ``dp=1,tp=2,pp=2`` names.

    Raises:
        UsageError: the text is malformed, names an unknown axis, or asks for more devices than the model can use.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or int(match[2]) < 1 or match[1] in sizes:
            raise problem(
                f"--mesh {text!r}",
                "a mesh is axis=devices, separated by commas, each axis once, with at least one device",
                WHERE,
                "write e.g. --mesh dp=1,tp=2,pp=2",
            )
        sizes[match[1]] = int(match[2])
    for name, size in sizes.items():
        if name not in LIMITS:
            raise problem(
                f"axis {name!r} in --mesh {text!r}",
                "the demo's axes are dp (batch), tp (weights) and pp (layers)",
                WHERE,
                "use these, e.g. --mesh tp=2,pp=2",
            )
        most, why = LIMITS[name]
        if size > most:
            raise problem(f"{name}={size} in --mesh {text!r}", why, WHERE, f"make {name} at most {most}")
    if math.prod(sizes.values()) > MOST_DEVICES:
        raise problem(f"{math.prod(sizes.values())} devices in --mesh {text!r}", LIMITS["dp"][1], WHERE, "make an axis smaller")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
