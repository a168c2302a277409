"""The other side of figures of worker processes: programs of ``torch.distributed``, one process per rank, that run on demand."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

END_S = 10.0
"""How long ranks may take to end."""

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
        # So that the end of a rank is seen at ours.
        for _, theirs in links:
            theirs.close()

    def run(self, name: str = "run", times: int = 1) -> float:
        """Seconds for so many runs in a row, of the slowest rank.

        Raises:
            EOFError, ConnectionError: a rank has failed.
        """
        for link in self._links:
            link.send((name, times))
        return max(self._answers())

    def answer(self, name: str) -> Any:
        """What the job of rank 0 gives."""
        for link in self._links:
            link.send((name, 0))
        return self._answers()[0]

    def close(self) -> None:
        """End the processes; at once those that wait for one that has failed."""
        for link in self._links:
            with suppress(ConnectionError):
                link.send(None)
        for process in self._processes:
            process.join(END_S)
            process.kill()
            process.join()
        for link in self._links:
            link.close()
        self._directory.cleanup()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._links):
            for link in wait([link for link in self._links if link not in answers]):
                assert isinstance(link, Connection)
                answers[link] = link.recv()
        return [answers[link] for link in self._links]


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
