"""SmolLM2-135M-Instruct with its real weights: the demo's model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh
from dtorch.demo.model import load_model

VOCABULARY = 49152


@functools.cache
def plain(device: str) -> Any:
    """The model on plain PyTorch, in float32; loaded once."""
    return load_model().model.to(device)


@functools.cache
def distributed(mesh: DeviceMesh) -> Any:
    """The model on a mesh; made once for each."""
    return dtorch.parallelize(copy.deepcopy(plain(mesh.device_type)), mesh)


def prompt(length: int, device: str, samples: int = 1) -> torch.Tensor:
    """Token ids ``(samples, length)`` without meaning, the same in every run."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCABULARY, (samples, length), generator=generator).to(device)
