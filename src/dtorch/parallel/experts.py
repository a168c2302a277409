"""The axes ``ep`` and ``tp``: experts on devices of their own, and tokens sent to them.

A module of experts holds the weights of all of them, one after the other along dim 0, and is given tokens with the numbers
and weights of the experts that each has chosen. On a mesh with one of these axes a device holds some of the experts, whole,
and where there are both they are spread over both. The module's own ``forward`` runs on each device with the
experts that are there, so what an expert computes is left to the model.

Tokens that are split over ``ep`` go to the devices that have their experts, in one all-to-all, and what those make of them
comes back in another. Tokens that every device has stay, as they do along ``tp``: each device adds what its experts make of
them, which gives partial sums.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.mesh import DeviceMesh, coordinates
from ..core.placements import REPLICATE, Partial, Placements, Shard
from ..core.spec import Spec
from ..sharding.rows import Counts, answered, lines
from ..tensor.mapped import local_map
from ..tensor.moving import fetch_pieces
from ..tensor.rows import rows_sent
from ..tensor.tensor import Tensor
from .axes import EXPERT, TENSOR

SIGNATURES: Collection[tuple[str, ...]] = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
"""What a ``forward`` of experts takes after the tokens: for each token numbers of experts, and the weights of their results."""

ALIGNED_NBYTES = 16
"""What the kernels of grouped products want addresses to be multiples of."""


def are_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts: by what it is called with, and by the dim 0 of all that it holds."""
    count = getattr(module, "num_experts", None)
    tensors = [*module.parameters(), *module.buffers()]
    own = [p for p in module._parameters.values() if p is not None]
    alike = bool(own) and len(own) == len(tensors) and all(p.ndim > 1 and p.shape[0] == count for p in own)
    return alike and tuple(inspect.signature(type(module).forward).parameters)[2:] in SIGNATURES


def spread_experts(module: nn.Module, specs: Mapping[str, Spec]) -> list[Any]:
    """Have every module of experts whose weights are spread over devices called where they are; gives handles to undo it."""
    handles = []
    for name, part in module.named_modules():
        if are_experts(part):
            own = [specs[f"{name}.{n}" if name else n] for n, p in part._parameters.items() if p is not None]
            axes = _spread_axes(own)
            if axes:
                handles.append(Experts(part, own[0], axes))
    return handles


def _spread_axes(specs: list[Spec]) -> tuple[int, ...]:
    """The axes that split experts from each other, alike in all weights; none where another axis does so too."""
    cuts = {tuple((a, p) for a, p in enumerate(s.placements) if isinstance(p, Shard) and p.dim == 0) for s in specs}
    axes = tuple(a for a, _ in next(iter(cuts))) if len(cuts) == 1 else ()
    names = [specs[0].mesh.axis_names()[a] for a in axes]
    return tuple(a for a in axes if specs[0].mesh.shape[a] > 1) if set(names) <= {EXPERT, TENSOR} else ()


class Experts:
    """Stands in for the ``forward`` of a module of experts, and is the handle that takes it away.

    Args:
        module: the experts.
        spec: of one of its weights.
        axes: the mesh axes that split experts from each other.
    """

    def __init__(self, module: nn.Module, spec: Spec, axes: tuple[int, ...]) -> None:
        self.module, self.mesh, self.axes = module, spec.mesh, axes
        self.axis = next((a for a in axes if spec.mesh.axis_names()[a] == EXPERT), None)
        self.weights: Placements = tuple(p if a in axes else REPLICATE for a, p in enumerate(spec.placements))
        self.numbers = Tensor(torch.arange(spec.shape[0]), device_mesh=spec.mesh, placements=self.weights)
        self.homes = () if self.axis is None else _homes(self.numbers._spec, self.axis)
        self.travel = sorted(range(len(self.homes)), key=lambda expert: (self.homes[expert], expert))
        module.forward = self

    def remove(self) -> None:
        """Let the module's own ``forward`` stand again."""
        if self.module.__dict__.get("forward") is self:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        tokens, index, weights = tuple(bound.arguments.values())[1:]
        if index is None or weights is None or index.shape != weights.shape or index.ndim != 2:
            return type(self.module).forward(self.module, *bound.args[1:])
        placements = self._data_placements(tokens)
        given = [_placed(t, self.mesh, placements) for t in (tokens, index, weights)]
        if self.axis is not None and isinstance(placements[self.axis], Shard):
            return self._sent(self.axis, *given)
        return self._summed(*given)

    def _data_placements(self, tokens: Any) -> Placements:
        """Tokens stay split as they are along dim 0, but for an axis that splits experts and along which none travel."""
        if not isinstance(tokens, Tensor) or tokens.device_mesh is not self.mesh:
            return (REPLICATE,) * self.mesh.ndim
        split = {a for a, p in enumerate(tokens.placements) if isinstance(p, Shard) and p.dim == 0}
        kept = {a for a in split if a == self.axis or a not in self.axes}
        return tuple((p if kept == split else Shard(0)) if a in kept else REPLICATE for a, p in enumerate(tokens.placements))

    def _summed(self, tokens: Any, index: Any, weights: Any) -> Any:
        """Every device's experts take of the tokens before it what is theirs; their results are partial sums."""
        run = local_map(
            _Share(self.module),
            [tokens.placements, index.placements, weights.placements, self.weights, *self._held()],
            [Partial() if a in self.axes else p for a, p in enumerate(tokens.placements)],
        )
        return run(tokens, index, weights, self.numbers, *self._parameters())

    def _sent(self, axis: int, tokens: Any, index: Any, weights: Any) -> Any:
        """Tokens travel along an axis to the devices of their experts, once for each expert there, and the results back."""
        at, choices = tokens.placements, index.shape[1]
        order, table = local_map(_Sorting(self.travel), [at], [at, at])(index)
        found = [piece[0].tolist() for piece in fetch_pieces(table)]
        there = order._spec
        counts: Counts = tuple(tuple(self._to(row, device) for device in range(self.mesh.shape[axis])) for row in found)
        rows = local_map(_repeated, [at, there.placements, None], there.placements)(tokens, order, choices)
        made = self._made(rows_sent(rows, axis, counts), self._come(axis, found, there))
        back = rows_sent(made, axis, answered(there, axis, counts))
        return local_map(_combined, [back.placements, there.placements, at], at)(back, order, weights)

    def _to(self, row: Sequence[int], device: int) -> int:
        """Of the rows that a piece has for each expert, how many go to a device along the axis."""
        return sum(n for n, expert in zip(row, self.travel, strict=True) if self.homes[expert] == device)

    def _come(self, axis: int, found: Sequence[Sequence[int]], spec: Spec) -> Any:
        """For each piece, how many rows have come to it, by sender and then by expert, in the order of travel."""
        homes = [self.homes[expert] for expert in self.travel]
        table = [
            [n * (home == at) for sender in line for n, home in zip(found[sender], homes, strict=True)]
            for line, at in lines(spec, axis)
        ]
        placements = [Shard(0) if isinstance(p, Shard) else p for p in spec.placements]
        return Tensor(torch.tensor(table), device_mesh=self.mesh, placements=placements)

    def _made(self, rows: Any, table: Any) -> Any:
        """What the experts make of rows that have arrived."""
        within = [Partial() if a in self.axes and a != self.axis else p for a, p in enumerate(rows.placements)]
        ins = [rows.placements, table.placements, self.weights, *self._held()]
        run = local_map(_Arrived(self.module, self.travel), ins, within)
        return run(rows, table, self.numbers, *self._parameters()).redistribute(placements=rows.placements)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in self.module._parameters.values() if p is not None]

    def _held(self) -> list[Placements]:
        return [self.weights] * len(self._parameters())


def _placed(tensor: Any, mesh: DeviceMesh, placements: Placements) -> Any:
    if not isinstance(tensor, Tensor):
        return Tensor(tensor, device_mesh=mesh, placements=placements)
    return tensor.redistribute(mesh, placements)


def _homes(numbers: Spec, axis: int) -> tuple[int, ...]:
    """For each expert, the coordinate along an axis of the devices that have it."""
    homes = [0] * numbers.shape[0]
    for coord in coordinates(numbers.mesh.shape):
        (start,), (length,) = numbers.local_box(coord)
        homes[start : start + length] = [coord[axis]] * length
    return tuple(homes)


def _bare(module: nn.Module) -> nn.Module:
    """A copy of a module as it stands, which calls its own ``forward`` and has no weights yet."""
    bare = copy.copy(module)
    # What parallelize has put there, and hooks, may refer to what cannot leave this process.
    for name in [name for name in vars(bare) if name == "forward" or name.startswith("_dtorch_")]:
        del bare.__dict__[name]
    bare.__dict__.update({name: OrderedDict() for name in vars(module) if name.endswith("_hooks")})
    bare._parameters = {name: None for name, p in module._parameters.items() if p is not None}
    return bare


class _Share:
    """What the experts of a device make of tokens: local tensors. Choices of other experts give nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.bare = _bare(module)

    def __call__(
        self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        if tokens.is_meta:
            return torch.empty_like(tokens)
        here = (index[..., None] == numbers).any(-1)
        token, choice = here.nonzero(as_tuple=True)
        if not len(token):
            return torch.zeros_like(tokens)
        made = self._run(tokens[token], index[token, choice] - numbers[0], own) * weights[token, choice, None]
        return made.new_zeros(tokens.shape).index_add(0, token, made).to(tokens.dtype)

    def _run(self, rows: torch.Tensor, index: torch.Tensor, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """The module's own ``forward`` with the experts that are here, each row with one of them."""
        part = copy.copy(self.bare)
        part._parameters = dict(zip(self.bare._parameters, map(_aligned, own), strict=True))  # type: ignore[arg-type]
        part.num_experts = len(own[0])  # type: ignore[assignment]
        return part.forward(rows, index[:, None], rows.new_ones(len(rows), 1))


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone() if weight.data_ptr() % ALIGNED_NBYTES else weight


class _Arrived(_Share):
    """The same of rows that were sent here for one expert each, which a table of counts tells."""

    def __init__(self, module: nn.Module, travel: Sequence[int]) -> None:
        super().__init__(module)
        self.travel = travel

    def __call__(self, rows: torch.Tensor, table: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if rows.is_meta:
            return torch.empty_like(rows)
        experts = torch.tensor(self.travel, device=rows.device).repeat(table.shape[1] // len(self.travel))
        index = experts.repeat_interleave(table[0])[:, None]
        return super().__call__(rows, index, rows.new_ones(len(rows), 1), *rest)


class _Sorting:
    """The order in which a device's choices travel, and how many there are for each expert, in that order."""

    def __init__(self, travel: Sequence[int]) -> None:
        self.travel = travel

    def __call__(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = torch.tensor(self.travel, device=index.device).argsort()[index.flatten()]
        counts = turn.new_zeros(len(self.travel)).scatter_add_(0, turn, torch.ones_like(turn))
        return turn.argsort(stable=True), counts[None]


def _repeated(tokens: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
    """A row for each choice, in the order of travel."""
    return tokens[order // choices]


def _combined(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of what each token's choices gave, from the order of travel."""
    made = rows[order.argsort()].view(*weights.shape, rows.shape[-1])
    return (made * weights[..., None]).sum(1).to(rows.dtype)
