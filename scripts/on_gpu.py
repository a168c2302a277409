"""A pytest plugin for ``gpu_check.sh``: the tests' meshes lie on simulated devices of the GPU, the oracle stays on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import dtorch
from tests.sharding import harness

DEVICES = 64
DEVICE = "cuda"

_to_torch = dtorch.Tensor.to_torch


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported, put the device into what they import."""
    dtorch.init(simulate={DEVICE: DEVICES})
    harness.init_device_mesh = _mesh
    dtorch.Tensor.to_torch = _read


def _mesh(device_type: str, shape: Sequence[int], **options: object) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh(DEVICE, shape, **options)


def _read(tensor: dtorch.Tensor) -> torch.Tensor:
    return _to_torch(tensor).cpu()
