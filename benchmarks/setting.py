"""``Setting``: what a run was asked for, and how both sides wait for their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, init_device_mesh
from dtorch.core.program import Barrier

SEED = 0
"""Of all random weights and inputs."""

MOST_DEVICES = 512
"""Logical devices of the largest mesh that is measured."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run was asked for.

    Attributes:
        device: device type of both sides.
        threads: threads of PyTorch's operators, equal on both sides since both run in this process.
        quick: few repetitions, to see that everything works.
    """

    device: str = "cpu"
    threads: int = 1
    quick: bool = False

    def start(self) -> None:
        """Fix threads and seed, and start a session that holds the largest mesh."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(SEED)
        dtorch.init(simulate={self.device: MOST_DEVICES} if self.device != "cpu" else None)

    def times(self, full: int, quick: int) -> int:
        """A number of repetitions."""
        return quick if self.quick else full

    def mesh(self, shape: Sequence[int] = (1,), names: Sequence[str] | None = None) -> DeviceMesh:
        """A mesh of the measured device type."""
        return init_device_mesh(self.device, tuple(shape), mesh_dim_names=names)

    def plain(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Work on plain PyTorch that ends when the device has done it."""

        def run() -> None:
            work()
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run

    def ours(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Work on dtorch that ends when the workers have done it."""

        def run() -> None:
            work()
            finish()

        return run


def finish() -> None:
    """Wait until the workers have run everything that was issued and forgotten what was freed."""
    client = dtorch.session()
    client.flush()
    client.request(Barrier())
