"""The peer's side of ``benchmarks.monarch``, run by an environment that has Monarch and not dtorch."""

from __future__ import annotations

import json
import time

import torch

LOOP = 200
ROUNDS = 10


def measured() -> list[tuple[float, float]]:
    """Seconds by the clock and of processor time that the client takes for an 8x8 add, on one worker process."""
    from monarch import fetch_shard
    from monarch.actor import this_host
    from monarch.mesh_controller import spawn_tensor_engine

    taken, mesh = [], spawn_tensor_engine(this_host().spawn_procs(per_host={"gpus": 1}))
    with mesh.activate():
        a = b = torch.ones(8, 8)
        for _ in range(ROUNDS + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(LOOP):
                c = a + b
            taken.append(((time.perf_counter() - wall) / LOOP, (time.process_time() - cpu) / LOOP))
            fetch_shard(c).result()
    mesh.exit()
    return taken[1:]


if __name__ == "__main__":
    print(json.dumps(measured()))
