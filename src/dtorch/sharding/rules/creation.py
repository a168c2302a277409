"""New tensors in the shape of a given one: they take its placements and nothing of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.placements import REPLICATE, Partial
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import Candidate, Labels
from ..rule import Rule
from .compose import letters

_aten = torch.ops.aten


@dataclass(frozen=True)
class Shaped:
    """A rule for an operator that reads only the shape of its input: a partial is as good as a value."""

    labels: Labels

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """Those of the labels, and on a partial axis a replicated result, for nothing."""
        now = specs[0].placements[axis]
        if isinstance(now, Partial):
            return [Candidate((now,), (REPLICATE,) * len(self.labels.outputs))]
        return self.labels.candidates(axis, specs, cuts)

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """The local shape, and where it is an argument the local stride."""
        out: dict[str, Varying] = {}
        if "size" in call.bound:
            out["size"] = Varying(lambda coord: list(outs[0].local_box(coord)[1]))
        if "stride" in call.bound and self.labels.inputs[0] != [None] * len(ins[0].shape):
            out["stride"] = Varying(lambda coord: dense_stride(outs[0].local_box(coord)[1], outs[0].stride))
        return out


def like(call: OpCall) -> Shaped:
    """``zeros_like`` and its kin."""
    dims = letters(len(call.specs[0].shape))
    return Shaped(Labels([dims], [dims]))


def new(call: OpCall) -> Shaped:
    """``new_zeros`` and its kin: of the input's shape, they are placed like it; of any other, they are whole.

    A stride with gaps or overlaps cannot be cut, so such a tensor is whole too.
    """
    given, made = call.specs[0].shape, call.outs[0]
    alike = given == made.shape and ("stride" not in call.bound or dense_stride(made.shape, made.stride) == list(made.stride))
    dims = letters(len(given), range(len(given)) if not alike else ())
    return Shaped(Labels([dims], [dims if alike else [None] * len(made.shape)]))


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """The stride without gaps of a shape whose dims lie in memory in the order of another stride."""
    out, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        out[d] = step
        step *= max(shape[d], 1)
    return out


def whole_new(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """A new tensor whose shape has nothing to do with the input's: made whole, once, whatever the input's placement."""
    spec, made = call.specs[0], call.outs[0]
    out = Spec.make(spec.mesh, (REPLICATE,) * spec.mesh.ndim, made.shape, made.dtype, made.stride)
    return builder.local(call.func, args, kwargs, [out], spec.mesh)


LIKE = Rule(like, changing=True)
NEW = Rule(new, whole_new, changing=True)

TABLE = {
    "zeros_like": LIKE,
    "ones_like": LIKE,
    "full_like": LIKE,
    "empty_like": LIKE,
    "new_zeros": NEW,
    "new_ones": NEW,
    "new_full": NEW,
    "new_empty": NEW,
    "new_empty_strided": NEW,
}
