"""Operators on planes, the last dims: pooling, resizing and padding, each plane by itself, so the dims before may be sharded."""

from __future__ import annotations

from ..call import OpCall
from ..labels import Labels, PartialRow
from ..rule import Rule, RuleFn
from .compose import letters, tensor_names


def planes(ndim: int, linear: bool = False) -> RuleFn:
    """Rule of an operator on planes of so many dims; of one tensor, it may be linear."""

    def shard(call: OpCall) -> Labels:
        lengths = [*(len(s.shape) for s in call.specs), *(len(m.shape) for m in call.outs)]
        outer = min(lengths) - ndim
        rows = [[*letters(outer), *[None] * (n - outer)] for n in lengths]
        inputs, outputs = rows[: len(call.specs)], rows[len(call.specs) :]
        sizes = {"input_size": 0} if "input_size" in call.bound else {}
        partial = [PartialRow((True,))] if linear and len(inputs) == 1 else []
        nonempty = frozenset(c for c in letters(outer) if c is not None)
        return Labels(inputs, outputs, partial=partial, shape_args=sizes, nonempty=nonempty)

    return shard


def sampled(call: OpCall) -> Labels:
    """Sampling at the points of a grid: images and channels; a grid belongs to an image and serves all of its channels."""
    inputs = [_image_or_grid(n, len(s.shape)) for n, s in zip(tensor_names(call), call.specs, strict=True)]
    mask = call.arg("output_mask") or [True]
    names = [n for n, wanted in zip(("input", "grid"), mask, strict=False) if wanted]
    outputs = [_image_or_grid(n, len(m.shape)) for n, m in zip(names, call.outs, strict=True)]
    return Labels(inputs, outputs, {"c": "sum"}, nonempty=frozenset("nc"))


def _image_or_grid(name: str, ndim: int) -> list[str | None]:
    return ["n", None if name == "grid" else "c", *[None] * (ndim - 2)]


def _of(names: str, ndims: tuple[int, ...], linear: bool = False) -> dict[str, Rule]:
    """Rules for names with ``?`` for the number of dims, and for their gradients, which are linear where the values are."""
    return {
        name.replace("?", str(n)) + suffix: Rule(planes(n, linear), whole=True)
        for name in names.split()
        for n in ndims
        for suffix in ("", "_backward")
    }


TABLE = {
    "grid_sampler_2d": Rule(sampled),
    "grid_sampler_3d": Rule(sampled),
    "grid_sampler_2d_backward": Rule(sampled),
    "grid_sampler_3d_backward": Rule(sampled),
    **_of("max_pool?d_with_indices adaptive_max_pool?d max_unpool?d", (2, 3)),
    **_of("avg_pool?d _adaptive_avg_pool?d", (2, 3), linear=True),
    **_of("reflection_pad?d replication_pad?d", (1, 2, 3), linear=True),
    **_of("upsample_nearest?d _upsample_nearest_exact?d", (1, 2, 3), linear=True),
    **_of("upsample_linear?d", (1,), linear=True),
    **_of("upsample_bilinear?d upsample_bicubic?d _upsample_bilinear?d_aa _upsample_bicubic?d_aa", (2,), linear=True),
    **_of("upsample_trilinear?d", (3,), linear=True),
}
