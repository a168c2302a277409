"""The two sides on which a line runs: what ``given``, ``make``, ``move`` and ``grads`` mean on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import dtorch

from ... import Partial, Replicate, Shard, init_device_mesh
from ...core.placements import Placement, Placements
from ...core.spec import Spec


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers of both signs in any dtype: sums and products of few of them are exact."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-4, 5, tuple(shape), generator=source)
    if dtype is torch.bool:
        return numbers > 0
    if dtype.is_complex:
        return torch.complex(numbers.float(), torch.randint(-4, 5, tuple(shape), generator=source).float()).to(dtype)
    return numbers.to(dtype)


def grads(outs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a weighted sum of the squares of ``outs`` with respect to ``leaves``; None where there is none."""
    loss = sum((_square(t) * _weights(t)).sum() for t in outs)
    assert isinstance(loss, torch.Tensor)
    found = torch.autograd.grad(loss, list(leaves), allow_unused=True)
    # Whether two gradients share memory is nobody's promise.
    return tuple(None if g is None else g.clone() for g in found)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * tensor.conj()).real.double() if tensor.is_complex() else tensor.double() * tensor.double()


def _weights(like: torch.Tensor) -> torch.Tensor:
    return (torch.arange(like.numel()) % 5 + 1).double().view(like.shape)


def _usable(tensor: torch.Tensor) -> bool:
    """Autograd disowns one of several views at once when another or the base is written: it can't even be read then."""
    try:
        return tensor.is_leaf or True
    except RuntimeError:
        return False


class Plain:
    """Plain PyTorch. Placements are accepted and mean nothing."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "torch": torch,
            "Shard": Shard,
            "Replicate": Replicate,
            "Partial": Partial,
            "grads": grads,
            "given": self.given,
            "make": self.make,
            "move": self.move,
        }

    def run(self, line: str) -> None:
        """Run a line; raises what it raises."""
        exec(line, self.names)

    def tensors(self) -> dict[str, Any]:
        """Every live tensor by name, and gradients that are None."""
        return {k: v for k, v in self.names.items() if v is None or (isinstance(v, torch.Tensor) and _usable(v))}

    def given(
        self, shape: Sequence[int], dtype: torch.dtype, seed: int, placements: Sequence[Placement], grad: bool = False
    ) -> torch.Tensor:
        """An input with the numbers of ``values``."""
        return values(shape, dtype, seed).requires_grad_(grad)

    def make(self, factory: str, *args: Any, placements: Sequence[Placement], **options: Any) -> torch.Tensor:
        """What a factory function of that name makes."""
        return getattr(torch, factory)(*args, **options)

    def move(self, tensor: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        """The tensor elsewhere, with memory of its own."""
        return tensor.clone()


class Global(Plain):
    """Global tensors on a CPU mesh."""

    def __init__(self, mesh: Sequence[int]) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", tuple(mesh))

    def given(
        self, shape: Sequence[int], dtype: torch.dtype, seed: int, placements: Sequence[Placement], grad: bool = False
    ) -> torch.Tensor:
        """The same numbers under these placements; where partial, the parts are all different."""
        return place(values(shape, dtype, seed), self.mesh, tuple(placements)).requires_grad_(grad)

    def make(self, factory: str, *args: Any, placements: Sequence[Placement], **options: Any) -> torch.Tensor:
        """The same, made under these placements."""
        return getattr(dtorch, factory)(*args, device_mesh=self.mesh, placements=placements, **options)

    def move(self, tensor: Any, placements: Sequence[Placement]) -> torch.Tensor:
        """Redistributed."""
        moved = tensor.redistribute(placements=placements)
        shares = moved._value is tensor._value or moved._value.group is not None
        return moved.clone() if shares else moved


def place(tensor: torch.Tensor, mesh: dtorch.DeviceMesh, placements: Placements) -> dtorch.Tensor:
    """A global tensor of this value. Parts of a partial one are all different, so a rule that ignores them shows."""
    spec = Spec.make(mesh, placements, tensor.shape, tensor.dtype)
    parts: dict[tuple[int, ...], torch.Tensor] = {(): tensor}
    axes = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]
    for axis in axes:
        placement = spec.placements[axis]
        assert isinstance(placement, Partial)
        k = mesh.shape[axis]
        parts = {(*at, i): part for at, t in parts.items() for i, part in enumerate(_parts(t, placement.reduce_op, k, axis))}

    def local(coord: tuple[int, ...]) -> torch.Tensor:
        offset, size = spec.local_box(coord)
        whole = parts[tuple(coord[a] for a in axes)]
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]

    return dtorch.from_local(local, mesh, spec.placements)


def _parts(whole: torch.Tensor, op: str, k: int, seed: int) -> list[torch.Tensor]:
    """k integers each that reduce to those of ``whole``."""
    if k == 1:
        return [whole]
    noise = [values(whole.shape, whole.dtype, 11 + seed * 10 + i) for i in range(k - 1)]
    if whole.dtype is torch.bool:
        every = op in ("min", "prod")
        return [*(n | whole if every else n & whole for n in noise), whole]
    if op == "sum":
        return [*noise, whole - sum(noise)]
    if op == "avg":
        return [*(whole + n for n in noise), whole - sum(noise)]
    if op == "prod":
        sign = 1 - 2 * (k % 2 == 0)
        return [whole * sign, *[-torch.ones_like(whole)] * (k - 1)]
    up = noise[0].abs() * (-1 if op == "max" else 1)
    return [whole if i == 1 else whole + up * (1 + i % 2) for i in range(k)]
