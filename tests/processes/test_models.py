"""Models over every kind of axis train and generate on worker processes as in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dtorch
from dtorch import init_device_mesh
from tests.models.zoo import (
    ANY_RULE,
    VOCABULARY,
    assert_same_training,
    gpt2,
    llama,
    on_mesh,
    qwen2_moe,
    without_dropout,
)
from tests.parallel.pipeline.models import assert_same_gradients, mean_square, on, plain, sequential, staged
from tests.parallel.test_fully_shard import plain as written
from tests.parallel.test_fully_shard import split

pytestmark = ANY_RULE

MODELS = {"llama": llama, "gpt2": gpt2, "qwen2_moe": qwen2_moe}
MESHES = {
    "llama ring_cp,ulysses_cp": (2, 3),
    "llama tp,ring_cp": (2, 2),
    "llama dp,fsdp,tp": (2, 2, 2),
    "gpt2 fsdp,tp": (3, 2),
    "gpt2 pp,ulysses_cp": (2, 3),
    "qwen2_moe ep": (3,),
    "qwen2_moe ep,fsdp": (2, 2),
}


def tokens(batch: int = 4, length: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", MESHES)
def test_gradients(case: str) -> None:
    name, axes = case.split()
    mesh, model = init_device_mesh("cpu", MESHES[case], mesh_dim_names=tuple(axes.split(","))), without_dropout(MODELS[name]())
    assert_same_training(on_mesh(model, mesh), model, input_ids=tokens(), labels=tokens())


def test_steps_of_an_optimizer_with_dropout() -> None:
    model = gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0).train()
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("fsdp", "tp"))
    pair = model, dtorch.parallelize(copy.deepcopy(model), mesh)
    for part in pair:
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            part(input_ids=tokens(), labels=tokens()).loss.backward()
            nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
    for (name, a), b in zip(pair[1].named_parameters(), pair[0].parameters(), strict=True):
        # Adam divides by the root of what may be next to nothing.
        assert (a.to_torch() - b).abs().max() <= 1e-4, name


@pytest.mark.parametrize("sampled", [False, True])
def test_generation(sampled: bool) -> None:
    model, options = llama(), {"max_new_tokens": 4, "do_sample": sampled, "pad_token_id": 0}
    ours = on_mesh(model, init_device_mesh("cpu", (3, 2), mesh_dim_names=("tp", "pp")))
    found = []
    for part in (model, ours):
        torch.manual_seed(6)
        found.append(part.generate(tokens(2, 5), **options))
    assert torch.equal(found[1].to_torch(), found[0])


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_micro_batches(schedule: str, stages: int) -> None:
    model, x, y = sequential(), torch.randn(8, 6), torch.randn(8, 6)
    mean_square(model(x), y).backward()
    pipe = dtorch.pipeline(on(staged(4), model, stages), 3, schedule, loss_fn=mean_square)
    _, output = pipe.step(x, target=y, return_outputs=True)
    torch.testing.assert_close(plain(output), model(x).detach())
    assert_same_gradients(pipe.model, model)


def test_modules_written_with_parallel_layers() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp", "fsdp"))
    pair, data = (written(), split(mesh)), torch.randn(5, 4, 8)
    for part in pair:
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            part(data).square().mean().backward()
            optimizer.step()
    for a, b in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
        torch.testing.assert_close(a.detach().to_torch(), b.detach())


def test_weights_go_to_files_and_to_another_mesh(tmp_path: Path) -> None:
    model, meshes = llama(), [(("tp", "pp"), (3, 2)), (("fsdp", "tp"), (2, 2)), (("tp",), (8,))]
    for number, (names, shape) in enumerate(meshes):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        source = tmp_path / str(number - 1)
        ours = dtorch.load_pretrained(type(model), source, mesh) if number else on_mesh(model, mesh)
        for (name, a), b in zip(ours.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(a.to_torch(), b), name
        dtorch.save_pretrained(ours, tmp_path / str(number), max_shard_size="20KB")
