"""Processes that are peers of one another and do as they are told: for tests of the peers themselves."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from dtorch.cluster.keys import Keys
from dtorch.communication.peers import PeerLost
from dtorch.communication.processes import ProcessPeers
from dtorch.transport.post import Post

CONTEXT: Any = multiprocessing.get_context("spawn")


def numbers(worker: int, peer: int, size: int) -> torch.Tensor:
    """What a worker sends to another."""
    return (torch.arange(size) * (worker + 3) + peer).to(torch.uint8)


def _run(me: int, workers: int, keys: dict[str, Any], alone: bool, link: Any) -> None:
    torch.set_num_threads(1)
    post = Post(me, "127.0.0.1", Keys(**keys).lock)
    peers = ProcessPeers(me, "127.0.0.1", post, 60.0, alone=alone)
    link.send((peers.sign, post.address))
    signs, addresses = zip(*link.recv(), strict=True)
    peers.introduce(signs)
    post.introduce(addresses)
    others = [w for w in range(workers) if w != me]
    while (job := link.recv()) is not None:
        kind, argument = job
        try:
            if kind == "exchange":
                rooms = [(w, torch.empty(n, dtype=torch.uint8)) for w in others for n in argument]
                refused = peers.exchange(others, [(w, numbers(me, w, n)) for w in others for n in argument], rooms)
                right = all(w in refused or torch.equal(t, numbers(w, me, len(t))) for w, t in rooms)
                link.send((right, refused))
            elif kind == "refuse":
                peers.refuse(others)
                link.send((True, set()))
            elif kind == "abort":
                threading.Timer(argument, peers.abort).start()
                link.send((True, set()))
        except PeerLost as lost:
            link.send((lost.peer, None))
    peers.close()


class Crew:
    """So many processes."""

    def __init__(self, workers: int, *, alone: bool) -> None:
        keys = msgspec.structs.asdict(Keys.generate())
        links = [CONTEXT.Pipe() for _ in range(workers)]
        self.links = [ours for ours, _ in links]
        self.processes = [CONTEXT.Process(target=_run, args=(n, workers, keys, alone, links[n][1])) for n in range(workers)]
        for process in self.processes:
            process.start()
        signs = [link.recv() for link in self.links]
        for link in self.links:
            link.send(signs)

    def tell(self, kind: str, argument: Any, *workers: int) -> None:
        """Give a job to some."""
        for worker in workers:
            self.links[worker].send((kind, argument))

    def answers(self, *workers: int) -> list[Any]:
        """What some answer."""
        heard = []
        for worker in workers:
            assert self.links[worker].poll(30), f"worker {worker} does not answer"
            heard.append(self.links[worker].recv())
        return heard


@contextmanager
def crew(workers: int, *, alone: bool = False) -> Iterator[Crew]:
    """Processes that are peers, for a while."""
    made = Crew(workers, alone=alone)
    try:
        yield made
    finally:
        for link, process in zip(made.links, made.processes, strict=True):
            if process.is_alive():
                link.send(None)
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
            link.close()
