"""Index labels: the notation in which nearly every sharding rule is written.

A rule names each dim of each tensor by a label, as in einsum. Sharding a label over a mesh axis shards every dim that
carries it. ``Labels(inputs=("mk", "kn"), outputs=("mn",), reduce={"k": "sum"})`` is all there is to say about matmul:
shard ``m`` or ``n`` and the output is sharded; shard ``k`` and it is a partial sum.

A dim may carry a *unit*: ``("h", 64)`` is a dim that holds 64 elements for each step of label ``h``. So flattening,
unflattening and heads of 64 features keep exact, possibly uneven, cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from ..core.placements import REPLICATE, Partial, Placement, Shard, balanced
from ..core.spec import Spec

Dim = str | tuple[str, int] | None
Dims = Sequence[Dim]
ANY_OP = ("sum", "avg", "max", "min", "prod")
LINEAR_OPS = ("sum", "avg")


@dataclass(frozen=True, slots=True)
class PartialRow:
    """These inputs may be partial together (the others replicated), and then every output is."""

    inputs: tuple[bool, ...]
    ops: tuple[str, ...] = LINEAR_OPS


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal choice on one mesh axis: a placement for every input and output; ``label`` is what it shards."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    label: str | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Labels:
    """The rule of one operator call.

    Attributes:
        inputs, outputs: a label, (label, unit) or None (must be whole) for each dim of each tensor.
        reduce: labels absent from the outputs that may be sharded, and how the partial results combine.
        partial: rows in which inputs are partial.
        shape_args: schema argument names that hold the global shape of an output, by output number.
        instead: operator and non-tensor arguments to run on the pieces in place of the call's own.
        alike: by label, numbers of the outputs that every piece computes whole and alike when that label is sharded.
        added: by label of ``reduce``, numbers of the inputs that are added to what it sums over: partial when that label is
            sharded, so that they are added once.
        nonempty: labels that may not have an empty shard (a maximum over nothing is undefined); where one has, the balanced
            cut is offered instead.
    """

    inputs: Sequence[Dims]
    outputs: Sequence[Dims]
    reduce: Mapping[str, str] = field(default_factory=dict)
    partial: Sequence[PartialRow] = ()
    shape_args: Mapping[str, int] = field(default_factory=dict)
    nonempty: frozenset[str] = frozenset()
    instead: tuple[OpOverload, tuple] | None = None
    alike: Mapping[str, Sequence[int]] = field(default_factory=dict)
    added: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """Every choice on a mesh axis that some input's present placement suggests; replicating all comes last.

        ``cuts[label]`` are the label's piece lengths after the earlier axes, in units; absent where it is uncut.
        """
        kept, filled = self._partial_candidates(axis, specs)
        out = kept
        for label in self._present(axis, specs):
            out += self._sharding(label, axis, specs, cuts)
        out.append(Candidate((REPLICATE,) * len(self.inputs), (REPLICATE,) * len(self.outputs)))
        return out + filled

    def _present(self, axis: int, specs: Sequence[Spec]) -> list[str]:
        """Labels that some input shards on the axis now; where it shards a dim that must be whole, its other labels."""
        found: dict[str, None] = {}
        for dims, spec in zip(self.inputs, specs, strict=True):
            placement = spec.placements[axis]
            if isinstance(placement, Shard):
                own = dims[placement.dim]
                found.update({_split(d)[0]: None for d in (dims if own is None else [own]) if d is not None})
        return list(found)

    def _sharding(self, label: str, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        k = specs[0].mesh.shape[axis]
        outer = cuts.get(label) or (self._length(label, specs),)
        made = (self._cut(label, sizes, outer, k) for sizes in self._sizes(label, axis, specs, outer, k))
        return [candidate for candidate in made if candidate is not None]

    def _cut(self, label: str, sizes: tuple[int, ...], outer: tuple[int, ...], k: int) -> Candidate | None:
        if label in self.nonempty and 0 in sizes:
            sizes = tuple(s for n in outer for s in balanced(n, k))
            if 0 in sizes:
                return None
        outputs: list[Placement] = []
        for number, dims in enumerate(self.outputs):
            placement: Placement | None = _shard_of(dims, label, sizes, outer, k)
            if placement is None and number in self.alike.get(label, ()):
                placement = REPLICATE
            if placement is None and label not in self.reduce:
                return None
            outputs.append(placement or Partial(self.reduce[label]))
        added = self.added.get(label, ())
        inputs = tuple(
            Partial(self.reduce[label]) if number in added else _shard_of(dims, label, sizes, outer, k) or REPLICATE
            for number, dims in enumerate(self.inputs)
        )
        return Candidate(inputs, tuple(outputs), label, sizes)

    def _length(self, label: str, specs: Sequence[Spec]) -> int:
        """Length of a label, in units."""
        for dims, spec in zip(self.inputs, specs, strict=True):
            for dim, entry in zip(dims, spec.shape, strict=True):
                if dim is not None and _split(dim)[0] == label:
                    return entry // _split(dim)[1]
        raise AssertionError(f"label {label} on no input")

    def _sizes(self, label: str, axis: int, specs: Sequence[Spec], outer: tuple[int, ...], k: int) -> Iterable[tuple[int, ...]]:
        """The cuts to offer: that of the largest input already sharded so and fitting the units, else the balanced one.

        Where inputs are cut at different places, so that something moves anyway, the balanced one comes first.
        """
        even = tuple(s for n in outer for s in balanced(n, k))
        best, weight = even, -1
        found: set[tuple[int, ...] | None] = set()
        for dims, spec in zip(self.inputs, specs, strict=True):
            placement = spec.placements[axis]
            if not isinstance(placement, Shard) or dims[placement.dim] is None or _split(dims[placement.dim])[0] != label:
                continue
            in_units = _in_units(spec.sizes_on(axis), _split(dims[placement.dim])[1], outer, k)
            found.add(in_units)
            if in_units is not None and spec.nbytes > weight:
                best, weight = in_units, spec.nbytes
        return dict.fromkeys((even, best) if len(found) > 1 else (best,))

    def _partial_candidates(self, axis: int, specs: Sequence[Spec]) -> tuple[list[Candidate], list[Candidate]]:
        """Choices that stay partial: those all of whose inputs are partial now, and those that make one so."""
        kept: list[Candidate] = []
        filled: list[Candidate] = []
        placements = [spec.placements[axis] for spec in specs]
        for op in {p.reduce_op: None for p in placements if isinstance(p, Partial)}:
            if any(p == Partial(op) and _lossy(op, spec.dtype) for p, spec in zip(placements, specs, strict=True)):
                continue
            for row in self.partial:
                wanted = [p for p, partial in zip(placements, row.inputs, strict=True) if partial]
                if op not in row.ops or Partial(op) not in wanted or not set(wanted) <= {Partial(op), REPLICATE}:
                    continue
                inputs = tuple(Partial(op) if partial else REPLICATE for partial in row.inputs)
                candidate = Candidate(inputs, (Partial(op),) * len(self.outputs))
                (filled if REPLICATE in wanted else kept).append(candidate)
        return kept, filled


def _in_units(sizes: tuple[int, ...], unit: int, outer: tuple[int, ...], k: int) -> tuple[int, ...] | None:
    """A cut counted in units; None where it parts one, or does not go with the cuts of earlier axes."""
    counts = tuple(s // unit for s in sizes)
    fits = not any(s % unit for s in sizes) and tuple(sum(counts[i : i + k]) for i in range(0, len(counts), k)) == outer
    return counts if fits else None


def _lossy(op: str, dtype: torch.dtype) -> bool:
    """Whether a reduction does not commute even with linear operators: integer averages round, and a bool sums by *or*."""
    if dtype == torch.bool:
        return op not in ("max", "min")
    return op == "avg" and not (dtype.is_floating_point or dtype.is_complex)


def _split(dim: Dim) -> tuple[str, int]:
    assert dim is not None
    return (dim, 1) if isinstance(dim, str) else dim


def _shard_of(dims: Dims, label: str, sizes: tuple[int, ...], outer: tuple[int, ...], k: int) -> Shard | None:
    """The shard of the dim that carries the label, or None where no dim does."""
    for d, dim in enumerate(dims):
        if dim is not None and _split(dim)[0] == label:
            unit = _split(dim)[1]
            natural = tuple(s for n in outer for s in balanced(n * unit, k))
            scaled = tuple(s * unit for s in sizes)
            return Shard(d) if scaled == natural else Shard(d, scaled)
    return None
