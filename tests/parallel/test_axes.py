"""Names of mesh axes, and placements by name."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch import DeviceMesh, PlacementError, Replicate, Shard, UsageError, init_device_mesh
from dtorch.parallel.axes import by_axis_name, check_axes, placements_on, size_of

MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def test_known_names_pass() -> None:
    check_axes(init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "tp", "dp")))
    check_axes(DeviceMesh("cpu"))


@pytest.mark.parametrize("names", [("dp", "model"), ("expert", "tp"), None])
def test_other_names_are_refused_with_the_list_of_known_ones(names: tuple[str, ...] | None) -> None:
    with pytest.raises(UsageError, match=r"(?s)understands dp .*fsdp .*tp .*pp .*ep .*where: parallelize"):
        check_axes(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


@pytest.mark.parametrize("mesh", [2, None, "cpu", (2, 2)])
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)for a mesh.*DeviceMesh"):
        check_axes(mesh)


def test_placements_by_name_and_back() -> None:
    assert placements_on(MESH, {"tp": Shard(1), "pp": Shard(0)}) == (Replicate(), Shard(1))
    assert by_axis_name(MESH, [Shard(0), Replicate()], "here") == {"dp": Shard(0), "tp": Replicate()}


def test_stages_have_no_placement() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    assert by_axis_name(mesh, [Shard(0)], "here") == {"tp": Shard(0)}
    with pytest.raises(PlacementError, match="where: here"):
        by_axis_name(mesh, [Replicate(), Shard(0)], "here")


def test_an_absent_axis_has_one_device() -> None:
    assert (size_of(MESH, "tp"), size_of(MESH, "pp")) == (3, 1)
