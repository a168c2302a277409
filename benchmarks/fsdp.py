"""What training holds on each device over an axis ``fsdp``, beside the same number of devices on ``dp``.

A small Llama with random weights takes one AdamW step on a mesh of four CPU devices. Bytes are counted on the worker, after
every instruction, for the device that holds the most.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from dtorch import init_device_mesh
from dtorch.parallel.fsdp import GATHER
from dtorch.parallel.stages import find_layers

from .figure import Figure
from .meter import metered
from .setting import SEED, Setting

DEVICES = 4
KIB = 1 << 10


@dataclass(frozen=True)
class Held:
    """Bytes on one device: ``state`` of weights, gradients and AdamW's moments, ``whole`` of gathered weights at the peak."""

    state: int
    whole: int


def figures(setting: Setting) -> Iterator[Figure]:
    """State per device for each level, and the most that was whole at a time."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=setting.times(8, 4),
            num_attention_heads=6,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    )
    whole = held_by(model, "dp")
    layer, outside = _blocks(model)
    for zero in (3, 2, 1):
        held = held_by(model, "fsdp", zero)
        yield Figure(
            name=f"fsdp.state.zero{zero}",
            title=f"weights, gradients and AdamW state per device, fsdp={DEVICES} zero={zero}, to dp={DEVICES}",
            measured=held.state / whole.state,
            # Of four parts, weights, gradients and two moments, a quarter is left; below zero=2 gradients are whole.
            limit={3: 0.26, 2: 0.26, 1: 0.45}[zero],
            notes=(f"{whole.state / KIB:.0f} KiB -> {held.state / KIB:.0f} KiB, and {held.whole / KIB:.0f} KiB gathered",),
        )
        if zero == 3:
            yield Figure(
                name="fsdp.peak",
                title="most that is gathered at a time, to the model's own block and one layer",
                measured=held.whole / (layer + outside),
                limit=1.0,
                notes=(f"{held.whole / KIB:.0f} KiB; layer {layer / KIB:.0f} KiB, outside of layers {outside / KIB:.0f} KiB",),
            )


def held_by(model: nn.Module, axis: str, zero: int = 3) -> Held:
    """What a step of a copy of the model holds on the fullest device."""
    ids = torch.randint(0, 512, (2 * DEVICES, 16), generator=torch.Generator().manual_seed(SEED))
    with metered(GATHER) as (client, meter):
        copied = dtorch.parallelize(copy.deepcopy(model), init_device_mesh("cpu", DEVICES, mesh_dim_names=(axis,)), zero=zero)
        optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-3)
        copied(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        client.flush()
        state = list(copied.parameters())
        state += [p.grad for p in state] + [t for s in optimizer.state.values() for t in s.values()]
        return Held(sum(_most(t) for t in state if isinstance(t, dtorch.Tensor)), meter.most_marked)


def _most(tensor: dtorch.Tensor) -> int:
    """Bytes of a tensor on the device that has the most of it."""
    return max(shard.numel() for shard in tensor.shards) * tensor.element_size()


def _blocks(model: nn.Module) -> tuple[int, int]:
    """Bytes of a layer, and of what is in none."""
    modules, layers = dict(model.named_modules()), find_layers(model)
    of_layers = [sum(p.nbytes for p in modules[name].parameters()) for name in layers]
    return max(of_layers), sum(p.nbytes for p in model.parameters()) - sum(of_layers)
