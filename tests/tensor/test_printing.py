"""What a tensor shows of itself."""

from __future__ import annotations

import re

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.tensor.printing import split_lines

R = Replicate()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_repr_shows_values_shape_dtype_mesh_and_placements() -> None:
    x = dtorch.Tensor([[1.0, 2.0], [3.0, 4.0]], device_mesh=MESH, placements=[Shard(0), Partial()])
    text = repr(x)
    for part in ("[[1., 2.]", "[3., 4.]]", "shape=(2, 2)", "torch.float32", "dp=2, tp=2", "[Shard(0), Partial()]"):
        assert part in text
    assert str(x) == f"{x}" == text


def test_repr_shows_autograd_state() -> None:
    x = dtorch.ones(2, requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert "requires_grad" not in repr(x.detach())


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.arange(5000),
        torch.tensor([1 + 2j]),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_repr_of_any_value(value: torch.Tensor) -> None:
    for placements in ([R, R], [Shard(0), R])[: 1 + (value.ndim > 0)]:
        text = repr(dtorch.Tensor(value, device_mesh=MESH, placements=placements))
        assert f"dtype={value.dtype}" in text and "mesh=" in text
        assert text.count("(") == text.count(")")


def test_format_of_numbers() -> None:
    x = dtorch.Tensor(3.14159, device_mesh=MESH)
    assert f"{x:.2f}" == "3.14"
    assert f"{x}" == repr(x)
    with pytest.raises(TypeError):
        f"{dtorch.ones(2):.2f}"


def test_printing_inside_no_grad_and_inference_mode() -> None:
    x = dtorch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert "1., 1." in repr(x)
    with torch.inference_mode():
        assert "1., 1." in repr(x) and "2., 2." in repr(x * 2)


def test_parameters_print_as_such() -> None:
    assert repr(torch.nn.Parameter(dtorch.ones(2))).startswith("Parameter")


def test_split_in_words() -> None:
    x = dtorch.ones(5, 2, device_mesh=MESH, placements=[Shard(0), R])
    assert split_lines(x._spec) == ["devices 0,1: [0:3] x [0:2]", "devices 2,3: [3:5] x [0:2]"]
    assert split_lines(dtorch.ones((), device_mesh=MESH)._spec) == ["devices 0,1,2,3: scalar"]


def test_html_draws_one_box_a_piece_and_reads_no_value() -> None:
    x = dtorch.ones(8, 6, device_mesh=MESH, placements=[Shard(0), Shard(1)])
    html = x._repr_html_()
    assert html.count("<rect") == 4 and "device 3: [4:8] x [3:6]" in html
    assert "&#x27;cpu&#x27;" in html
    areas = [float(w) * float(h) for w, h in re.findall(r'width="([\d.]+)" height="([\d.]+)" fill', html)]
    total = re.search(r'<svg width="(\d+)" height="(\d+)"', html)
    assert total is not None and sum(areas) == pytest.approx(int(total[1]) * int(total[2]), rel=0.01)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 3), (2, 3, 4)], ids=str)
def test_html_of_any_shape(shape: tuple[int, ...]) -> None:
    x = dtorch.ones(shape, device_mesh=MESH, placements=[Shard(0) if shape else R, R])
    assert x._repr_html_().startswith("<div>")


def test_html_of_a_large_mesh_stays_small() -> None:
    x = dtorch.ones(4096, 64, device_mesh=init_device_mesh("cpu", (64, 8)), placements=[Shard(0), Shard(1)])
    assert x._repr_html_().count("<rect") == 512


def test_nothing_is_said_twice() -> None:
    text = repr(dtorch.empty(0, 3, dtype=torch.int64, device_mesh=MESH))
    assert text.startswith("dtorch.Tensor([],\n") and text.count("int64") == 1
    assert repr(dtorch.ones(2, dtype=torch.bfloat16)).count("bfloat16") == 1
