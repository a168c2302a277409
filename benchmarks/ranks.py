"""The other side of figures of worker processes: programs of ``torch.distributed``, one process per rank, that run on demand."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Job = Callable[[str], Any]
"""One run of what is measured, by name."""


class Ranks:
    """Processes with a gloo group of all, each with a job."""

    def __init__(self, workers: int, threads: int, make: Callable[..., Job], *args: Any) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        place = str(Path(self._directory.name) / "rendezvous")
        links = [context.Pipe() for _ in range(workers)]
        self._links = [ours for ours, _ in links]
        self._processes = [
            context.Process(target=_rank, args=(n, workers, threads, place, links[n][1], make, args)) for n in range(workers)
        ]
        for process in self._processes:
            process.start()

    def run(self, name: str = "run", times: int = 1) -> float:
        """Seconds for so many runs in a row, of the slowest rank."""
        for link in self._links:
            link.send((name, times))
        return max(link.recv() for link in self._links)

    def answer(self, name: str) -> Any:
        """What the job of rank 0 gives."""
        for link in self._links:
            link.send((name, 0))
        first, *_ = [link.recv() for link in self._links]
        return first

    def close(self) -> None:
        """End the processes."""
        for link in self._links:
            link.send(None)
        for process in self._processes:
            process.join()
        self._directory.cleanup()


@contextmanager
def ranks(workers: int, threads: int, make: Callable[..., Job], *args: Any) -> Iterator[Ranks]:
    """Processes for a while; ``make`` is called in each with its rank, how many there are, and ``args``."""
    made = Ranks(workers, threads, make, *args)
    try:
        yield made
    finally:
        made.close()


def _rank(number: int, workers: int, threads: int, place: str, link: Any, make: Callable[..., Job], args: Any) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=workers)
    job = make(number, workers, *args)
    while (told := link.recv()) is not None:
        name, times = told
        if not times:
            link.send(job(name))
            continue
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            job(name)
        link.send(time.perf_counter() - began)
    dist.destroy_process_group()
