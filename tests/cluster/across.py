"""What programs on many hosts compute, and the same on plain PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh


def redistributed() -> None:
    """Pieces of uneven sizes travel between all placements of two axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.randn(301, 37)
    tensor = dtorch.Tensor(whole, device_mesh=mesh)
    for source in (Replicate(), Shard(0), Shard(1), Partial()):
        for target in (Replicate(), Shard(0), Shard(1)):
            moved = tensor.redistribute(placements=[Shard(0), source]).redistribute(placements=[target, Shard(1)])
            torch.testing.assert_close(moved.to_torch(), whole)


def multiplied() -> None:
    """Uneven splits on one axis and two."""
    x, w = torch.randn(7, 13), torch.randn(13, 5)
    for shape, left, right in (
        (3, [Shard(1)], [Shard(0)]),
        (4, [Shard(0)], [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", shape)
        a, b = dtorch.Tensor(x, device_mesh=mesh), dtorch.Tensor(w, device_mesh=mesh)
        product = a.redistribute(placements=left) @ b.redistribute(placements=right)
        torch.testing.assert_close(product.to_torch(), x @ w)
        torch.testing.assert_close(product.softmax(0).sum(1).to_torch(), (x @ w).softmax(0).sum(1))


def trained() -> None:
    """Steps of training with data and tensor parallel axes."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 3))
    inputs, targets = torch.randn(10, 6), torch.randn(10, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = dtorch.parallelize(copy.deepcopy(model), mesh)
    for one in (model, parallel):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(one(inputs), targets).backward()
            optimizer.step()
    for (name, plain), split in zip(model.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(_whole(split), plain, msg=name)


def differences() -> None:
    """All of it; fails where a number is another one."""
    torch.manual_seed(1)
    for program in (multiplied, redistributed, trained):
        program()


def _whole(parameter: Tensor) -> Tensor:
    return parameter.to_torch() if isinstance(parameter, dtorch.Tensor) else parameter
