"""Fused attention against plain torch: heads, groups of heads, masks of every shape, causal and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial
from dtorch.core.spec import Spec
from dtorch.sharding.planner import plan_call
from tests.sharding.harness import check, not_replicated, place, stays, values

_aten = torch.ops.aten
LIMIT = 10


def qkv(heads: int = 4, groups: int = 4, positions: int = 5, keys: int = 5) -> list[torch.Tensor]:
    return [values(2, heads, positions, 4), values(2, groups, keys, 4, seed=1), values(2, groups, keys, 4, seed=2)]


def attend(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_every_placement(causal):
    check(lambda q, k, v: attend(q, k, v, is_causal=causal), *qkv(), grad=True, limit=20)


def test_keys_of_another_length():
    check(attend, *qkv(positions=3, keys=6), grad=True, limit=LIMIT)


def test_a_scale():
    check(lambda q, k, v: attend(q, k, v, scale=0.25), *qkv(), grad=True, limit=LIMIT)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_fewer_key_heads_than_query_heads(groups):
    inputs = qkv(heads=6, groups=groups)
    check(lambda q, k, v: attend(q, k, v, enable_gqa=True), *inputs, grad=True, limit=LIMIT)
    check(lambda q, k, v: attend(q, k, v, enable_gqa=True, is_causal=True), *inputs, grad=True, limit=LIMIT)


@pytest.mark.parametrize("shape", [(5, 6), (1, 1, 5, 6), (2, 1, 5, 6), (1, 4, 5, 6), (2, 4, 5, 6), (2, 4, 1, 6), (2, 1, 1, 6)])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks(shape, boolean):
    mask = values(*shape, seed=3)
    mask = mask > -1.5 if boolean else mask
    check(lambda q, k, v, m: attend(q, k, v, m.detach()), *qkv(keys=6), mask, grad=True, limit=LIMIT)


def test_a_mask_with_a_gradient():
    check(attend, *qkv(), values(2, 4, 5, 5, seed=3), grad=True, limit=LIMIT)


def test_dtypes():
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [t.to(dtype) for t in qkv()]
        check(attend, *inputs, grad=True, limit=6, partial=(), rtol=3e-2, atol=3e-2)


def test_heads_side_by_side_in_memory():
    def fn(x):
        q, k, v = x.view(2, 5, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return attend(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 16)

    check(fn, values(2, 5, 48), grad=True, limit=LIMIT)


def test_inference_mode():
    def fn(q, k, v):
        with torch.inference_mode():
            return attend(q, k, v, is_causal=True)

    check(fn, *qkv(), limit=LIMIT)


def test_split_heads_move_nothing_and_draw_nothing():
    split = [Shard(0), Shard(1)]
    state = torch.get_rng_state()
    out = stays(lambda q, k, v: attend(q, k, v, is_causal=True), *qkv(), mesh=(2, 2), placements=[split] * 3)
    assert out.placements == tuple(split)
    assert torch.equal(torch.get_rng_state(), state)
    out = stays(
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        *qkv(9, 3),
        mesh=(2,),
        placements=[[Shard(1, (6, 3))], *[[Shard(1)]] * 2],
    )
    assert out.placements == (Shard(1, (6, 3)),)


def test_split_positions_need_whole_keys_only():
    out = stays(attend, *qkv(), mesh=(2,), placements=[[Shard(2)], [Replicate()], [Replicate()]])
    assert out.placements == (Shard(2),)
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (place(t, mesh, (p,)).requires_grad_() for t, p in zip(qkv(), (Shard(2), Replicate(), Replicate()), strict=True))
    out = attend(q, k, v)
    grads = not_replicated(lambda: torch.autograd.grad(out, (q, k, v), out.detach()))
    assert [g.placements for g in grads] == [(Shard(2),), (Partial(),), (Partial(),)]


def test_dropout_draws_the_same_numbers_everywhere():
    def fn(q, k, v):
        torch.manual_seed(3)
        return attend(q, k, v, dropout_p=0.5)

    check(fn, *qkv(), grad=True, limit=6)


CUDA_SHAPES = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "lse": (2, 4, 5), "state": (2,), "one": ()}


@pytest.mark.parametrize(
    "name",
    ["_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"],
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_cuda_kernels_are_planned_without_moving_anything(name, placement):
    mesh = init_device_mesh("cuda", (2,))

    def spec(*shape, at=placement):
        return Spec.make(mesh, [at], shape, torch.float16)

    whole = Replicate()
    q, lse = spec(2, 4, 5, 8), spec(2, 4, 5)
    if "flash" in name:
        forward, back = (q, q, q), (q, q, q, q, q, lse, None, None, 5, 5, 0.0, False, spec(2, at=whole), spec(at=whole))
    elif "cudnn" in name:
        one = spec(at=whole)
        forward, back = (q, q, q, None, True), (q, q, q, q, q, lse, one, one, None, None, None, 5, 5, 0.0, False)
    else:
        mask, state = spec(2, 4, 5, 5), spec(at=whole)
        forward = (q, q, q, mask, True)
        back = (q, q, q, q, mask, q, spec(2, 4, 32), state, state, 0.0, [True] * 4, False)
    for func, args in ((getattr(_aten, name).default, forward), (getattr(_aten, f"{name}_backward").default, back)):
        plan = plan_call(func, args, {})
        assert plan.how != "replicated"
        assert not plan.comms
        assert not plan.define.random
        assert plan.outs[0].placements == (placement,)


def test_a_kernel_with_dropout_is_random_and_whole():
    mesh = init_device_mesh("cuda", (2,))
    q = Spec.make(mesh, [Shard(1)], (2, 4, 5, 8), torch.float16)
    plan = plan_call(_aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.5), {})
    assert plan.define.random
    assert plan.outs[0].placements == (Replicate(),)
    whole = Spec.make(mesh, [Replicate()], (), torch.int64)
    lse = Spec.make(mesh, [Shard(1)], (2, 4, 5), torch.float32)
    args = (q, q, q, q, q, lse, None, None, 5, 5, 0.5, False, whole, whole)
    plan = plan_call(_aten._scaled_dot_product_flash_attention_backward.default, args, {})
    assert plan.outs[0].placements == (Replicate(),)
