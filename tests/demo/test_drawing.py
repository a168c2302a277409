"""Pictures in text."""

from __future__ import annotations

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.demo.drawing import draw_mesh, draw_weight, side_by_side

MESH = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


def test_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 10), mesh_dim_names=("pp", "tp"))
    lines = draw_mesh(mesh, ["layers 0 to 1", "the rest"]).splitlines()
    assert lines[0] == "mesh pp=2 x tp=10: 20 devices (cpu, simulated on this machine)"
    assert [line.split() for line in lines[1:]] == [
        ["stage", "0", "[0][1][2][3][4][5][6][7]..[9]", "layers", "0", "to", "1"],
        ["stage", "1", "[10][11][12][13][14][15][16][17]..[19]", "the", "rest"],
    ]
    assert lines[1].index("layers") == lines[2].index("the")


def test_rows_and_columns() -> None:
    rows = dtorch.zeros(9, 4, device_mesh=MESH, placements=[Replicate(), Shard(0, (6, 3))])
    block = draw_weight("w", rows, "6 + 3")
    assert block[:2] == ["w", "9 x 4"] and block[-2:] == ["rows █ 6  ░ 3", "6 + 3"]
    assert [line[1] for line in block[3:-3]] == list("████░░")
    columns = draw_weight("w", dtorch.zeros(9, 4, device_mesh=MESH, placements=[Replicate(), Shard(1)]))
    assert columns[3].strip("│") == "█" * 9 + "░" * 9 and columns[-2] == "columns █ 2  ░ 2"


def test_whole() -> None:
    assert "whole on every device" in draw_weight("w", dtorch.zeros(2, 2, device_mesh=MESH))


def test_an_empty_piece_is_not_drawn() -> None:
    mesh = init_device_mesh("cpu", 3, mesh_dim_names=("tp",))
    block = draw_weight("w", dtorch.zeros(2, 2, device_mesh=mesh, placements=[Shard(0)]))
    assert [line[1] for line in block[3:-3]] == list("███░░░")


def test_blocks_stand_side_by_side() -> None:
    assert side_by_side([["a", "bcd"], ["e"]], gap=2) == "  a    e\n  bcd"
