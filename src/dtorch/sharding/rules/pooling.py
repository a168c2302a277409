"""Operators on planes, the last dims: pooling, resizing and padding, each plane by itself, so the dims before may be sharded."""

from __future__ import annotations

from ..call import OpCall
from ..labels import Dim, Labels, PartialRow
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
    mask = call.arg("output_mask")
    # The kernels give a grid's gradient whether it is wanted or not.
    names = ["input"] if mask is None else [*["input"] * mask[0], "grid"]
    outputs = [_image_or_grid(n, len(m.shape)) for n, m in zip(names, call.outs, strict=True)]
    return Labels(inputs, outputs, {"c": "sum"}, nonempty=frozenset("nc"))


def _image_or_grid(name: str, ndim: int) -> list[str | None]:
    return ["n", None if name == "grid" else "c", *[None] * (ndim - 2)]


def fractional(ndim: int) -> RuleFn:
    """Rule of fractional pooling: images and channels, each with samples of its own."""

    def shard(call: OpCall) -> Labels:
        outer = letters(len(call.arg("self").shape) - ndim)

        def row(name: str, length: int) -> list[str | None]:
            # Samples are of (images, channels, dims), also where there is but one image.
            first = [None] * (2 - len(outer)) if name == "random_samples" else []
            return [*first, *outer, *[None] * (length - len(first) - len(outer))]

        inputs = [row(n, len(s.shape)) for n, s in zip(tensor_names(call), call.specs, strict=True)]
        present = frozenset(c for c in outer if c is not None)
        return Labels(inputs, [row("", len(m.shape)) for m in call.outs], nonempty=present)

    return shard


def windows(call: OpCall) -> Labels:
    """``im2col``: every channel gives as many rows as a window has places."""
    images = ["n"] if len(call.specs[0].shape) == 4 else []
    places = call.arg("kernel_size")[0] * call.arg("kernel_size")[-1]
    linear = [PartialRow((True,))]
    return Labels([[*images, "c", None, None]], [[*images, ("c", places), None]], partial=linear, nonempty=frozenset("nc"))


def shuffled(call: OpCall) -> Labels:
    """``pixel_shuffle`` and its inverse: channels become places, a square of them for each."""
    factor = call.arg("upscale_factor") or call.arg("downscale_factor")
    outer = letters(len(call.specs[0].shape) - 3)
    deep: list[Dim] = [*outer, ("C", factor**2), "H", "W"]
    flat: list[Dim] = [*outer, "C", ("H", factor), ("W", factor)]
    ins, outs = (deep, flat) if "upscale_factor" in call.bound else (flat, deep)
    return Labels([ins], [outs], partial=[PartialRow((True,))], nonempty=frozenset([*(c for c in outer if c), "C", "H", "W"]))


def _of(names: str, ndims: tuple[int, ...], linear: bool = False) -> dict[str, Rule]:
    """Rules for names with ``?`` for the number of dims, and for their gradients, which are linear where the values are."""
    return {
        name.replace("?", str(n)) + suffix: Rule(planes(n, linear), whole=True)
        for name in names.split()
        for n in ndims
        for suffix in ("", "_backward")
    }


TABLE = {
    **{f"fractional_max_pool{n}d{suffix}": Rule(fractional(n)) for n in (2, 3) for suffix in ("", "_backward")},
    "im2col": Rule(windows),
    "pixel_shuffle": Rule(shuffled),
    "pixel_unshuffle": Rule(shuffled),
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
