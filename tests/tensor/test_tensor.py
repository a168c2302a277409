"""The tensor itself: what it tells of where it lies, copying, parameters, and autograd's switches."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import values
from tests.sharding.placed import assert_holds

R = Replicate()
pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
MESH = init_device_mesh("cpu", (2, 2))


def sharded(*shape: int) -> dtorch.Tensor:
    return dtorch.Tensor(torch.arange(float(torch.Size(shape).numel())).view(shape), device_mesh=MESH, placements=[Shard(0), R])


def test_metadata_is_that_of_the_whole() -> None:
    x = sharded(5, 4)
    assert (x.shape, x.size(0), x.ndim, x.numel(), x.stride(), x.dtype) == ((5, 4), 5, 2, 20, (4, 1), torch.float32)
    assert x.device == torch.device("cpu") and x.layout == torch.strided and x.is_contiguous() and not x.is_meta
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and x.element_size() == 4 and len(x) == 5
    assert x.device_mesh is MESH and x.placements == (Shard(0), R)


def test_shards_and_local_shapes() -> None:
    x = sharded(5, 2)
    assert (
        [t.shape for t in x.shards]
        == [(3, 2), (3, 2), (2, 2), (2, 2)]
        == [x.local_shape(c) for c in ((0, 0), (0, 1), (1, 0), (1, 1))]
    )
    assert torch.equal(torch.cat([x.shards[0], x.shards[2]]), x.to_torch())
    assert type(x.shards[0]) is torch.Tensor
    x.shards[0].zero_()
    assert x.to_torch().tolist() == torch.arange(10.0).view(5, 2).tolist()


def test_shards_of_a_partial_are_its_parts() -> None:
    x = dtorch.from_local([torch.ones(2), torch.full((2,), 4.0)], init_device_mesh("cpu", 2), [Partial()])
    assert [t.tolist() for t in x.shards] == [[1.0, 1.0], [4.0, 4.0]]
    assert x.to_torch().tolist() == [5.0, 5.0]


def test_reading_values() -> None:
    x = sharded(2, 3)
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert isinstance(x.numpy(), np.ndarray) and x.numpy().tolist() == x.tolist()
    assert type(x.to_torch()) is torch.Tensor and torch.equal(x.full_tensor(), x.to_torch())
    assert x[1, 2].item() == float(x[1, 2]) == 5.0 and int(x.sum()) == 15 and bool(x[0, 1]) and not x[0, 0]
    assert [row.tolist() for row in x] == x.tolist()
    assert (3.0 in x) is True and (7.0 in x) is False
    assert np.asarray(x.to_torch()).sum() == 15
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)
    with pytest.raises((ValueError, RuntimeError), match="Tensor with"):
        x.item()


def test_values_under_grad_are_read_detached() -> None:
    x = sharded(2, 3).requires_grad_()
    y = x * 2
    assert not y.to_torch().requires_grad and y.tolist()[1][2] == 10.0
    assert y.detach().numpy().tolist() == y.tolist()


def test_conversions_keep_mesh_and_placements() -> None:
    x = sharded(5, 2)
    for y in (
        x.double(),
        x.to(torch.float64),
        x.type(torch.float64),
        x.to(dtype=torch.float64),
        x.to(torch.ones(1, dtype=torch.float64)),
    ):
        assert y.dtype == torch.float64 and y.placements == x.placements
        assert_holds(y, x.to_torch().double())
    assert x.to(torch.float32) is x and x.float() is x and x.contiguous() is x
    assert x.bfloat16().half().int().bool().dtype == torch.bool
    assert isinstance(x.cpu(), dtorch.Tensor) and isinstance(x.to("cpu"), dtorch.Tensor)


def test_deepcopy() -> None:
    x = sharded(4, 2)
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1] and pair[0] is not x and pair[0].placements == x.placements
    pair[0].zero_()
    assert x.sum().item() == 28
    leaf = copy.deepcopy(x.requires_grad_())
    assert leaf.requires_grad and leaf.is_leaf
    parameter = copy.deepcopy(nn.Parameter(sharded(4, 2), requires_grad=False))
    assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad


def test_copy_shares_memory_as_in_torch() -> None:
    for x in (sharded(4, 2), nn.Parameter(sharded(4, 2))):
        x.mark = "kept"
        other = copy.copy(x)
        assert other is not x and isinstance(other, nn.Parameter) == isinstance(x, nn.Parameter)
        assert other.mark == copy.deepcopy(x).mark == "kept" and other.requires_grad == x.requires_grad
        other.detach().zero_()
        assert x.abs().sum().item() == 0


def test_deepcopy_of_a_computed_tensor_is_refused_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(sharded(2, 2).requires_grad_() * 2)


def test_deepcopy_takes_the_gradient_along() -> None:
    x = sharded(2, 2).requires_grad_()
    (x * 3).sum().backward()
    other = copy.deepcopy(x)
    assert other.grad is not x.grad and other.grad.tolist() == [[3.0] * 2] * 2


def test_deepcopy_of_a_module() -> None:
    module = nn.Linear(3, 2)
    for name, p in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(dtorch.Tensor(p.data, device_mesh=MESH, placements=[Shard(0), R])))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    assert module.weight.abs().sum() > 0 and other.weight.placements == (Shard(0), R)
    assert other.state_dict().keys() == module.state_dict().keys()


def test_deepcopy_keeps_two_tensors_on_one_memory() -> None:
    def program(t: torch.Tensor) -> list[torch.Tensor]:
        module = nn.Module()
        module.first, module.second = nn.Parameter(t), nn.Parameter(t.data)
        for name, buffer in {"third": t, "fourth": t.detach(), "fifth": t.clone()}.items():
            module.register_buffer(name, buffer)
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.second.mul_(2)
            other.third[0] = 7
            other.fourth[1].add_(1)
        return [*module.state_dict().values(), *other.state_dict().values()]

    plain = values(4, 2)
    for mesh, placements in ((MESH, (Shard(0), R)), (DeviceMesh("cpu"), (Shard(0),)), (init_device_mesh("cpu", 3), (Shard(0),))):
        placed = dtorch.Tensor(plain, device_mesh=mesh, placements=placements)
        expected, actual = program(plain.clone()), program(placed)
        assert all(torch.equal(a.to_torch(), b) for a, b in zip(actual, expected, strict=True))
        assert [t.placements for t in actual[:5]] == [t.placements for t in actual[5:]]


def test_deepcopy_of_one_memory_under_two_placements() -> None:
    x = dtorch.Tensor(values(4), device_mesh=DeviceMesh("cpu"), placements=[Shard(0)])
    a, b = copy.deepcopy([x, x.redistribute(placements=[R])])
    b.zero_()
    assert (a.placements, b.placements) == ((Shard(0),), (R,)) and not a.to_torch().any() and torch.equal(x.to_torch(), values(4))


@pytest.mark.parametrize(
    "save", [pickle.dumps, lambda t: torch.save(t, io.BytesIO()), lambda t: torch.save({"a": t}, io.BytesIO())]
)
def test_pickling_is_refused_with_a_way_out(save: object) -> None:
    for t in (sharded(2, 2), nn.Parameter(sharded(2, 2))):
        with pytest.raises(UsageError, match=r"to_torch\(\)"):
            save(t)


def test_parameters() -> None:
    p = nn.Parameter(sharded(4, 2))
    assert isinstance(p, nn.Parameter) and isinstance(p, dtorch.Tensor) and p.requires_grad and p.is_leaf
    assert p.placements == (Shard(0), R)
    module = nn.Module()
    module.weight = p
    module.register_buffer("count", dtorch.zeros((), device_mesh=MESH))
    assert dict(module.named_parameters())["weight"] is p
    assert isinstance(p * 1, dtorch.Tensor) and not isinstance(p * 1, nn.Parameter)
    assert isinstance(p.data, dtorch.Tensor) and not p.data.requires_grad
    module.to(torch.float64)
    assert (
        module.weight.dtype == torch.float64 and module.weight.placements == (Shard(0), R) and module.count.dtype == torch.float64
    )
    assert isinstance(module.weight, nn.Parameter)
    module.half()
    module.requires_grad_(False)
    assert module.weight.dtype == torch.float16 and not module.weight.requires_grad


def test_load_state_dict_copies_plain_and_global_values() -> None:
    module = nn.Linear(3, 4)
    for name, p in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(dtorch.Tensor(p.data, device_mesh=MESH, placements=[Shard(0), R])))
    other = nn.Linear(3, 4)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module.weight.to_torch(), other.weight) and module.weight.placements == (Shard(0), R)
    module.load_state_dict({k: dtorch.Tensor(v * 2, device_mesh=MESH) for k, v in other.state_dict().items()})
    assert torch.equal(module.bias.to_torch(), other.bias * 2) and module.bias.placements == (Shard(0), R)


def test_data_shares_memory_and_can_be_assigned() -> None:
    x = sharded(4, 2).requires_grad_()
    x.data.mul_(2)
    assert x.sum().item() == 56
    x.data = dtorch.ones(3, device_mesh=DeviceMesh("cpu", [4]))
    assert x.shape == (3,) and x.device_mesh.ids == (4,) and x.tolist() == [1.0] * 3 and x.requires_grad
    assert (x * 2).tolist() == [2.0] * 3
    x.data = torch.full((3,), 5.0)
    assert isinstance(x, dtorch.Tensor) and x.tolist() == [5.0] * 3
    y = dtorch.ones(2, 2, device_mesh=MESH)
    y.data = y.data.t().double()
    assert y.dtype == torch.float64


def test_requires_grad_can_be_switched() -> None:
    x = sharded(2, 2)
    assert not x.requires_grad and x.requires_grad_() is x and x.requires_grad
    x.requires_grad = False
    assert not x.requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        dtorch.arange(3).requires_grad_()


def test_equality_and_hash() -> None:
    x = sharded(2, 2)
    assert torch.equal(x, sharded(2, 2)) and not torch.equal(x, x + 1) and not torch.equal(x, sharded(4, 1))
    assert torch.equal(x, torch.arange(4.0).view(2, 2)) and torch.allclose(x, x + 1e-9)
    assert len({x, x, sharded(2, 2)}) == 2
    assert (x == x).all()
    torch.testing.assert_close(x.to_torch(), sharded(2, 2).to_torch())


def test_methods_that_torch_implements_in_python() -> None:
    x = sharded(4, 2)
    assert torch.equal(x.norm().to_torch(), x.to_torch().norm())
    assert [t.shape for t in x.split(3)] == [(3, 2), (1, 2)]
    assert torch.equal(torch.einsum("ij,kj->ik", x, x).to_torch(), x.to_torch() @ x.to_torch().t())
    assert x.unflatten(0, (2, 2)).shape == (2, 2, 2)
    assert x.new_empty(3).shape == (3,)
    values, indices = torch.sort(x, dim=0, descending=True)
    assert values[0].tolist() == [6.0, 7.0] and indices[0].tolist() == [3, 3]
    assert [t.tolist() for t in torch.meshgrid(x[:, 0], x[0], indexing="ij")][1][0] == [0.0, 1.0]
    assert x.cumsum(0)[-1].tolist() == [12.0, 16.0]
    assert torch.block_diag(x, x).shape == (8, 4)


def test_reflected_and_number_arithmetic() -> None:
    x = sharded(2, 2)
    plain = x.to_torch()
    for f in (
        lambda t: 1 - t,
        lambda t: 2 / (t + 1),
        lambda t: 2**t,
        lambda t: -t,
        lambda t: abs(t - 2),
        lambda t: t // 2,
        lambda t: 7 % (t + 1),
        lambda t: t @ t,
        lambda t: t > 1,
        lambda t: ~(t > 1),
        lambda t: 3 - t + True,
    ):
        assert_holds(f(x).redistribute(placements=[R, R]), f(plain))


def test_a_subclass_of_module_with_hooks_and_apply() -> None:
    seen = []
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(dtorch.Tensor(module.weight.data, device_mesh=MESH, placements=[Shard(0), R]))
    module.bias = nn.Parameter(dtorch.Tensor(module.bias.data, device_mesh=MESH, placements=[Shard(0), R]))
    module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    module.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].shape))
    module(sharded(3, 2).requires_grad_()).sum().backward()
    assert seen == [(3, 2), (3, 2)]
    assert isinstance(module.weight.grad, dtorch.Tensor)
