"""What the names of mesh axes mean to ``parallelize``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..core.errors import PlacementError, UsageError, four_parts
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Placement, Placements

DATA, SHARDED, TENSOR, PIPELINE, EXPERT = "dp", "fsdp", "tp", "pp", "ep"
ULYSSES, RING = "ulysses_cp", "ring_cp"
BATCH_AXES = (DATA, SHARDED, EXPERT)
"""Axes that split the batch, dim 0 of what a model is given."""
SEQUENCE_AXES = (ULYSSES, RING)
"""Axes that split the sequence, dim 1 of tokens."""


def check_axes(mesh: DeviceMesh) -> None:
    """Refuse what is no mesh, and a mesh with an axis that has no meaning here.

    Raises:
        UsageError: no mesh, an axis without a name, or with a name that ``parallelize`` does not know.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            four_parts(
                f"{mesh!r} for a mesh",
                "a module is distributed over a DeviceMesh",
                "parallelize(module, mesh)",
                "make one, e.g. init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
            )
        )
    names: Sequence[str] = mesh.axis_names() if mesh.mesh_dim_names or mesh.size() > 1 else ()
    unknown = [n for n in names if n not in MEANINGS]
    if unknown:
        raise UsageError(
            four_parts(
                f"mesh axes {unknown} of {mesh!r}",
                f"parallelize goes by axis names, and understands {_understood()}",
                "parallelize(module, mesh)",
                "name every axis so, e.g. init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
            )
        )


def check_axis_name(name: str, where: str) -> None:
    """Refuse a name in a plan that no axis can have.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in MEANINGS:
        raise UsageError(
            four_parts(
                f"axis {name!r}",
                f"the axes that parallelize understands are {_understood()}",
                where,
                "use one of these names; axes that the mesh lacks are passed over",
            )
        )


def placements_on(mesh: DeviceMesh, by_axis: Mapping[str, Placement]) -> Placements:
    """Placements on a mesh, given by axis name: axes not named replicate, names that the mesh lacks are passed over."""
    return tuple(by_axis.get(name, REPLICATE) for name in mesh.axis_names())


def by_axis_name(mesh: DeviceMesh, placements: Sequence[Placement], where: str) -> dict[str, Placement]:
    """The inverse of ``placements_on`` for placements given in order, one per axis other than ``pp``.

    Raises:
        PlacementError: wrong number of placements.
    """
    names = [n for n in mesh.axis_names() if n != PIPELINE]
    if len(placements) != len(names):
        raise PlacementError(
            four_parts(
                f"placements {list(placements)!r} on {mesh!r}",
                "one placement per mesh axis other than pp",
                where,
                f"give {len(names)}, for {names}",
            )
        )
    return dict(zip(names, placements, strict=True))


def dividing(mesh: DeviceMesh, names: Collection[str], length: int) -> list[str]:
    """The axes of the mesh, among those named and in its order, over which a length can be split with no piece empty."""
    out, pieces = [], 1
    for name in mesh.axis_names():
        if name in names and mesh.size(name) > 1 and length >= pieces * mesh.size(name):
            out.append(name)
            pieces *= mesh.size(name)
    return out


def size_of(mesh: DeviceMesh, name: str) -> int:
    """Devices along an axis, 1 where the mesh has none of that name."""
    return mesh.size(name) if name in mesh.axis_names() else 1


def _understood() -> str:
    return ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())


MEANINGS = {
    DATA: "splits the batch",
    SHARDED: "splits the batch, and every weight between its uses",
    TENSOR: "splits weights",
    PIPELINE: "splits layers into stages",
    ULYSSES: "splits the sequence; attention exchanges it for heads",
    RING: "splits the sequence; attention passes keys and values round",
    EXPERT: "splits the batch, and experts",
}
