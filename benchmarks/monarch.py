"""``make bench-monarch``: client time of a small operator beside Monarch's tensor engine, which has an environment of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch

import dtorch
from dtorch import init_device_mesh
from dtorch.core.program import Barrier

ROUNDS = 10
LOOP = 4000
AT_LEAST = 50.0


def ours() -> list[tuple[float, float]]:
    """Seconds by the clock and of processor time that the client takes for an 8x8 add, on one worker process."""
    client = dtorch.init(workers=1)
    a = b = dtorch.ones(8, 8, device_mesh=init_device_mesh("cpu", 1))
    taken = []
    for _ in range(ROUNDS + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(LOOP):
            a + b
        client.flush()
        taken.append(((time.perf_counter() - wall) / LOOP, (time.process_time() - cpu) / LOOP))
        client.request(Barrier())
    dtorch.shutdown()
    return taken[1:]


def main() -> int:
    """Measure both, each half before and half after the other."""
    parser = ArgumentParser(prog="python -m benchmarks.monarch", description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with torchmonarch")
    given: Any = parser.parse_args()
    torch.set_num_threads(1)
    mine, peer = ours(), _peer(given.python)
    mine, peer = mine + ours(), peer + _peer(given.python)
    short = False
    for what, at in (("by the clock", 0), ("processor time", 1)):
        own, other = (statistics.median(pair[at] for pair in side) * 1e6 for side in (mine, peer))
        short = short or other / own < AT_LEAST
        sides = f"Monarch {other:.0f} us, dtorch {own:.1f} us: {other / own:.0f}x (>= {AT_LEAST:.0f}x)"
        print(f"client time of an 8x8 add, {what}: {sides}")
    return int(short)


def _peer(python: str) -> list[tuple[float, float]]:
    program = Path(__file__).with_name("monarch_peer.py")
    answer = subprocess.run([python, "-P", str(program)], check=True, capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
