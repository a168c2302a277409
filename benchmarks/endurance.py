"""``python -m benchmarks.endurance``: how soon a lost worker is told, what many starts leave behind, and what a long run keeps.

Seeds are printed. The exit status is 0 where the figure is where it must be.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import dtorch
from dtorch import Replicate, Shard, WorkerLost, init_device_mesh
from dtorch.core.program import Barrier

WORKERS = 2


def kill(times: int, seed: int) -> bool:
    """Seconds from ``kill -9`` of a worker, while the client works or waits, to the exception in the client."""
    chosen, taken = random.Random(seed), []
    for _ in range(times):
        dtorch.init(workers=WORKERS)
        x = dtorch.ones(64, device_mesh=init_device_mesh("cpu", WORKERS), placements=[Shard(0)])
        x.sum().item()
        victim, at = chosen.choice(_workers()), [0.0]

        def strike(victim: psutil.Process = victim, at: list[float] = at) -> None:
            at[0] = time.monotonic()
            victim.kill()

        timer = threading.Timer(chosen.random() * 0.2, strike)
        timer.start()
        try:
            while True:
                x.sum().item()
        except WorkerLost:
            taken.append(time.monotonic() - at[0])
        timer.join()
        dtorch.shutdown()
        print(f"  {taken[-1] * 1e3:.0f} ms", file=sys.stderr, flush=True)
    median, worst = statistics.median(taken), max(taken)
    print(f"kill -9 to the exception, {times} times: median {median * 1e3:.0f} ms, worst {worst:.2f} s (<= 3 s)")
    return worst <= 3


def _end_in_order() -> None:
    dtorch.shutdown()


def _kill_a_worker(number: int) -> None:
    _workers()[number % WORKERS].kill()
    dtorch.shutdown()


def _freeze_a_worker(number: int) -> None:
    _workers()[number % WORKERS].suspend()
    dtorch.shutdown()


def _kill_the_controller() -> None:
    (controller,) = psutil.Process().children()
    controller.kill()
    dtorch.shutdown()


def _fail_and_end() -> None:
    x = dtorch.ones(4, dtype=torch.int64, device_mesh=init_device_mesh("cpu", WORKERS), placements=[Shard(0)])
    x // 0
    dtorch.shutdown()


def _reset_and_end(number: int) -> None:
    _workers()[number % WORKERS].kill()
    dtorch.session().reset()
    dtorch.ones(4, device_mesh=init_device_mesh("cpu", WORKERS), placements=[Shard(0)]).sum().item()
    dtorch.shutdown()


def cycles(times: int, seed: int) -> bool:
    """What starts, faults and ends leave behind: processes, threads, descriptors, files."""
    chosen = random.Random(seed)
    faults: list[tuple[str, Callable[[], None]]] = [
        ("shutdown", _end_in_order),
        ("worker killed", lambda: _kill_a_worker(chosen.randrange(WORKERS))),
        ("worker frozen", lambda: _freeze_a_worker(chosen.randrange(WORKERS))),
        ("controller killed", _kill_the_controller),
        ("operator fails", _fail_and_end),
        ("killed, reset", lambda: _reset_and_end(chosen.randrange(WORKERS))),
    ]
    _cycle(_end_in_order)
    before, counts = _held(), dict.fromkeys([name for name, _ in faults], 0)
    for number in range(times):
        name, fault = chosen.choice(faults)
        counts[name] += 1
        _cycle(fault)
        print(f"  {number + 1}: {name}", file=sys.stderr, flush=True)
    left = {what: after - before[what] for what, after in _held().items()}
    print(f"{times} starts and ends of {WORKERS} workers, {counts}: left behind {left} (0 of each)")
    return not any(n > 0 for n in left.values())


def _cycle(end: Callable[[], None]) -> None:
    dtorch.init(workers=WORKERS)
    x = dtorch.ones(6, device_mesh=init_device_mesh("cpu", WORKERS), placements=[Shard(0)])
    x.redistribute(placements=[Replicate()]).sum().item()
    end()


def soak(operators: int, seed: int) -> bool:
    """Memory of client, controller and workers after many operators, to what it was after the first 10,000."""
    torch.manual_seed(seed)
    client = dtorch.init(workers=WORKERS)
    mesh = init_device_mesh("cpu", WORKERS)
    x = dtorch.randn(32, 8, device_mesh=mesh, placements=[Shard(0)])
    weight = dtorch.randn(8, 8, device_mesh=mesh)
    done, first = 0, {}
    began = time.monotonic()
    while done < operators:
        y = x
        for _ in range(50):
            y = torch.relu(y @ weight) / 3 + x
        y.sum().item()
        done += 50 * 4 + 1
        if not first and done >= 10_000:
            client.request(Barrier())
            first = _memory()
    client.request(Barrier())
    last = _memory()
    dtorch.shutdown()
    grown = {name: last[name] / first[name] - 1 for name in first}
    print(f"{done:,} operators in {time.monotonic() - began:.0f} s on {WORKERS} workers, memory after them to that after 10,000:")
    for name, part in grown.items():
        print(f"  {name}: {first[name] >> 20} MiB -> {last[name] >> 20} MiB, {part:+.1%} (<= +5 %)")
    return max(grown.values()) <= 0.05


def _memory() -> dict[str, int]:
    processes = {"client": psutil.Process(), "controller": psutil.Process().children()[0]}
    processes |= {f"worker {n}": p for n, p in enumerate(_workers())}
    return {name: process.memory_info().rss for name, process in processes.items()}


def _workers() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return sorted((p for p in found if "dtorch.process" in " ".join(p.cmdline())), key=lambda p: p.pid)


def _held() -> dict[str, int]:
    files = len(list(Path(tempfile.gettempdir()).glob("dtorch*"))) + len(list(Path("/dev/shm").glob("*dtorch*")))
    descriptors = psutil.Process().num_fds()
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "threads": threading.active_count(),
        "descriptors": descriptors,
        "files": files,
    }


COMMANDS: dict[str, tuple[Callable[[int, int], bool], int]] = {
    "kill": (kill, 20),
    "cycles": (cycles, 200),
    "soak": (soak, 1_000_000),
}


def main() -> int:
    """Measure one."""
    parser = ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--times", type=int, help="how often, or how many operators")
    parser.add_argument("--seed", type=int, default=0)
    given: Any = parser.parse_args()
    torch.set_num_threads(1)
    run, times = COMMANDS[given.what]
    print(f"seed {given.seed}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    # Ctrl-C ends what was started as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return 0 if run(given.times or times, given.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
