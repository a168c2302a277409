"""Fused attention: batch, heads and, without a causal mask, query positions may be sharded; keys and values are whole.

Where the sequence is split, ``ring.py`` takes over.

Shapes: query (b, h, s, d), key and value (b, g, t, d) with h a multiple of g, mask broadcast to (b, h, s, t). A label ``g``
counts groups of h / g query heads that share one key and value head, so a cut does not part a group. Where query heads are
cut otherwise, and the others are whole, they have a label ``h`` of their own (``heads.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Dim, Labels
from ..rule import Rule
from . import ring
from .compose import changed, named, tensor_names
from .heads import parts_groups, run_on_own_heads

_aten = torch.ops.aten
ALIGNMENT = 16
"""The memory-efficient CUDA kernel wants rows of the mask to start at multiples of this many elements."""

_QUERY = ("query", "grad_out", "grad_out_", "out")
_KEY = ("key", "value")
_MASK = ("attn_mask", "attn_bias")


@dataclass(frozen=True)
class Attention(Labels):
    """Attention kernels run as they are; a mask that was copied is first laid out as its kernel wants it.

    Attributes:
        parted: whether query heads, labelled ``h``, are cut apart from the heads of keys and values, which are whole.
    """

    parted: bool = False

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Bring heads and mask into the form that the kernel wants, and run it."""
        if self.parted:
            return run_on_own_heads(self, builder, call, args, kwargs, outs, _on_aligned_mask)
        return _on_aligned_mask(builder, call, args, kwargs, outs)


def _on_aligned_mask(builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value]:
    """Pad the rows of the memory-efficient kernel's mask, and run the kernel."""
    mask = named(call, args, kwargs).get("attn_bias")
    if (
        mask is not None
        and call.func.overloadpacket.__name__.startswith("_scaled_dot_product_efficient")
        and (length := mask.spec.shape[-1]) % ALIGNMENT
    ):
        wide = [*mask.spec.shape[:-1], length + ALIGNMENT - length % ALIGNMENT]
        padded = Spec.make(mask.spec.mesh, mask.spec.placements, wide, mask.spec.dtype)
        rows = builder.local(_aten.constant_pad_nd.default, [mask, [0, wide[-1] - length]], {}, [padded])[0]
        rows = builder.local(_aten.slice.Tensor, [rows, -1, 0, length], {}, [mask.spec])[0]
        args, kwargs = changed(call, args, kwargs, attn_bias=rows)
    return builder.local(call.func, args, kwargs, outs)


class Dims:
    """Labels of every kind of tensor in one attention call."""

    def __init__(self, call: OpCall, positions: bool) -> None:
        query, key = call.arg("query").shape, call.arg("key").shape
        self.full = (query[0], query[1], query[2])
        shared = query[1] // max(key[1], 1)
        self.parted = parts_groups(call)
        heads: Dim = "h" if self.parted else ("g", shared) if shared > 1 else "g"
        self.query: list[Dim] = ["b", heads, "s" if positions and not call.arg("is_causal") else None, None]
        self.key: list[Dim] = ["b", None if self.parted else "g", None, None]

    def rows(self, shape: Sequence[int]) -> list[Dim]:
        """A tensor of one number per query: (b, h, s) with, maybe, a last 1."""
        return [*self.query[:3], *[None] * (len(shape) - 3)]

    def mask(self, shape: Sequence[int]) -> list[Dim]:
        """A mask: (b, h, s, t) or (s, t), None where a 1 is stretched."""
        full = [*self.full, None][4 - len(shape) :]
        dims = self.query[4 - len(shape) :]
        return [c if n == m else None for c, n, m in zip(dims, shape, full, strict=True)]

    def of(self, name: str, shape: Sequence[int]) -> list[Dim]:
        """A tensor argument by name; what is neither of query, key nor mask kind is whole."""
        if name in _QUERY:
            return self.query
        if name in _KEY:
            return self.key
        if name in _MASK:
            return self.mask(shape)
        return self.rows(shape) if name == "logsumexp" else [None] * len(shape)


def forward(positions: bool) -> Any:
    """Rule of a forward kernel: (output, logsumexp, state that no piece's results depend on)."""

    def shard(call: OpCall) -> Labels:
        dims = Dims(call, positions)
        inputs = [dims.of(n, s.shape) for n, s in zip(tensor_names(call), call.specs, strict=True)]
        rest: list[list[Dim]] = [[None] * len(m.shape) for m in call.outs[2:]]
        outputs = [dims.query, dims.rows(call.outs[1].shape), *rest]
        alike = dict.fromkeys("bghs", tuple(range(2, len(outputs))))
        return Attention(inputs, outputs, nonempty=frozenset("bgs"), alike=alike, parted=dims.parted)

    return shard


def backward(positions: bool) -> Any:
    """Rule of a backward kernel: gradients of query, key, value and, where asked for, the mask.

    What dropout kept is drawn anew from a seed and a position in the whole tensor, so no piece could do it.
    """

    def shard(call: OpCall) -> Labels | None:
        if call.arg("dropout_p"):
            return None
        dims = Dims(call, positions)
        inputs = [dims.of(n, s.shape) for n, s in zip(tensor_names(call), call.specs, strict=True)]
        outputs = [dims.query, dims.key, dims.key, *[dims.mask(m.shape) for m in call.outs[3:]]]
        return Attention(inputs, outputs, dict.fromkeys("bghs", "sum"), nonempty=frozenset("bgs"), parted=dims.parted)

    return shard


def layer(call: OpCall) -> Labels:
    """Whole layers fused into one kernel, as ``torch.nn`` runs them without gradients: only the batch may be sharded."""
    batch = call.specs[0].shape[0]
    kind = call.arg("mask_type")

    def dims(name: str, shape: Sequence[int]) -> list[Dim]:
        batched = name in ("src", "query", "key", "value") or (name == "mask" and kind in (1, 2) and shape[0] == batch)
        return ["b" if batched and d == 0 else None for d in range(len(shape))]

    inputs = [dims(n, s.shape) for n, s in zip(tensor_names(call), call.specs, strict=True)]
    return Labels(inputs, [dims("src", m.shape) for m in call.outs], nonempty=frozenset("b"))


def _pair(name: str, positions: bool = True) -> dict[str, Rule]:
    return {
        name: Rule(forward(positions), ring.forward),
        f"{name}_backward": Rule(backward(positions), ring.backward),
    }


TABLE = {
    "_transformer_encoder_layer_fwd": Rule(layer),
    "_native_multi_head_attention": Rule(layer),
    **_pair("_scaled_dot_product_flash_attention_for_cpu"),
    **_pair("_scaled_dot_product_flash_attention"),
    **_pair("_scaled_dot_product_cudnn_attention"),
    # Its logsumexp is padded to a multiple of 32 positions, so positions stay whole.
    **_pair("_scaled_dot_product_efficient_attention", positions=False),
}
