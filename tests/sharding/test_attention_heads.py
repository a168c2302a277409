"""Query heads cut anywhere while keys and values are whole: nothing is gathered, and devices without a head do no harm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, explain, init_device_mesh
from dtorch.core.spec import Spec
from dtorch.sharding.planner import plan_call
from tests.sharding.harness import not_replicated, place, run, same, values

_aten = torch.ops.aten

CUTS = {
    (9, 3): [(3, 2, 2, 2), (2, 2, 2, 2, 1), (4, 5), (1, 8), (6, 3), (0, 9), (9, 0, 0)],
    (4, 2): [(2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 0), (3, 1), (0, 0, 4)],
    (3, 1): [(2, 1), (1, 1, 1), (1, 1, 1, 0, 0), (3, 0)],
    (2, 2): [(1, 1, 0), (0, 1, 0, 1), (2, 0)],
}
CASES = [(heads, cut) for heads, cuts in CUTS.items() for cut in cuts]


def inputs(heads: tuple[int, int], length: int = 5) -> list[torch.Tensor]:
    query, groups = heads
    return [values(2, query, length, 4), values(2, groups, 6, 4, seed=1), values(2, groups, 6, 4, seed=2)]


def compare(shape, placements, plain, mask=None, causal=False):
    """Forward and backward against plain torch; returns output, gradients, and the report of what was moved."""
    mesh = init_device_mesh("cpu", shape)
    placed = [place(t, mesh, p).requires_grad_() for t, p in zip(plain, placements, strict=True)]
    plain = [t.clone().requires_grad_() for t in plain]
    expected = F.scaled_dot_product_attention(*plain, mask, is_causal=causal, enable_gqa=True)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    wanted = torch.autograd.grad(expected, plain, weight)
    with explain() as report:
        out = not_replicated(lambda: F.scaled_dot_product_attention(*placed, mask, is_causal=causal, enable_gqa=True))
        grads = not_replicated(lambda: torch.autograd.grad(out, placed, place(weight, mesh, out.placements)))
    for result, right in zip((out, *grads), (expected, *wanted), strict=True):
        same(result, right.detach(), "here")
    return out, grads, report


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "mask of each head"])
@pytest.mark.parametrize(("heads", "cut"), CASES)
def test_any_cut(heads, cut, kind):
    query = Shard(1, cut)
    whole = [Replicate()]
    mask = {"mask": values(2, 1, 5, 6, seed=3), "mask of each head": values(1, heads[0], 5, 6, seed=3)}.get(kind)
    out, grads, report = compare((len(cut),), [[query], whole, whole], inputs(heads), mask, kind == "causal")
    assert not report.events
    assert out.placements == grads[0].placements == place(inputs(heads)[0], out.device_mesh, [query]).placements


@pytest.mark.parametrize("first", [Shard(0), Replicate(), Shard(2)], ids=str)
@pytest.mark.parametrize(("heads", "cut"), CASES)
def test_on_a_second_axis(heads, cut, first):
    keys = [Shard(0) if first == Shard(0) else Replicate(), Replicate()]
    _, _, report = compare((2, len(cut)), [[first, Shard(1, cut)], keys, keys], inputs(heads))
    assert not report.events


@pytest.mark.parametrize("sizes", [((5, 4), (3, 2, 2, 2)), ((1, 8), (1, 0, 5, 3)), ((9, 0), (4, 5, 0, 0))])
def test_two_axes_cut_the_heads(sizes):
    whole = [Replicate(), Replicate()]
    _, _, report = compare((2, 2), [[Shard(1, sizes[0]), Shard(1, sizes[1])], whole, whole], inputs((9, 3)))
    assert not report.events


@pytest.mark.parametrize(("heads", "cut"), CASES)
def test_heads_side_by_side_in_memory(heads, cut):
    """As models have them: (batch, positions, features) is viewed as heads, and viewed back."""
    query, groups = heads

    def fn(x, *keys):
        q = x.view(2, 5, query, 4).transpose(1, 2)
        k, v = (t.view(2, 6, groups, 4).transpose(1, 2) for t in keys)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(2, 5, query * 4)

    plain = [values(2, 5, query * 4), values(2, 6, groups * 4, seed=1), values(2, 6, groups * 4, seed=2)]
    mesh = init_device_mesh("cpu", (len(cut),))
    split = Shard(2, tuple(4 * n for n in cut))
    placed = [place(t, mesh, [p]) for t, p in zip(plain, (split, Replicate(), Replicate()), strict=True)]
    with explain() as report:
        actual = not_replicated(lambda: run(fn, placed, True))
    # The loss of the test is a sum over all pieces.
    assert {event.comm.operator for event in report.events} <= {"aten::add.Tensor"}
    same(actual, run(fn, plain, True), "here")


def test_keys_that_are_split_too():
    split = [Shard(1)]
    compare((3,), [split, split, split], inputs((2, 2)))
    compare((2,), [[Shard(1, (4, 5))], split, split], inputs((9, 3)))


def test_values_that_are_not_finite_stay_with_their_queries():
    query, key, value = inputs((2, 2))
    value[:, 0] = torch.inf
    compare((3,), [[Shard(1, (1, 1, 0))], [Replicate()], [Replicate()]], [query, key, value])


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize("cut", [(3, 2, 2, 2), (9, 0, 0, 0)])
def test_cuda_kernels_are_planned_without_moving_anything(name, cut):
    mesh = init_device_mesh("cuda", (4,))

    def spec(*shape, at=None):
        return Spec.make(mesh, [at or (Shard(1, cut) if len(shape) > 1 else Replicate())], shape, torch.float16)

    q, out, lse = spec(2, 9, 5, 8), spec(2, 9, 5, 8), spec(2, 9, 5)
    k = spec(2, 3, 5, 8, at=Replicate())
    if name == "efficient_attention":
        q, k = spec(2, 9, 5, 8), spec(2, 9, 5, 8, at=Replicate())
        mask, state = spec(2, 9, 5, 5), spec()
        calls = [(q, k, k, mask, True), (out, q, k, k, mask, out, spec(2, 9, 32), state, state, 0.0, [True] * 4, False)]
    elif name == "cudnn_attention":
        one = spec()
        calls = [(q, k, k, None, True), (out, q, k, k, out, lse, one, one, None, None, None, 5, 5, 0.0, False)]
    else:
        calls = [(q, k, k), (out, q, k, k, out, lse, None, None, 5, 5, 0.0, False, spec(2), spec())]
    for suffix, args in zip(("", "_backward"), calls, strict=True):
        plan = plan_call(getattr(_aten, f"_scaled_dot_product_{name}{suffix}").default, args, {})
        assert plan.how == "rule" and not plan.comms
        assert plan.outs[0].placements == q.placements
