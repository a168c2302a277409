"""The differential test of sharding rules: one program on plain torch and on global tensors, over placements of every input.

``check(fn, *inputs)`` is all that most rule tests need. Plain ``fn(*inputs)`` is the oracle; the harness places every
input in every way (replicated, split on each dim evenly, unevenly and with empty pieces, partial where it is floating),
on one-axis meshes of 2 and 3 and on a (2, 2) mesh, and compares values, shapes, dtypes, local shapes and, if asked, gradients.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Placement, Placements, balanced
from dtorch.core.program import Fetch
from dtorch.core.spec import Spec
from dtorch.tensor.moving import mesh_info

MESHES = ((2,), (3,), (2, 2))
PARTIAL_OPS = ("sum",)
LIMIT = 80
# 1 in a normal run; a large number tries every combination there is.
SCALE = int(os.environ.get("DTORCH_TEST_SCALE", "1"))


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, distinct: bool = False) -> torch.Tensor:
    """Multiples of 1/8 of both signs, so that sums of few of them are exact; without ties if ``distinct``."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if distinct:
        flat = torch.randperm(count, generator=generator) - count // 2
    else:
        flat = torch.randint(-16, 17, (count,), generator=generator)
    return (
        (flat.double() / 8).to(dtype).view(shape) if dtype.is_floating_point or dtype.is_complex else flat.to(dtype).view(shape)
    )


def check(
    fn: Callable[..., Any],
    *inputs: torch.Tensor,
    grad: bool = False,
    rule: bool = True,
    meshes: Sequence[tuple[int, ...] | DeviceMesh] = MESHES,
    partial: Sequence[str] = PARTIAL_OPS,
    limit: int = LIMIT,
    whole: Sequence[int] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare ``fn`` on global tensors with ``fn`` on plain ones, over the placements of every input.

    Args:
        fn: any program of tensors; returns a tensor, or tensors and numbers in tuples, lists and dicts.
        inputs: plain tensors. Use ``values(...)`` where exact partial sums matter (comparisons, ties).
        grad: compare the gradients of floating inputs too, of a weighted sum of the floating outputs.
        rule: fail where an operator ran replicated for want of a rule.
        partial: reduce ops tried for floating inputs; ``()`` for none.
        limit: at most so many combinations per mesh, drawn with a fixed seed; ``DTORCH_TEST_SCALE`` multiplies it.
        whole: numbers of the inputs that are only replicated.
        rtol, atol: tolerances; those of ``torch.testing.assert_close`` by dtype when omitted.
    """
    expected = run(fn, inputs, grad)
    for shape in meshes:
        mesh = shape if isinstance(shape, DeviceMesh) else init_device_mesh("cpu", shape)
        for placements in combinations(mesh, inputs, partial, limit, whole):
            where = f"on {mesh!r} with {[list(p) for p in placements]}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*has no sharding rule", category=RuntimeWarning)
                with dtorch.explain() as report:
                    try:
                        actual = run(fn, [place(t, mesh, p) for t, p in zip(inputs, placements, strict=True)], grad)
                    except Exception as error:
                        raise AssertionError(f"{type(error).__name__} {where}: {error}") from error
            same(actual, expected, where, rtol, atol)
            assert not (rule and report.replicated), f"ran replicated {report.replicated} {where}"


def run(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], grad: bool) -> tuple[Any, list[torch.Tensor]]:
    """The result of ``fn``, and the gradients of its floating inputs if wanted. Inputs are left as they are."""
    if not grad:
        with torch.no_grad():
            return fn(*inputs), []
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    result = fn(*inputs)
    outs = [t for t in tensors_in(result) if t.requires_grad]
    loss = sum(((t * _weights(t)).sum() for t in outs), start=torch.zeros(()))
    leaves = [t for t in inputs if t.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return result, [torch.zeros(t.shape, dtype=t.dtype) if g is None else g for g, t in zip(grads, leaves, strict=True)]


def _weights(like: torch.Tensor) -> torch.Tensor:
    """Plain, fixed weights, so that every element's gradient is told apart."""
    return (torch.arange(like.numel()) % 7 + 1).to(like.dtype).view(like.shape) / 8


def same(actual: Any, expected: Any, where: str, rtol: float | None = None, atol: float | None = None) -> None:
    """Assert that two results agree in structure, values, shapes and dtypes, and local tensors with their specs."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{type(actual).__name__} instead of a tensor {where}"
        assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)} {where}"
        assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype} {where}"
        got = actual.detach()
        if isinstance(got, dtorch.Tensor):
            pieces_fit(got, where)
            got = got.to_torch()
        torch.testing.assert_close(
            got, expected.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}\n{text}"
        )
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{len(actual)} results, expected {len(expected)} {where}"
        for a, e in zip(actual, expected, strict=True):
            same(a, e, where, rtol, atol)
    elif isinstance(expected, dict):
        for key, e in expected.items():
            same(actual[key], e, where, rtol, atol)
    else:
        assert actual == expected, f"{actual!r}, expected {expected!r} {where}"


def pieces_fit(tensor: dtorch.Tensor, where: str = "", ordered: bool = False) -> None:
    """Assert that the local tensors have exactly the shapes and dtype that the spec promises, and allow the same views.

    ``ordered`` asks of every layout what is otherwise asked of contiguous ones: dims lie in memory in the order of the whole.
    """
    spec = tensor._spec
    assert tensor.shape == spec.shape and tensor.stride() == spec.stride and tensor.dtype == spec.dtype, (
        f"{spec} is not what the tensor says {where}"
    )
    pieces = tensor._value.client.request(Fetch(tensor._value.handle, mesh_info(spec.mesh), list(spec.axes), describe=True))
    assert len(pieces) == len(spec.boxes), f"{len(pieces)} pieces, {spec} has {len(spec.boxes)} {where}"
    for number, ((shape, stride, dtype), (_, wanted)) in enumerate(zip(pieces, spec.boxes, strict=True)):
        assert tuple(shape) == wanted, f"local shape {tuple(shape)} of piece {number}, {spec} promises {wanted} {where}"
        assert getattr(torch, dtype) == spec.dtype, f"local dtype {dtype} of piece {number}, {spec} promises {spec.dtype} {where}"
        piece = torch.empty_strided(shape, stride, device="meta")
        # A program may view what is contiguous; the same view must be possible of every piece.
        assert piece.is_contiguous() or not spec.meta.is_contiguous(), (
            f"local stride {stride} of piece {number}, {spec} is contiguous {where}"
        )
        wanted_order = [d for d in _order(spec.stride) if shape[d] > 1]
        assert not ordered or piece.numel() == 0 or wanted_order == [d for d in _order(stride) if shape[d] > 1], (
            f"local stride {stride} of piece {number} of shape {shape}, {spec} has {spec.stride} {where}"
        )


def _order(stride: Sequence[int]) -> list[int]:
    """Dims from the largest stride to the smallest."""
    return sorted(range(len(stride)), key=lambda d: -stride[d])


def stays(fn: Callable[..., Any], *inputs: torch.Tensor, mesh: Sequence[int], placements: Sequence[Sequence[Placement]]) -> Any:
    """Assert that under these placements ``fn`` is right, moves nothing and has rules; returns the global result.

    Args:
        inputs: plain tensors.
        mesh: shape of a CPU mesh.
        placements: of each input.
    """
    made = init_device_mesh("cpu", tuple(mesh))
    placed = [place(t, made, tuple(p)) for t, p in zip(inputs, placements, strict=True)]
    with torch.no_grad():
        result = without_communication(fn, *placed)
        same(result, fn(*inputs), f"with {placements}")
    return result


def without_communication(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Run ``fn`` on global tensors and assert that nothing moved and nothing ran replicated; returns its result."""
    with dtorch.explain() as report:
        result = fn(*tensors)
    assert not report.events, f"communicates:\n{report}"
    assert not report.replicated, f"ran replicated: {report.replicated}"
    return result


def not_replicated(fn: Callable[..., Any], *tensors: torch.Tensor, at_most_nbytes: int | None = None) -> Any:
    """Run ``fn`` on global tensors and assert that no operator lacked a rule, and a bound on bytes moved; returns its result."""
    with dtorch.explain() as report:
        result = fn(*tensors)
    assert not report.replicated, f"ran replicated: {report.replicated}"
    assert at_most_nbytes is None or report.nbytes <= at_most_nbytes, (
        f"moves {report.nbytes} bytes, more than {at_most_nbytes}:\n{report}"
    )
    return result


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> dtorch.Tensor:
    """A global tensor of this value whose partial pieces are all different, and so no help to a rule that ignores them."""
    spec = Spec.make(mesh, placements, tensor.shape, tensor.dtype)
    parts = {(): tensor.detach()}
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial):
            parts = {
                (*at, i): part
                for at, whole in parts.items()
                for i, part in enumerate(_parts(whole, placement.reduce_op, mesh.shape[axis]))
            }
    partial_axes = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]

    def local(coord: tuple[int, ...]) -> torch.Tensor:
        offset, size = spec.local_box(coord)
        whole = parts[tuple(coord[a] for a in partial_axes)]
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]

    return dtorch.from_local(local, mesh, spec.placements)


def _parts(whole: torch.Tensor, op: str, k: int) -> list[torch.Tensor]:
    """k tensors that reduce to ``whole``; multiples of 1/8 stay such, so that sums are exact."""
    if k == 1:
        return [whole]
    noise = [values(*whole.shape, dtype=whole.dtype, seed=11 + i) for i in range(k - 1)]
    if op == "sum":
        return [*noise, whole - sum(noise)]
    if op == "avg":
        return [*(whole + n for n in noise), whole - sum(noise)]
    if op == "prod":
        return [torch.full_like(whole, 2), whole / 2, *[torch.ones_like(whole)] * (k - 2)]
    sign = -1 if op == "max" else 1
    return [whole if i == 1 else whole + sign * values(*whole.shape, dtype=whole.dtype, seed=11 + i).abs() for i in range(k)]


def combinations(
    mesh: DeviceMesh,
    inputs: Sequence[torch.Tensor],
    partial: Sequence[str] = PARTIAL_OPS,
    limit: int = LIMIT,
    whole: Sequence[int] = (),
) -> Iterator[tuple[Placements, ...]]:
    """Placements of every input together: all combinations, or ``limit`` of them drawn with a fixed seed."""
    choices = [[(Replicate(),) * mesh.ndim] if i in whole else placements_of(mesh, t, partial) for i, t in enumerate(inputs)]
    total = 1
    for row in choices:
        total *= len(row)
    limit *= SCALE
    if total <= limit:
        yield from itertools.product(*choices)
        return
    draw = random.Random(0)
    for number in (draw.randrange(total) for _ in range(limit)):
        chosen = []
        for row in choices:
            number, at = divmod(number, len(row))
            chosen.append(row[at])
        yield tuple(chosen)


def placements_of(mesh: DeviceMesh, tensor: torch.Tensor, partial: Sequence[str] = PARTIAL_OPS) -> list[Placements]:
    """Every placement of a tensor that is worth a test: each axis in turn, given what the axes before it split."""
    rows: list[tuple[Placement, ...]] = [()]
    for axis in range(mesh.ndim):
        rows = [(*row, p) for row in rows for p in _on_axis(mesh, row, axis, tensor, partial)]
    return rows


def _on_axis(
    mesh: DeviceMesh, outer: tuple[Placement, ...], axis: int, tensor: torch.Tensor, partial: Sequence[str]
) -> Iterator[Placement]:
    yield Replicate()
    if tensor.is_floating_point():
        # Reductions of different kinds do not commute, so such a mix has no one meaning; sum and avg do.
        kinds = {p.reduce_op for p in outer if isinstance(p, Partial)}
        yield from (Partial(op) for op in partial if {op, *kinds} <= {"sum", "avg"} or kinds <= {op})
    k = mesh.shape[axis]
    rest = (Replicate(),) * (mesh.ndim - axis)
    for d in range(tensor.ndim):
        spec = Spec.make(mesh, (*outer, *rest), tensor.shape, tensor.dtype)
        splits = [a for a in spec.sharding_axes(d)]
        segments = spec.sizes_on(splits[-1]) if splits else (tensor.shape[d],)
        for cut in (balanced, _uneven, _with_empty):
            yield Shard(d, tuple(s for n in segments for s in cut(n, k)))


def _uneven(n: int, k: int) -> tuple[int, ...]:
    """Later pieces longer, as far as n allows."""
    first = tuple(min(1, n) for _ in range(k - 1)) if n >= k else (0,) * (k - 1)
    return (*first, n - sum(first))


def _with_empty(n: int, k: int) -> tuple[int, ...]:
    """All of it on one of the middle devices."""
    return tuple(n if i == (k - 1) // 2 else 0 for i in range(k))


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [t for item in result for t in tensors_in(item)] if isinstance(result, list | tuple) else []
