"""Which parts of which named tensors a tensor is made of: geometry only, no data.

A weight of a model need not be one tensor of a file: the experts of a layer are one stack in the model and many matrices
in the file. A ``Region`` says where every element of such a tensor comes from, and what is left of that after a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...core.placements import starts
from ...core.spec import Box


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a named tensor, and the box of the region that it fills.

    Attributes:
        name: the tensor it comes from.
        offset, size: the box there, per dim of that tensor.
        at: offset of the filled box, per dim of the region.
        dims: for each dim of the region the dim of the named tensor along it, None where that has none (length 1).
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the filled box, per dim of the region."""
        return tuple(1 if d is None else self.size[d] for d in self.dims)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the named tensor in the region's order; those that the region lacks (length 1) come first."""
        kept = [d for d in self.dims if d is not None]
        return (*(d for d in range(len(self.size)) if d not in kept), *kept)

    def narrowed(self, dim: int, start: int, length: int) -> Part | None:
        """What lies in ``start .. start + length`` of a dim of the region, counted from there; None if nothing does."""
        begin, end = max(self.at[dim], start), min(self.at[dim] + self.shape[dim], start + length)
        if begin >= end:
            return None
        at, source = _set(self.at, dim, begin - start), self.dims[dim]
        if source is None:
            return replace(self, at=at)
        offset = _set(self.offset, source, self.offset[source] + begin - self.at[dim])
        return replace(self, at=at, offset=offset, size=_set(self.size, source, end - begin))


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor of this shape, made of parts that cover it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Region:
        """A named tensor as it is."""
        size = tuple(shape)
        zeros = (0,) * len(size)
        return Region(size, (Part(name, zeros, size, zeros, tuple(range(len(size)))),))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors it comes from."""
        return tuple(dict.fromkeys(p.name for p in self.parts))

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """``length`` elements from ``start`` along a dim."""
        cut = (p.narrowed(dim, start, length) for p in self.parts)
        return Region(_set(self.shape, dim, length), tuple(p for p in cut if p is not None))

    def box(self, box: Box) -> Region:
        """What lies in a box."""
        out = self
        for dim, (start, length) in enumerate(zip(*box, strict=True)):
            if (start, length) != (0, out.shape[dim]):
                out = out.narrow(dim, start, length)
        return out

    def permute(self, order: Sequence[int]) -> Region:
        """Dims in another order."""
        return self._mapped(_permuted(self.shape, order), lambda values: _permuted(values, order))

    def unsqueeze(self, dim: int) -> Region:
        """A dim of length 1 put in."""
        parts = (replace(p, at=_put(p.at, dim, 0), dims=_put(p.dims, dim, None)) for p in self.parts)
        return Region(_put(self.shape, dim, 1), tuple(parts))

    def squeeze(self, dim: int) -> Region:
        """A dim of length 1 taken out."""
        assert self.shape[dim] == 1
        return self._mapped(_without(self.shape, dim), lambda values: _without(values, dim))

    def _mapped(self, shape: tuple[int, ...], change: Callable[[tuple], tuple]) -> Region:
        return Region(shape, tuple(replace(p, at=change(p.at), dims=change(p.dims)) for p in self.parts))


def cat(regions: Iterable[Region], dim: int) -> Region:
    """Regions one after the other along a dim."""
    items = list(regions)
    lengths = [r.shape[dim] for r in items]
    moved = zip(items, starts(lengths), strict=True)
    parts = tuple(replace(p, at=_set(p.at, dim, p.at[dim] + start)) for r, start in moved for p in r.parts)
    return Region(_set(items[0].shape, dim, sum(lengths)), parts)


def _set(values: tuple, index: int, value: int) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _put(values: tuple, index: int, value: int | None) -> tuple:
    return (*values[:index], value, *values[index:])


def _without(values: tuple, index: int) -> tuple:
    return (*values[:index], *values[index + 1 :])


def _permuted(values: tuple, order: Sequence[int]) -> tuple:
    return tuple(values[d] for d in order)
