"""Whole models on a sequence split over devices: as on one device, and keys and values are never gathered."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, init_device_mesh
from dtorch.tensor.watch import Report
from tests.models.zoo import ANY_RULE, VOCABULARY, gpt2, llama, without_dropout

pytestmark = ANY_RULE

MESHES = {"ring_cp": (2,), "ulysses_cp": (3,), "ulysses_cp,ring_cp": (2, 2), "ring_cp,ulysses_cp": (3, 2)}
MODELS = {"llama": llama, "gpt2": gpt2}


def mesh_of(names: str) -> DeviceMesh:
    return init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split(",")))


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy of a model whose every tensor is whole on every device; what was shared is shared."""
    model, made = copy.deepcopy(model), {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in [(n, t) for n, t in kind.items() if t is not None]:
                if id(tensor) not in made:
                    placed = dtorch.Tensor(tensor.detach(), device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
                    made[id(tensor)] = (tensor, nn.Parameter(placed) if isinstance(tensor, nn.Parameter) else placed)
                kind[name] = made[id(tensor)][1]
    return model


def step(model: nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the gradients of a weighted sum of them."""
    logits = model(input_ids=ids, use_cache=False).logits
    return logits, list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def compared(name: str, names: str, batch: int) -> tuple[torch.Tensor, Report]:
    """Run a model both ways and compare; its global logits, and what was moved."""
    model, mesh = without_dropout(MODELS[name]()), mesh_of(names)
    ids, weights = torch.randint(1, VOCABULARY, (batch, 13)), torch.randn(batch, 13, VOCABULARY)
    expected, gradients = step(model, ids, weights)
    placed = [dtorch.Tensor(t, device_mesh=mesh, placements=[Shard(1)] * mesh.ndim) for t in (ids, weights)]
    with dtorch.explain() as report:
        logits, found = step(replicated(model, mesh), *placed)
    assert (logits.to_torch() - expected).abs().max() <= 1e-5 * expected.abs().max()
    for a, b in zip(found, gradients, strict=True):
        assert (a.to_torch() - b).abs().max() <= 1e-4 * max(b.abs().max(), 1e-3)
    return logits, report


@pytest.mark.parametrize("names", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_one_long_sequence(name: str, names: str) -> None:
    logits, report = compared(name, names, batch=1)
    assert all(p == Shard(1) for p in logits.placements)
    attention = Counter(
        e.comm.kind for e in report.events if "attention" in e.comm.operator and "backward" not in e.comm.operator
    )
    ring = dict(zip(names.split(","), MESHES[names], strict=True)).get("ring_cp", 1)
    layers = 2
    assert attention == Counter({"all_to_all": 4 * layers, "ring_shift": (ring - 1) * layers})
    assert not [e for e in report.events if "attention" in e.comm.operator and e.comm.kind == "all_gather"]


@pytest.mark.parametrize("names", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_several_sequences(name: str, names: str) -> None:
    compared(name, names, batch=2)
