"""One case: an operator's variant on one sample under one placement of each tensor, written as text that reruns it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ...core.errors import UsageError, four_parts
from ...core.placements import Partial, Placement, Placements, Replicate, Shard

MESHES: tuple[tuple[int, ...], ...] = ((3,), (4,), (2, 2))
VARIANTS = ("forward", "backward", "inplace", "inplace_backward", "out")
MAIN_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
"""The first of these that an operator takes is tried in all placements."""
OTHER_DTYPES = (torch.int64, torch.bool, torch.bfloat16, torch.complex64)
"""Tried replicated and under one sharded placement."""

_TOKEN = re.compile(r"R|P|S\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is run and compared at once.

    Attributes:
        variant: one of ``VARIANTS``.
        dtype: name of the sample's dtype.
        sample: number among the operator's samples of that dtype.
        placements: of each distinct tensor of the sample, in order, then of each ``out=`` tensor.
    """

    variant: str
    dtype: str
    mesh: tuple[int, ...]
    sample: int
    placements: tuple[Placements, ...]

    @property
    def sharded(self) -> bool:
        """Whether any tensor is not replicated."""
        return any(not isinstance(p, Replicate) for row in self.placements for p in row)

    def __str__(self) -> str:
        placed = ",".join("".join(map(_token, row)) for row in self.placements) or "-"
        return f"{self.variant}:{self.dtype}:{mesh_text(self.mesh)}:{self.sample}:{placed}"


def mesh_text(mesh: tuple[int, ...]) -> str:
    """A mesh shape as text, e.g. ``2x2``."""
    return "x".join(map(str, mesh))


def parse_case(text: str) -> Case:
    """The case that was written as this text.

    Raises:
        UsageError: no text of a case.
    """
    try:
        variant, dtype, mesh, sample, placed = text.split(":")
        rows = [] if placed == "-" else placed.split(",")
        placements = tuple(tuple(_placement(token) for token in _TOKEN.findall(row)) for row in rows)
        case = Case(
            variant=variant,
            dtype=dtype,
            mesh=tuple(int(n) for n in mesh.split("x")),
            sample=int(sample),
            placements=placements,
        )
    except ValueError:
        case = None
    if case is None or str(case) != text or variant not in VARIANTS or not isinstance(getattr(torch, dtype, None), torch.dtype):
        rule = "a case is variant:dtype:mesh:sample:placements, e.g. forward:float32:2x2:0:S0R,RP"
        raise UsageError(four_parts(f"case {text!r}", rule, "--case", "copy it from a failure's command"))
    return case


def _token(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


def _placement(token: str) -> Placement:
    if token == "R":
        return Replicate()
    return Partial() if token == "P" else Shard(int(token[1:]))
