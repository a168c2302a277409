"""Small programs on global tensors, each for one kind of fault that is easy to make.

Each case is (name, kind, mesh shape, inputs, fn). ``inputs`` maps a name to (values or shape, placements), the placements
written ``R``, ``S0``, ``S1``, ``P``. ``fn(**inputs)`` returns a tensor or a tuple of tensors, and must equal ``fn`` on plain
torch tensors: values, shapes and dtypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CASES = [
    # kind: uneven and empty shards
    ("gather_5_over_4", "uneven", (4,), {"x": ((5, 10), ["S0"])}, lambda x: x * 1),
    ("mean_uneven", "uneven", (4,), {"x": ((5, 3), ["S0"])}, lambda x: (x.mean(), x.mean(0))),
    ("offsets_two_axes_uneven", "uneven", (2, 4), {"x": (torch.arange(16.0), ["S0", "S0"])}, lambda x: x + torch.arange(16.0)),
    ("flatten_uneven", "uneven view", (4,), {"x": ((6, 256), ["S0"])}, lambda x: x.view(-1)),
    ("view_across_shards", "view that needs communication", (4,), {"x": ((12, 8), ["S1"])}, lambda x: x.view(-1, 6)),
    (
        "linear_on_sharded_sequence",
        "view inside a composite operator",
        (4,),
        {"x": ((2, 7, 4), ["S1"]), "w": ((4, 4), ["R"]), "b": ((4,), ["R"])},
        lambda x, w, b: F.linear(x, w, b),
    ),
    (
        "heads_do_not_divide",
        "uneven heads",
        (2,),
        {"x": ((2, 5, 9 * 4), ["S2"])},
        lambda x: x.view(2, 5, 9, 4).transpose(1, 2).contiguous().sum(-1),
    ),
    (
        "more_devices_than_heads",
        "empty shards",
        (4,),
        {"q": ((1, 3, 5, 4), ["S1"]), "k": ((1, 3, 5, 4), ["S1"]), "v": ((1, 3, 5, 4), ["S1"])},
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    # kind: numbers that are looked up in pieces
    (
        "rows_of_a_split_table",
        "lookup",
        (2,),
        {"w": ((7, 4), ["S0"]), "i": (torch.tensor([[0, 6, 3], [4, 4, 1]]), ["R"])},
        lambda w, i: F.embedding(i, w),
    ),
    (
        "loss_over_split_classes",
        "lookup",
        (3,),
        {"x": ((4, 7), ["S1"]), "i": (torch.tensor([0, -100, 6, 3]), ["R"])},
        lambda x, i: F.cross_entropy(x, i),
    ),
    ("rows_by_number", "lookup", (2,), {"x": ((7, 4), ["S0"]), "i": (torch.tensor([6, 0, 3]), ["R"])}, lambda x, i: x[i]),
    # kind: Partial meets a non-linear or affine operator
    (
        "partial_plus_scalar",
        "partial",
        (2,),
        {"x": (torch.arange(10.0).reshape(10, 1), ["S0"])},
        lambda x: (x.sum() + 10, x.sum() + torch.tensor(10)),
    ),
    (
        "partial_times_scalars_in_turn",
        "partial, cached plans",
        (4,),
        {"x": (torch.ones(4), ["S0"])},
        lambda x: tuple(x.mean() * k for k in (1, 2, 3)),
    ),
    ("partial_norm", "partial", (2,), {"x": ((6,), ["P"])}, lambda x: (torch.linalg.vector_norm(x), x.norm(1), x.abs().max())),
    ("partial_max_min", "partial", (2,), {"x": ((4, 6), ["P"])}, lambda x: (x.max(0).values, x.amin(1), x.argmax(1))),
    (
        "partial_compare_exp_clamp",
        "partial",
        (3,),
        {"x": ((5, 5), ["P"])},
        lambda x: ((x > 0).float(), x.exp(), x.clamp(-0.1, 0.1), x**2),
    ),
    # kind: two mesh axes on one dim
    (
        "nested_shard_outer_released",
        "two axes on one dim",
        (2, 2),
        {"x": (torch.arange(8.0), ["S0", "S0"])},
        lambda x: x[::1].cumsum(0),
    ),
    (
        "strided_after_flatten",
        "interleaved layout",
        (2, 2),
        {"x": ((4, 6), ["S0", "S1"])},
        lambda x: x.reshape(24) * torch.arange(24.0),
    ),
    # kind: operators that are easily forgotten
    ("diagonal", "missing operator", (2,), {"x": ((4, 4), ["S0"])}, lambda x: torch.diagonal(x)),
    (
        "nonzero",
        "data-dependent shape",
        (2,),
        {"x": (torch.tensor([[0, 1], [2, 0], [3, 4]]), ["S0"])},
        lambda x: torch.nonzero(x),
    ),
    ("masked_fill_inplace", "missing in-place", (3,), {"x": ((4, 5), ["S0"])}, lambda x: x.clone().masked_fill_(x > 0, 0.0)),
    (
        "select_on_sharded_dim",
        "missing operator",
        (4,),
        {"x": ((5, 3), ["S0"])},
        lambda x: (x[4], x.select(0, 1), x.unbind(0)[2]),
    ),
    ("amax_and_bit_view", "missing operator", (2,), {"x": ((4, 6), ["S1"])}, lambda x: (x.amax(dim=1), x.view(torch.int32))),
    ("min_with_dim_keyword", "tensor keywords", (2,), {"x": ((4, 4), ["S1"])}, lambda x: tuple(torch.min(input=x, dim=1))),
    (
        "inference_mode_matmul",
        "inference mode",
        (2,),
        {"x": ((8, 128), ["R"]), "w": ((128, 128), ["S0"])},
        lambda x, w: _inference(lambda: torch.ops.aten.matmul.default(x, w)),
    ),
    # kind: plain tensors mixed in
    (
        "plain_mask_and_positions",
        "mixed with plain tensors",
        (2,),
        {"x": ((2, 6, 8), ["S0"])},
        lambda x: torch.where(torch.ones(6, 8).tril().bool(), x, torch.tensor(-1.0)) + torch.arange(8),
    ),
    (
        "copy_from_plain",
        "mixed with plain tensors",
        (2,),
        {"x": ((4, 3), ["S0"])},
        lambda x: x.clone().copy_(torch.arange(12.0).view(4, 3)),
    ),
    (
        "index_with_plain",
        "mixed with plain tensors",
        (3,),
        {"x": ((7, 3), ["S0"])},
        lambda x: (x[torch.tensor([6, 0, 3])], x.index_select(0, torch.tensor([2, 2]))),
    ),
    (
        "index_put_accumulate",
        "scatter into shards",
        (3,),
        {"x": ((7,), ["S0"])},
        lambda x: x.clone().index_put_((torch.tensor([0, 6, 6]),), torch.tensor([1.0, 2.0, 3.0]), accumulate=True),
    ),
    (
        "embedding_vocab_split",
        "vocabulary shards",
        (3,),
        {"w": ((10, 4), ["S0"])},
        lambda w: F.embedding(torch.tensor([[0, 9, 4], [3, 3, 7]]), w),
    ),
    (
        "cross_entropy_vocab_split",
        "vocabulary shards",
        (4,),
        {"x": ((6, 10), ["S1"])},
        lambda x: F.cross_entropy(x, torch.tensor([0, 9, 3, -100, 5, 7])),
    ),
    # kind: a decomposition run on local shapes instead of on the global tensor (gradients come out too big)
    (
        "mean_losses_and_gradients",
        "decomposition",
        (4,),
        {"x": ((12, 3), ["S0"]), "y": ((12, 3), ["S0"])},
        lambda x, y: _grads(
            [F.mse_loss, F.smooth_l1_loss, F.huber_loss, lambda a, b: F.soft_margin_loss(a, b.detach().sign())], x, y
        ),
    ),
    (
        "mean_losses_uneven_and_empty",
        "decomposition, empty shards",
        (4,),
        {"x": ((9, 3), ["S0"]), "y": ((9, 3), ["S0"])},
        lambda x, y: _grads([F.mse_loss, F.smooth_l1_loss, F.huber_loss], x, y),
    ),
    (
        "weighted_cross_entropy",
        "weighted mean",
        (3,),
        {"x": ((7, 5), ["S0"])},
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 4, -100, 2, 3, 1]), weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])),
    ),
    # kind: writes through views of a sharded dim
    ("view_writes", "aliasing", (2,), {"x": ((4, 4), ["S0"])}, lambda x: _view_writes(x)),
    (
        "scatter_add_inplace_on_sharded_dim",
        "in-place keeps placement",
        (3,),
        {"x": ((7, 2), ["S0"])},
        lambda x: x.clone().scatter_add_(0, torch.tensor([[6, 0], [6, 3]]), torch.ones(2, 2)),
    ),
    # kind: the cache key forgets a static argument, or metadata goes stale
    (
        "topk_k_changes",
        "plan cache",
        (2,),
        {"x": ((3, 8), ["S0"])},
        lambda x: (x.topk(2).values, x.topk(5).values, x.topk(2).indices),
    ),
    (
        "squeeze_inplace_and_vecmat",
        "metadata",
        (2,),
        {"x": ((4, 1), ["S0"]), "w": ((4, 3), ["S0"])},
        lambda x, w: (x.clone().squeeze_(1), x.squeeze(1) @ w),
    ),
    # kind: reading values
    (
        "partial_item_and_iteration",
        "reading",
        (3,),
        {"x": (torch.arange(6.0).reshape(3, 2), ["S0"])},
        lambda x: torch.tensor([float(x.sum()), sum(r.sum().item() for r in x), *x.flatten().tolist()]),
    ),
    # kind: gradients that meet plain zeros
    (
        "backward_makes_plain_tensors",
        "mixed in backward",
        (2,),
        {"x": ((4, 5), ["S0"])},
        lambda x: _grads(
            [
                lambda a, b: a.cumprod(0).sum(),
                lambda a, b: a.index_put((torch.tensor([1]),), b[0]).sum(),
                lambda a, b: F.hardswish(a).sum() + F.relu6(a).sum(),
            ],
            x,
            x * 2,
        ),
    ),
]


def _grads(fns, x, y):
    out = []
    for fn in fns:
        a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
        loss = fn(a, b)
        out.append(loss.detach())
        out += [g for g in torch.autograd.grad(loss, (a, b), allow_unused=True) if g is not None]
    return tuple(out)


def _view_writes(x):
    z = x.clone()
    z[0, 0] = 5.0
    z[1].mul_(3)
    z.diagonal().fill_(2)
    z.t()[3].zero_()
    z.view(-1)[::5] += 1
    return z


def _inference(fn):
    with torch.inference_mode():
        return fn()
