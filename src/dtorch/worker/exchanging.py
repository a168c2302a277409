"""Exchanges of a plan: each target piece assembled from boxes of source pieces, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..communication import local as comm
from ..communication.local import Part
from ..communication.peers import Message, Peers
from ..communication.raw import blank, packed, scratch
from ..core.grid import Here, grid_of
from ..core.program import DefinePlan, Exchange
from .failing import PeerRefused, StepFailed, describe
from .meeting import not_empty

Slots = list[Any]
Box = tuple[int, Sequence[int], Sequence[int]]
"""(source piece, offset, size)."""


class ExchangeStep:
    """Assemble the target pieces that this worker holds, and send what others need for theirs.

    Attributes:
        peers: the other workers that take part.
    """

    def __init__(self, plan: DefinePlan, step: Exchange, here: Here, others: Peers, device: torch.device) -> None:
        self.step, self.others, self.device = step, others, device
        self.name, self.dtype = f"exchange for {plan.operator}", getattr(torch, step.dtype)
        self.source, self.target = grid_of(plan, step.source, here), grid_of(plan, step.output, here)
        self.sends: list[tuple[int, Box]] = []
        self.receives: list[tuple[int, Sequence[int]]] = []
        # For each target piece of this worker its parts; sources are numbered with what is received after the own pieces.
        self.parts: dict[int, list[Part]] = {piece: [] for piece in self.target.held}
        for piece, workers in enumerate(self.target.holders):
            for number, worker in enumerate(workers):
                for part in step.parts[piece]:
                    self._schedule(here.worker, worker, number, piece, part)
        self.peers = sorted({w for w, _ in self.sends} | {w for w, _ in self.receives})

    def _schedule(self, me: int, worker: int, number: int, piece: int, part: Part) -> None:
        """One part of a target piece that a worker makes."""
        source, offset, at, size = part
        holders = self.source.holders[source]
        giver = worker if worker in holders else holders[number % len(holders)]
        if worker == me == giver:
            self.parts[piece].append((self.source.places[source], offset, at, size))
        elif worker == me:
            self.parts[piece].append((len(self.source.held) + len(self.receives), [0] * len(size), at, size))
            self.receives.append((giver, size))
        elif giver == me:
            self.sends.append((worker, (self.source.places[source], offset, size)))

    def __call__(self, slots: Slots, scalars: list[Any]) -> None:
        """Read the source's slot, write the output's."""
        pieces, results = slots[self.step.source], []
        sources = [*pieces, *(self._meet(pieces) if self.peers else ())]
        try:
            for piece in self.target.held:
                shape = self.step.shapes[piece]
                results.append(comm.assemble(sources, self.parts[piece], shape, self.dtype, self.device, self.step.order))
        except Exception as error:
            c = len(results)
            used = [sources[p[0]] for p in self.parts[self.target.held[c]]]
            raise StepFailed(self.name, self.target.devices(c), describe(used)) from error
        slots[self.step.output] = results

    def refuse(self) -> None:
        """Take part without pieces."""
        if self.peers:
            self.others.refuse(self.peers)

    def _meet(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """What the others give."""
        order = self.step.order
        scratch.begin()
        try:
            boxes = [(w, packed(comm.box(pieces[p], offset, size), order)) for w, (p, offset, size) in self.sends]
            rooms = [(w, *blank(size, self.dtype, self.device, order)) for w, size in self.receives]
        except BaseException:
            self.refuse()
            raise
        receives: list[Message] = [(w, room) for w, _, room in rooms]
        refused = self.others.exchange(self.peers, not_empty(boxes), not_empty(receives))
        if refused:
            raise PeerRefused(refused)
        return [tensor for _, tensor, _ in rooms]
