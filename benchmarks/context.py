"""``python -m benchmarks.context``: what attention over a split sequence takes of each device, by number of devices.

Of memory the largest single allocation in forward and backward, and the peak beyond the inputs, each device's share of it,
for all are simulated in one process. Bytes that all devices receive. The work of the busiest device under a causal mask,
as the pieces lie and in zig-zag. Every number is counted, not timed, so a run gives the same on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

import dtorch
from dtorch import Shard, init_device_mesh
from dtorch.core.placements import balanced, starts
from dtorch.sharding.rules.blocks import blocks, zigzag
from dtorch.sharding.rules.laid import Runs

from .setting import SEED

HEADS, LENGTH, FEATURES = 8, 4096, 64
DEVICES = (1, 2, 4, 8)
KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the largest single allocation, and at the peak beyond what there was before."""

    largest: int
    peak: int


def memory_of(work: Callable[[], object]) -> Memory:
    """What a piece of work allocates, kernels' own buffers included."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    sizes = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return Memory(largest=max(sizes), peak=max(accumulate(sizes)))


def attention(axis: str, devices: int) -> tuple[Memory, int]:
    """Memory of a causal attention with gradients, all devices together, and bytes that they receive."""
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=(axis,))
    options = {"device_mesh": mesh, "placements": [Shard(2)]}
    q, k, v = (dtorch.randn(1, HEADS, LENGTH, FEATURES, **options).requires_grad_() for _ in range(3))

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        dtorch.session().flush()

    with dtorch.explain() as report:
        # Twice, for the first run also makes the plans and the gradients' memory.
        step()
    return memory_of(step), report.nbytes


def busiest(runs: Sequence[Runs]) -> float:
    """Work of the busiest device under a causal mask, to the mean."""
    n = len(runs)
    work = [sum(b.work for s in range(n) for b in blocks(runs[i], runs[(i - s) % n], True)) for i in range(n)]
    return max(work) * n / sum(work)


def lines() -> Iterator[str]:
    """The table, line by line."""
    whole = 2 * HEADS * LENGTH * FEATURES * 4 // KIB
    yield f"causal attention with gradients, {HEADS} heads, {LENGTH} positions, {FEATURES} features, float32, seed {SEED}"
    yield f"keys and values together are {whole:,} KiB, which a device would hold were they gathered"
    titles = f"{'largest tensor':>18}{'peak a device':>18}{'received':>18}{'busiest, as is':>16}{'zig-zag':>9}"
    yield f"{'axis':<12}{'devices':>8}{titles}"
    for axis in ("ring_cp", "ulysses_cp"):
        for devices in DEVICES:
            memory, received = attention(axis, devices)
            figures = (memory.largest, memory.peak // devices, received)
            yield f"{axis:<12}{devices:>8}" + "".join(f"{n // KIB:>14,} KiB" for n in figures) + work(axis, devices)


def work(axis: str, devices: int) -> str:
    """Work of the busiest device of a ring to the mean, as the pieces lie and in zig-zag."""
    if axis != "ring_cp":
        return ""
    pieces = balanced(LENGTH, devices)
    plain = busiest([[(a, n)] for a, n in zip(starts(pieces), pieces, strict=True)])
    return f"{plain:>15.2f}x{busiest(zigzag(LENGTH, devices)):>8.2f}x"


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    for line in lines():
        print(line, flush=True)
    dtorch.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
