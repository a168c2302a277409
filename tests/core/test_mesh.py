"""Meshes: construction, names, sub-meshes, identity, and what each refusal says."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from dtorch import DeviceMesh, MeshError, UsageError, init_device_mesh
from dtorch.core.mesh import Family


def test_init_counts_ids_row_major() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert (mesh.device_type, mesh.shape, mesh.ndim, mesh.size(), mesh.ids) == ("cpu", (2, 3), 2, 6, (0, 1, 2, 3, 4, 5))
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert (mesh.size("dp"), mesh.size(1), mesh.size(-2)) == (2, 3, 2)
    assert mesh.device_at((1, 2)) == 5


@pytest.mark.parametrize("ids", [[[4, 2], [0, 7]], np.array([[4, 2], [0, 7]]), torch.tensor([[4, 2], [0, 7]]), ((4, 2), (0, 7))])
def test_a_mesh_of_given_ids(ids: object) -> None:
    mesh = DeviceMesh("cpu", ids)
    assert (mesh.shape, mesh.ids) == ((2, 2), (4, 2, 0, 7))
    assert mesh is DeviceMesh("cpu", [[4, 2], [0, 7]])


def test_shape_may_be_an_int_and_the_default_is_one_device() -> None:
    assert init_device_mesh("cpu", 3) is init_device_mesh("cpu", (3,)) is DeviceMesh("cpu", [0, 1, 2])
    assert init_device_mesh("cpu", 3, mesh_dim_names="tp") is init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    assert DeviceMesh("cpu").ids == (0,)
    assert init_device_mesh("cpu", (12, 36)).size() == 432


def test_equal_meshes_are_one_object() -> None:
    a, b = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 2))
    assert a is b and a == b and hash(a) == hash(b)
    assert a != init_device_mesh("cpu", (4,))
    assert a != init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert copy.deepcopy(a) is a and copy.copy(a) is a and pickle.loads(pickle.dumps(a)) is a


def test_indexing_by_name() -> None:
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]], mesh_dim_names=("pp", "dp", "tp"))
    assert mesh["tp"] is DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    assert mesh["dp"].ids == (0, 2, 4)
    assert mesh["pp", "tp"] is DeviceMesh("cpu", [[0, 1], [6, 7]], mesh_dim_names=("pp", "tp"))
    assert mesh["tp", "pp"].ids == (0, 6, 1, 7)
    assert mesh["pp", "dp", "tp"] is mesh
    with pytest.raises(MeshError, match="'ep'"):
        mesh["ep"]


def test_unbind() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("pp", "tp"))
    assert [m.ids for m in mesh.unbind("pp")] == [(0, 1, 2), (3, 4, 5)]
    assert [m.mesh_dim_names for m in mesh.unbind("pp")] == [("tp",)] * 2
    assert [m.ids for m in mesh.unbind(1)] == [(0, 3), (1, 4), (2, 5)]
    assert mesh.unbind("cp") == [mesh]
    assert [m.ids for m in DeviceMesh("cpu", [5, 6]).unbind(0)] == [(5,), (6,)]
    assert DeviceMesh("cpu", [5, 6]).unbind("pp") == [DeviceMesh("cpu", [5, 6])]


def test_axes_by_name_and_index() -> None:
    named, plain = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (2, 3))
    assert (named.axis("tp"), named.axis(0), named.axis(-1)) == (1, 0, 1)
    assert plain.axis_names() == ("axis0", "axis1")
    for bad in ("tp", 2, -3):
        with pytest.raises(MeshError, match="use one of"):
            plain.axis(bad)


def test_repr_is_short_and_names_axes() -> None:
    assert repr(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))) == "DeviceMesh('cpu', dp=2, tp=2; ids 0, 1, 2, 3)"
    assert "ids 0..431" in repr(init_device_mesh("cpu", (12, 36)))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: DeviceMesh("cpu", [0, 1, 0]), "distinct"),
        (lambda: DeviceMesh("cpu", [0, -1]), "not negative"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "full n-d array"),
        (lambda: DeviceMesh("cpu", []), "at least one"),
        (lambda: DeviceMesh("cpu", 3), "at least one device"),
        (lambda: DeviceMesh("cpu", [0, "1"]), "device ids"),
        (lambda: DeviceMesh("cpu", [0.5]), "device ids"),
        (lambda: init_device_mesh("cpu", (2, 0)), "at least one device"),
        (lambda: init_device_mesh("cpu", (2, -2)), "at least one device"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), "one distinct name per mesh axis"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp")), "one distinct name per mesh axis"),
        (lambda: init_device_mesh("tpu", 2), "device type"),
        (lambda: init_device_mesh("cpu:0", 2), "device type"),
    ],
)
def test_refusals_say_what_why_where_and_what_to_do(make: object, rule: str) -> None:
    with pytest.raises(MeshError, match=rule) as raised:
        make()
    assert isinstance(raised.value, UsageError) and isinstance(raised.value, ValueError)
    assert [line.split(":")[0].strip() for line in str(raised.value).splitlines()][1:] == ["rule", "where", "to do"]


def test_meshes_of_a_family_are_akin_while_it_lives() -> None:
    a, b, c = (DeviceMesh("cpu", [n]) for n in (20, 21, 22))
    assert a.akin(a) and not a.akin(b)
    family, other = Family((a, b)), Family((b, c))
    assert a.akin(b) and b.akin(a) and b.akin(c) and not a.akin(c)
    del family, other
    assert not a.akin(b) and not b.akin(c)
