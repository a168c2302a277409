"""Sparse, quantized, nested and mkldnn tensors: refused on the line that would make one, and never told as dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, UsageError, init_device_mesh
from dtorch.core.placements import Placement

F = torch.nn.functional
SPARSE = torch.eye(4).to_sparse()


def _gradient(x: Any, fn: Callable[[Any], torch.Tensor]) -> Any:
    x = x.detach().requires_grad_()
    fn(x).sum().backward()
    return x.grad


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse of one dim": lambda x: x.to_sparse(1),
    "to_sparse of a layout": lambda x: x.to_sparse(layout=torch.sparse_csr),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantize": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "quantize by a tensor": lambda x: torch.quantize_per_tensor(x, torch.tensor(0.1), torch.tensor(0), torch.qint8),
    "quantize channels": lambda x: torch.quantize_per_channel(x, torch.ones(4), torch.zeros(4), 0, torch.qint8),
    "quantize dynamically": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "nested by a mask": lambda x: torch._nested_tensor_from_mask(x[None], torch.ones(1, 4, dtype=torch.bool)),
    "coo": lambda x: torch.sparse_coo_tensor(x.long()[:2].abs(), x[0]),
    "csr of parts": lambda x: torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), x[0, :1], (1, 4)),
    "zeros_like": lambda x: torch.zeros_like(x, layout=torch.sparse_coo),
    "full_like": lambda x: torch.full_like(x, 2, layout=torch.sparse_coo),
    "new_zeros": lambda x: x.new_zeros((2, 2), layout=torch.sparse_coo),
    "mixed product": lambda x: torch.mm(SPARSE, x),
    "mixed sum": lambda x: x + SPARSE,
    "sparse_mask": lambda x: x.sparse_mask(SPARSE),
    "sspaddmm": lambda x: torch.sspaddmm(x, x, x),
    "embedding's gradient": lambda x: _gradient(x, lambda w: F.embedding(torch.tensor([1, 2]), w, sparse=True)),
    "bag's gradient": lambda x: _gradient(x, lambda w: F.embedding_bag(torch.tensor([[1, 2]]), w, sparse=True)),
    "gather's gradient": lambda x: _gradient(
        x, lambda w: torch.gather(w, 0, torch.zeros(1, 4, dtype=torch.long), sparse_grad=True)
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse|.*prototype stage|.*quantized tensor creation|.*has no sharding rule")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1, (4, 0))], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_another_layout_is_refused(name: str, placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = dtorch.Tensor(torch.eye(4), device_mesh=mesh, placements=[placement])
    with pytest.raises(UsageError, match=r"dense and strided"):
        PROGRAMS[name](x)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize("name", OTHERS)
def test_data_of_another_layout_is_refused(name: str) -> None:
    data = OTHERS[name](torch.eye(4))
    mesh = init_device_mesh("cpu", (2,))
    for make in (lambda: dtorch.Tensor(data, device_mesh=mesh), lambda: dtorch.from_local([data, data], mesh, [Replicate()])):
        with pytest.raises(UsageError, match=r"dense and strided"):
            make()


def test_what_stays_dense_is_not_refused() -> None:
    x = dtorch.Tensor(torch.eye(4), device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    assert torch.equal(x.to_dense().to_torch(), torch.eye(4))
    assert torch.equal(torch.zeros_like(x, layout=torch.strided).to_torch(), torch.zeros(4, 4))
