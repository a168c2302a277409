"""How attention over a split sequence uses the axes of the mesh, and where its tensors lie meanwhile.

Each axis has one role. Batch and heads may stay split as they are. Where the sequence is split, the axis either trades
positions for heads (Ulysses: all-to-all, each device then has whole sequences of some heads) or forms a ring, around which
keys and values travel. The names ``ulysses_cp`` and ``ring_cp`` decide; on any other axis what moves fewer bytes does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.mesh import coordinates
from ...core.placements import REPLICATE, Partial, Shard, balanced
from ...core.spec import Spec
from ..call import OpCall
from .blocks import zigzag
from .compose import has_empty_piece
from .laid import Laid, Runs, cut_of, joined, natural, sizes, split_spec
from .pieces import balanced_leaves, leaves

ULYSSES, RING = "ulysses_cp", "ring_cp"
Cuts = Mapping[int, tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class Roles:
    """Mesh axes by what they are for.

    Attributes:
        batch, heads: split batch and heads, as before the call.
        ulysses, ring: split the sequence of queries, keys and values; see above.
        rows: split queries only; every device there has all keys of its ring.
        columns: split keys only, and queries are few: every device has them all, and what it finds is put together.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    ulysses: tuple[int, ...]
    ring: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def plain(spec: Spec) -> Spec:
    """The spec with partials reduced, and nothing said of axes of one device."""
    pairs = zip(spec.placements, spec.mesh.shape, strict=True)
    return spec.replace([REPLICATE if isinstance(p, Partial) or k == 1 else p for p, k in pairs])


def roles_of(call: OpCall) -> Roles | None:
    """The roles of all axes; None where kernels can run on the pieces as they lie."""
    tensors = {name: plain(call.arg(name)) for name in ("query", "key", "value")}
    found: dict[str, list[int]] = {"batch": [], "heads": [], "ulysses": [], "ring": [], "rows": [], "columns": []}
    undecided: list[int] = []
    for axis, name in enumerate(tensors["query"].mesh.axis_names()):
        dim = _most(tensors, axis)
        if dim == 2 and not any(_splits(tensors[n], axis, 2) for n in ("key", "value")):
            found["rows"].append(axis)
        elif dim == 2 and tensors["query"].placements[axis] == REPLICATE and _few(tensors):
            found["columns"].append(axis)
        elif dim == 2 and name not in (ULYSSES, RING):
            undecided.append(axis)
        elif dim is not None:
            found["batch" if dim == 0 else "heads" if dim == 1 else "ring" if name == RING else "ulysses"].append(axis)
    for axis in undecided:
        found[_cheaper(call, axis, found)].append(axis)
    roles = Roles(**{name: tuple(sorted(axes)) for name, axes in found.items()})
    moving = roles.ulysses or roles.ring or roles.columns
    return roles if moving or _idle(list(tensors.values())) or (roles.rows and call.arg("is_causal")) else None


def _idle(specs: Sequence[Spec]) -> bool:
    """Whether devices without a head or a sample stay so: all tensors lie alike, or there are too few for all devices."""
    if not any(has_empty_piece(spec, [0, 1]) for spec in specs):
        return False
    coords = list(coordinates(specs[0].mesh.shape))
    alike = len({tuple(0 in spec.local_box(c)[1][:2] for c in coords) for spec in specs}) == 1
    short = any(spec.shape[d] < math.prod(spec.mesh.shape[a] for a in spec.sharding_axes(d)) for spec in specs for d in (0, 1))
    return alike or short


def _few(tensors: Mapping[str, Spec]) -> bool:
    """Whether reducing what all devices find for all queries moves less than sending keys and values around."""
    return 4 * tensors["query"].nbytes <= tensors["key"].nbytes + tensors["value"].nbytes


def _splits(spec: Spec, axis: int, dim: int) -> bool:
    placement = spec.placements[axis]
    return isinstance(placement, Shard) and placement.dim == dim


def _most(tensors: Mapping[str, Spec], axis: int) -> int | None:
    """The dim of batch, heads and positions by which most bytes are split on an axis."""
    votes: Counter[int] = Counter()
    for spec in tensors.values():
        placement = spec.placements[axis]
        if isinstance(placement, Shard) and placement.dim < 3:
            votes[placement.dim] += spec.nbytes + 1
    return max(votes, key=lambda dim: votes[dim]) if votes else None


def _cheaper(call: OpCall, axis: int, found: Mapping[str, list[int]]) -> str:
    """Whether heads or keys and values should travel along an axis: by bytes, and heads only where no device lacks one."""
    query, key, value = (call.arg(name) for name in ("query", "key", "value"))
    k = query.mesh.shape[axis]
    taken = math.prod(query.mesh.shape[a] for a in (*found["heads"], *found["ulysses"]))
    if query.shape[1] < k * taken:
        return "ring"
    repeats = max(1, k * taken / max(key.shape[1], 1))
    pair = key.nbytes + value.nbytes
    traded = (k - 1) / k * (2 * query.nbytes + repeats * pair)
    around = (k - 1) * pair + (traded if call.arg("is_causal") else 0)
    return "ulysses" if traded <= around else "ring"


class Layouts:
    """Where the tensors of one attention call lie.

    ``query_home`` and ``key_home`` are the ordinary specs in which they come and in which results and gradients go
    back; ``query`` and ``key`` are the layouts to compute in.
    """

    def __init__(self, call: OpCall, roles: Roles) -> None:
        self.roles = roles
        self.mesh = call.arg("query").mesh
        query, key, value = (plain(call.arg(name)) for name in ("query", "key", "value"))
        self.group = max(query.shape[1] // max(key.shape[1], 1), 1)
        self.causal = bool(call.arg("is_causal"))
        self._homes(query, key, value)
        self._work()

    def _homes(self, query: Spec, key: Spec, value: Spec) -> None:
        roles = self.roles
        batch = _first(cut_of(s, 0, roles.batch) for s in (query, key)) or balanced_leaves(self.mesh, roles.batch, query.shape[0])
        heads = self._head_sizes(query, key)
        rows = tuple(sorted((*roles.ring, *roles.ulysses, *roles.rows)))
        columns = tuple(sorted((*roles.ring, *roles.ulysses, *roles.columns)))
        below = cut_of(query, 2, rows) or balanced_leaves(self.mesh, rows, query.shape[2])
        across = _first(cut_of(s, 2, columns) for s in (key, value)) or balanced_leaves(self.mesh, columns, key.shape[2])
        self.query_home = _placed(query, {0: (roles.batch, batch), 1: (roles.heads, heads), 2: (rows, below)})
        cuts: dict[int, tuple[Sequence[int], Sequence[int]]] = {0: (roles.batch, batch), 2: (columns, across)}
        if all(n % self.group == 0 for n in heads):
            cuts[1] = (roles.heads, [n // self.group for n in heads])
        self.key_home = _placed(key, cuts)

    def _head_sizes(self, query: Spec, key: Spec) -> list[int]:
        """Query heads on each leaf: the cut there is, if possible one that parts no group; else whole groups, else heads."""
        axes, m = self.roles.heads, self.group
        own, groups = cut_of(query, 1, axes), cut_of(key, 1, axes)
        if own is not None and all(n % m == 0 for n in own):
            return own
        if groups is not None or own is not None:
            return (own or []) if groups is None else [n * m for n in groups]
        if key.shape[1] >= math.prod(self.mesh.shape[a] for a in axes):
            return [n * m for n in balanced_leaves(self.mesh, axes, key.shape[1])]
        return balanced_leaves(self.mesh, axes, query.shape[1])

    def _work(self) -> None:
        roles = self.roles
        head_axes = tuple(sorted((*roles.heads, *roles.ulysses)))
        row_axes = tuple(sorted((*roles.ring, *roles.rows)))
        heads = self._head_runs(head_axes)
        held = [_held(leaf, self.group) for leaf in heads]
        self.key_axes = tuple(sorted((*roles.ring, *roles.columns)))
        rows, keys = natural(self.query_home, 2, row_axes), natural(self.key_home, 2, self.key_axes)
        square = self.query_home.shape[2] == self.key_home.shape[2]
        if self.causal and square and roles.ring and not roles.rows and not roles.columns:
            rows = keys = zigzag(self.query_home.shape[2], len(keys))
        self.query = _laid(self.query_home, roles.batch, (head_axes, heads), (row_axes, rows))
        self.key = _laid(self.key_home, roles.batch, (head_axes, held), (self.key_axes, keys))

    def _head_runs(self, axes: Sequence[int]) -> list[Runs]:
        """Query heads of each leaf over head and Ulysses axes: what the head axes give, shared out over the others."""
        shape = [self.mesh.shape[a] for a in axes]
        given = {p: leaf for p, leaf in zip(self._places(self.roles.heads), leaves(self.query_home, 1), strict=True)}
        shares = list(self._places(self.roles.ulysses))
        out = []
        for place in coordinates(shape):
            at = dict(zip(axes, place, strict=True))
            start, n = given[tuple(at[a] for a in self.roles.heads)]
            unit = self.group if start % self.group == 0 and n % self.group == 0 and n // self.group >= len(shares) else 1
            cut = [size * unit for size in balanced(n // unit, len(shares))]
            number = shares.index(tuple(at[a] for a in self.roles.ulysses))
            out.append(joined([(start + sum(cut[:number]), cut[number])]))
        return out

    def _places(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        return list(coordinates([self.mesh.shape[a] for a in axes]))

    @property
    def ring_size(self) -> int:
        """Number of devices in a ring."""
        return math.prod(self.mesh.shape[a] for a in self.roles.ring)

    def keys(self, step: int) -> list[Runs]:
        """The keys that each leaf of them holds after so many steps around the ring."""
        held = dict(zip(self._places(self.key_axes), self.key.of(2), strict=True))
        ring = self._places(self.roles.ring)
        inside = [self.key_axes.index(a) for a in self.roles.ring]
        out = []
        for place in held:
            source = list(place)
            number = (ring.index(tuple(place[i] for i in inside)) - step) % len(ring)
            for i, c in zip(inside, ring[number], strict=True):
                source[i] = c
            out.append(held[tuple(source)])
        return out

    def turned(self, laid: Laid, step: int) -> Laid:
        """A layout of the keys after so many steps around the ring."""
        after = self.keys(step)
        cuts = {d: (laid.spec.sharding_axes(d), sizes(laid.of(d))) for d in (0, 1)}
        spec = split_spec(laid.spec, {**cuts, 2: (self.key_axes, sizes(after))}, laid.spec.shape)
        pairs = zip(laid.spec.placements, spec.placements, strict=True)
        return Laid(spec.replace([p if isinstance(p, Partial) else q for p, q in pairs]), {**laid.runs, 2: after})

    def mask(self, spec: Spec) -> Laid:
        """The layout of a mask: its rows, heads and batch with the queries, dims of size 1 and keys whole."""
        cuts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        runs: dict[int, list[Runs]] = {}
        shift = 4 - len(spec.shape)
        for d, n in enumerate(spec.shape[:-1]):
            if n != 1:
                runs[d] = self.query.of(d + shift)
                cuts[d] = (self.query.spec.sharding_axes(d + shift), sizes(runs[d]))
        return Laid(split_spec(spec, cuts, spec.shape), runs)


def _first(found: Iterable[list[int] | None]) -> list[int] | None:
    return next((cut for cut in found if cut is not None), None)


def _placed(spec: Spec, cuts: Cuts) -> Spec:
    """The spec split so, in its own order of strides."""
    made = split_spec(spec, cuts, spec.shape)
    return spec.replace(made.placements)


def _held(heads: Runs, group: int) -> Runs:
    """Key heads for these query heads: each once where all serve equally many of them, else one for each query head."""
    owners = [h // group for start, n in heads for h in range(start, start + n)]
    shares = Counter(owners)
    return joined([(o, 1) for o in shares]) if len(set(shares.values())) <= 1 else [(o, 1) for o in owners]


def _laid(home: Spec, batch: Sequence[int], heads: tuple[Sequence[int], list[Runs]], positions: tuple) -> Laid:
    shape = (home.shape[0], sum(sizes(heads[1])), sum(sizes(positions[1])), *home.shape[3:])
    cuts = {0: (batch, cut_of(home, 0, batch) or []), 1: (heads[0], sizes(heads[1])), 2: (positions[0], sizes(positions[1]))}
    return Laid(split_spec(home, cuts, shape), {1: heads[1], 2: positions[1]})
