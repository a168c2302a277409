"""The demo's ``--mesh``."""

from __future__ import annotations

import pytest

from dtorch import UsageError
from dtorch.demo.mesh import parse_mesh


def test_axes_in_the_order_given() -> None:
    mesh = parse_mesh(" dp=1, tp=2,pp=3", "cpu")
    assert (mesh.mesh_dim_names, mesh.shape) == (("dp", "tp", "pp"), (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "axis=devices"),
        ("tp2", "axis=devices"),
        ("tp=two", "axis=devices"),
        ("tp=0", "at least one device"),
        ("tp=-2", "axis=devices"),
        ("tp=2,tp=2", "each axis once"),
        ("ep=2", "the demo's axes are dp"),
        ("tp=10", "make tp at most 9"),
        ("pp=31", "make pp at most 30"),
        ("dp=513", "make dp at most 512"),
        ("dp=100,tp=6", "600 devices"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_mesh(text, "cpu")
    assert all(part in str(caught.value) for part in ("rule:", "where: option --mesh", "to do:"))
