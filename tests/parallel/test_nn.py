"""``dtorch.nn``: the modules of ``torch.nn``, split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE

MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
PLAIN = DeviceMesh("cpu")


def seeded(make: object) -> nn.Module:
    torch.manual_seed(2)
    return make()


@pytest.mark.parametrize(
    ("name", "weight", "bias", "output"),
    [
        ("ColumnParallelLinear", Shard(0), Shard(0), Shard(1)),
        ("ColumnParallelLinearWithReplicateOutput", Shard(0), Shard(0), Replicate()),
        ("RowParallelLinear", Shard(1), Replicate(), Replicate()),
        ("RowParallelLinearWithReplicateOutput", Shard(1), Replicate(), Replicate()),
    ],
)
def test_linear(name: str, weight: object, bias: object, output: object) -> None:
    expected = seeded(lambda: nn.Linear(7, 5))
    model = seeded(lambda: getattr(dtorch.nn, name)(7, 5, device_mesh=MESH))
    assert model.weight.placements == (Replicate(), weight) and model.bias.placements == (Replicate(), bias)
    x = torch.randn(4, 7)
    y = model(dtorch.Tensor(x, device_mesh=MESH, placements=[Shard(0), Replicate()]))
    assert y.placements == (Shard(0), output)
    torch.testing.assert_close(y.detach().to_torch(), expected(x).detach())
    y.square().sum().backward()
    expected(x).square().sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert a.grad.placements == a.placements
        torch.testing.assert_close(a.grad.to_torch(), b.grad)


def test_partial_sums_stay_partial_without_a_bias() -> None:
    model = dtorch.nn.RowParallelLinear(64, 32, bias=False, device_mesh=MESH)
    assert model(torch.randn(2, 64)).placements[1] == Partial()
    assert (
        dtorch.nn.RowParallelLinearWithReplicateOutput(64, 32, bias=False, device_mesh=MESH)(torch.randn(2, 64)).placements[1]
        == Replicate()
    )


def test_embedding() -> None:
    expected = seeded(lambda: nn.Embedding(10, 4, padding_idx=1))
    model = seeded(lambda: dtorch.nn.VocabParallelEmbedding(10, 4, padding_idx=1, device_mesh=MESH))
    ids = torch.tensor([[0, 9, 1], [3, 3, 7]])
    out = model(ids)
    assert model.weight.placements[1] == Shard(0) and out.placements[1] == Replicate()
    assert torch.equal(out.detach().to_torch(), expected(ids).detach())
    out.sum().backward()
    expected(ids).sum().backward()
    assert torch.equal(model.weight.grad.to_torch(), expected.weight.grad)


def test_without_bias_and_on_the_default_mesh() -> None:
    with dtorch.use_mesh(MESH):
        model = dtorch.nn.ColumnParallelLinear(7, 5, bias=False, dtype=torch.float64)
    assert model.bias is None and model.weight.device_mesh is MESH and model.weight.dtype == torch.float64


def test_a_mesh_without_the_axis_makes_them_ordinary() -> None:
    model = dtorch.nn.RowParallelLinearWithReplicateOutput(4, 2, device_mesh=PLAIN)
    assert model.weight.placements == (Replicate(),)
    assert model(torch.randn(3, 4)).placements == (Replicate(),)


def test_another_axis_may_be_named() -> None:
    model = dtorch.nn.ColumnParallelLinear(4, 6, device_mesh=MESH, tp_dim="dp")
    assert model.weight.placements == (Shard(0), Replicate())


def test_the_rest_is_torchs() -> None:
    assert dtorch.nn.Linear is nn.Linear and dtorch.nn.functional is nn.functional
    with pytest.raises(AttributeError):
        _ = dtorch.nn.NoSuchModule
