"""Rules of operators that read and write by number: indexing, gather, scatter, and triangles of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.spec import Spec
from ..builder import Varying
from ..call import OpCall
from ..labels import ANY_OP, LINEAR_OPS, Labels, PartialRow
from ..rule import Rule
from .compose import letters
from .indexed import Indexed


def _together(call: OpCall, inputs: Sequence[bool], ops: tuple[str, ...]) -> list[PartialRow]:
    """These inputs may be partial together, if none changes its dtype on the way."""
    same = all(s.dtype == call.outs[0].dtype for s, wanted in zip(call.specs, inputs, strict=True) if wanted)
    return [PartialRow(tuple(inputs), ops)] if same else []


def whole(call: OpCall) -> Labels:
    """What the operator does with an element depends on all elements before it: everything must be whole."""
    return Labels([[None] * len(s.shape) for s in call.specs], [[None] * len(m.shape) for m in call.outs])


def rows_read(call: OpCall) -> Indexed | Labels:
    """``index_select``."""
    shape, index = call.specs[0].shape, call.specs[1].shape
    if not shape:
        return whole(call)
    dim = call.arg("dim") % len(shape)
    dims, own = letters(len(shape), [dim]), ["I"][: len(index)]
    out = [*dims[:dim], own[0] if own else None, *dims[dim + 1 :]]
    labels = Labels([dims, own], [out], partial=_together(call, (True, False), ANY_OP))
    return Indexed(labels, {dim: 1}, reads=True, trailing=len(shape) - dim - 1)


def rows_written(call: OpCall) -> Indexed | Labels:
    """``index_add``, ``index_copy``, ``index_fill`` and ``index_reduce``."""
    shape, name = call.specs[0].shape, call.func.overloadpacket.__name__.removesuffix("_")
    source = call.specs[2].shape if len(call.specs) > 2 else ()
    if not shape or len(source) not in (0, len(shape)) or len(call.specs[1].shape) != 1:
        return whole(call)
    dim = call.arg("dim") % len(shape)
    dims = letters(len(shape), [dim])
    adds = name == "index_add" and call.specs[0].dtype != torch.bool
    own = "I" if adds else None
    ins = [dims, [own]] + [[*dims[:dim], own, *dims[dim + 1 :]][: len(source)]] * (len(call.specs) - 2)
    partial = _together(call, (True, False, True), LINEAR_OPS if adds else ANY_OP) if name in ("index_add", "index_copy") else []
    labels = Labels(ins, [dims], {"I": "sum"} if adds else {}, partial)
    return Indexed(labels, {dim: 1}, reads=False, wraps=name == "index_fill", adds=frozenset("I") if adds else frozenset())


def gathered(call: OpCall) -> Indexed | Labels:
    """``gather``: of the other dims it uses as much as the index has."""
    shape, index = call.specs[0].shape, call.specs[1].shape
    if not shape or len(index) != len(shape):
        return whole(call)
    dim = call.arg("dim") % len(shape)
    prefix = tuple(d for d in range(len(shape)) if d != dim and index[d] != shape[d])
    dims = letters(len(shape), [dim, *prefix])
    own = [*dims[:dim], "I", *dims[dim + 1 :]]
    labels = Labels([dims, own], [own], partial=_together(call, (True, False), ANY_OP))
    return Indexed(labels, {dim: 1}, reads=True, prefix=prefix)


def scattered(call: OpCall) -> Indexed | Labels:
    """``scatter``, ``scatter_add`` and ``scatter_reduce``, with a source or a number."""
    shape, index = call.specs[0].shape, call.specs[1].shape
    sources = call.specs[2:]
    if not shape or any(len(s.shape) != len(shape) for s in call.specs[1:]):
        return whole(call)
    dim = call.arg("dim") % len(shape)
    prefix = tuple(d for d in range(len(shape)) if d != dim and any(s.shape[d] != shape[d] for s in call.specs[1:]))
    dims = letters(len(shape), [dim, *prefix])
    adds = _adds(call) and all(s.shape[dim] == index[dim] for s in sources)
    own = [*dims[:dim], "I" if adds else None, *dims[dim + 1 :]]
    moves = call.arg("reduce") is None and not _adds(call)
    partial = _together(call, (True, False, True), ANY_OP if moves else LINEAR_OPS) if sources and (moves or _adds(call)) else []
    labels = Labels([dims, own, *[own] * len(sources)], [dims], {"I": "sum"} if adds else {}, partial)
    return Indexed(labels, {dim: 1}, reads=False, adds=frozenset("I") if adds else frozenset(), prefix=prefix)


def _adds(call: OpCall) -> bool:
    """Whether a scatter adds its source to what is there."""
    if call.specs[0].dtype == torch.bool or len(call.specs) < 3:
        return False
    reduce = call.arg("reduce")
    return "scatter_add" in call.func.overloadpacket.__name__ or (reduce in ("sum", "add") and call.arg("include_self", True))


@dataclass(frozen=True)
class Advanced:
    """How ``x[i, :, j]`` lays out its result.

    Attributes:
        indices: (dim, spec) of each index tensor.
        dims: labels of x, None along the indexed dims.
        broadcast: shape of the indices together.
        out: labels of what is found.
        first: where the dims of the indices begin in it.
    """

    indices: tuple[tuple[int, Spec], ...]
    dims: list[str | None]
    broadcast: tuple[int, ...]
    out: list[str | None]
    first: int

    @staticmethod
    def of(call: OpCall, name: str) -> Advanced:
        """The layout of a call whose indices are integers."""
        ndim = len(call.specs[0].shape)
        indices = tuple((d, s) for d, s in enumerate(call.arg(name)) if isinstance(s, Spec))
        broadcast = tuple(torch.broadcast_shapes(*[s.shape for _, s in indices]))
        at = [d for d, _ in indices]
        dims = letters(ndim, at)
        first = at[0] if at[-1] - at[0] == len(at) - 1 else 0
        rest = [dims[d] for d in range(ndim) if d not in at]
        own = [f"I{d}" for d in range(len(broadcast))]
        return Advanced(indices, dims, broadcast, [*rest[:first], *own, *rest[first:]], first)

    def labels_of(self, shape: Sequence[int]) -> list[str | None]:
        """Labels of an index tensor that broadcasts with the others."""
        skip = len(self.broadcast) - len(shape)
        return [f"I{skip + d}" if n == self.broadcast[skip + d] else None for d, n in enumerate(shape)]


def _masks(call: OpCall) -> bool:
    return any(s.dtype in (torch.bool, torch.uint8) for s in call.arg("indices") if isinstance(s, Spec))


def found(call: OpCall) -> Indexed | Labels:
    """``x[indices]`` with integer indices."""
    way = Advanced.of(call, "indices")
    labels = Labels([way.dims, *[way.labels_of(s.shape) for _, s in way.indices]], [way.out])
    labels = Labels(labels.inputs, labels.outputs, partial=_together(call, (True, *(False,) * len(way.indices)), ANY_OP))
    numbers = {d: number + 1 for number, (d, _) in enumerate(way.indices)}
    return Indexed(labels, numbers, reads=True, trailing=len(way.out) - way.first - len(way.broadcast), wraps=True)


def put(call: OpCall) -> Indexed | Labels:
    """``x[indices] = values``, or ``+=`` where it accumulates."""
    if _masks(call):
        return masked_put(call)
    way = Advanced.of(call, "indices")
    values = call.arg("values")
    shape = call.specs[0].shape
    at = [d for d, _ in way.indices]
    rest = [n for d, n in enumerate(shape) if d not in at]
    full = [*rest[: way.first], *way.broadcast, *rest[way.first :]]
    if len(values.shape) > len(full):
        return whole(call)
    skip = len(full) - len(values.shape)
    adds = bool(call.arg("accumulate")) and call.specs[0].dtype != torch.bool
    own = frozenset(f"I{d}" for d in range(len(way.broadcast))) if adds else frozenset()
    ins = [way.dims, *[way.labels_of(s.shape) for _, s in way.indices]]
    ins.append([way.out[skip + d] if n == full[skip + d] else None for d, n in enumerate(values.shape)])
    if not adds:
        ins = [[None if c is not None and c.startswith("I") else c for c in dims] for dims in ins]
    both = (True, *(False,) * len(way.indices), True)
    labels = Labels(ins, [way.dims], dict.fromkeys(own, "sum"), _together(call, both, LINEAR_OPS if adds else ANY_OP))
    numbers = {d: number + 1 for number, (d, _) in enumerate(way.indices)}
    return Indexed(labels, numbers, reads=False, wraps=True, adds=own)


def masked_put(call: OpCall) -> Labels:
    """``x[mask] = value``: elementwise for one value; several are dealt out in order, so what they fill must be whole."""
    x, indices, values = call.specs[0], call.arg("indices"), call.arg("values")
    ndim = len(x.shape)
    given = [(d, s) for d, s in enumerate(indices) if isinstance(s, Spec)]
    if len(given) != 1 or given[0][1].dtype != torch.bool:
        return whole(call)
    (dim, mask), dims = given[0], letters(ndim)
    covered = range(dim, dim + len(mask.shape))
    after = ndim - covered.stop
    place = len(values.shape) - after - 1
    if place >= 0 and values.shape[place] != 1:
        dims = letters(ndim, covered)
    full = [*dims[:dim], None, *dims[covered.stop :]]
    sizes = [*x.shape[:dim], 1, *x.shape[covered.stop :]]
    skip = len(full) - len(values.shape)
    if skip < 0:
        return whole(call)
    own = [full[skip + d] if n == sizes[skip + d] else None for d, n in enumerate(values.shape)]
    return Labels([dims, dims[dim : covered.stop], own], [dims])


class Triangle(Labels):
    """``tril`` and ``triu``: on a piece the diagonal lies elsewhere."""

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """The diagonal of a piece that begins at some row and column."""

        def diagonal(coord: tuple[int, ...]) -> int:
            *_, row, column = ins[0].local_box(coord)[0]
            return call.arg("diagonal", 0) + row - column

        return {"diagonal": Varying(diagonal)}


def triangle(call: OpCall) -> Triangle:
    """Every dim may be split; linear."""
    dims = letters(len(call.specs[0].shape))
    return Triangle([dims], [dims], partial=[PartialRow((True,))])


def taken(call: OpCall) -> Labels:
    """``take`` numbers the elements of the flattened input, which must be whole; the indices may be split."""
    dims = letters(len(call.specs[1].shape))
    return Labels([[None] * len(call.specs[0].shape), dims], [dims], partial=[PartialRow((True, False), ANY_OP)])


TABLE = {
    "index.Tensor": Rule(found),
    "_unsafe_index.Tensor": Rule(found),
    "index_put.default": Rule(put),
    "_index_put_impl.default": Rule(put),
    "_unsafe_index_put": Rule(put),
    "index_select": Rule(rows_read),
    "index_add": Rule(rows_written),
    "index_copy": Rule(rows_written),
    "index_fill": Rule(rows_written),
    "index_reduce": Rule(rows_written),
    "gather": Rule(gathered),
    "scatter": Rule(scattered),
    "scatter_add": Rule(scattered),
    "scatter_reduce": Rule(scattered),
    "take": Rule(taken),
    "put": Rule(whole),
    "tril": Rule(triangle),
    "triu": Rule(triangle),
}
