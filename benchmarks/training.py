"""Worker processes: a data-parallel training step, beside PyTorch's DistributedDataParallel on as many processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dtorch
from dtorch import Shard, init_device_mesh

from .figure import Figure
from .processes import beside, session
from .ranks import ranks
from .setting import SEED, Setting

WORKERS, SAMPLES, STEPS = 2, 128, 3
WIDTHS = (784, 2048, 2048, 2048, 10)
TOLERANCE = 1e-4


def figures(setting: Setting) -> Iterator[Figure]:
    """Time of a step of AdamW, forward and backward included, to DDP's."""
    inputs, labels = batch()
    with ranks(WORKERS, setting.threads, ddp) as peer, session(WORKERS) as client:
        mesh = init_device_mesh("cpu", WORKERS, mesh_dim_names=("dp",))
        model = dtorch.parallelize(network(), mesh)
        placed = (dtorch.Tensor(t, device_mesh=mesh, placements=[Shard(0)]) for t in (inputs, labels))
        step = trainer(model, *placed)
        steps, theirs = lambda: [step() for _ in range(STEPS)], lambda: peer.run(times=STEPS)
        pairs, issued_s = beside(client, steps, theirs, setting.times(12, 3))
        # As many steps were made of both.
        error = abs(step().item() / peer.answer("loss") - 1)
        assert error < TOLERANCE, f"the losses differ by {error:.1e}"
    count = sum(p.numel() for p in network().parameters())
    yield Figure(
        name="training.ddp_2",
        title=f"AdamW step of {count / 1e6:.1f}M parameters, dp={WORKERS} in processes, {SAMPLES} samples, to DDP with gloo",
        measured=pairs.ratio,
        limit=1.15,
        spread=pairs.spread,
        notes=(
            f"{pairs.times(1e-3, 'ms', STEPS)} a step; threads: {setting.threads}; losses equal to {error:.0e}",
            f"the client takes {issued_s / STEPS * 1e3:.1f} ms of processor time a step",
        ),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of all workers."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(SAMPLES, WIDTHS[0], generator=generator), torch.randint(0, WIDTHS[-1], (SAMPLES,), generator=generator)


def network() -> nn.Sequential:
    """Linear layers with ReLU between them, the same ones each time."""
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(WIDTHS[:-1])]
    return nn.Sequential(*layers, nn.Linear(*WIDTHS[-2:]))


def trainer(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step; its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(rank: int, workers: int) -> Callable[[str], Any]:
    """A rank of the other side."""
    inputs, labels = (t.chunk(workers)[rank].clone() for t in batch())
    step = trainer(DistributedDataParallel(network()), inputs, labels)

    def run(name: str) -> Any:
        loss = step()
        if name == "run":
            return None
        # Each has the mean over its own samples.
        dist.all_reduce(loss)
        return loss.item() / workers

    return run
