"""What common operators communicate, to the byte: nothing where pieces fit, and never a whole tensor where less will do.

Each row is an operator, the placements of its inputs, those of its (first) result, and the collectives in order: kind, axis
and the bytes that all devices together receive. One axis is a mesh of 4, two are a mesh of 2 x 2; float32 has 4 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtorch import Partial, Replicate, Shard, explain, init_device_mesh
from dtorch.core.placements import Placement
from tests.sharding.harness import place

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

Shapes = Sequence[tuple[int, ...]]
MATRIX, IMAGES, HEADS = (8, 8), (4, 4, 8, 8), (4, 4, 8, 8)
Program = tuple[Callable[..., Any], Shapes]


def loss_in_chunks(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4))


def seeded(draw: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    return draw()


PROGRAMS: dict[str, Program] = {
    "mm": (torch.mm, [MATRIX] * 2),
    "bmm": (torch.bmm, [(4, 4, 4)] * 2),
    "linear": (F.linear, [MATRIX] * 2),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), [MATRIX] * 2),
    "add": (torch.add, [MATRIX] * 2),
    "mul": (torch.mul, [MATRIX] * 2),
    "where": (lambda a, b: torch.where(a > 0, a, b), [MATRIX] * 2),
    "relu": (torch.relu, [MATRIX]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0), [MATRIX]),
    "clone": (torch.clone, [MATRIX]),
    "tril": (torch.tril, [MATRIX]),
    "glu": (lambda x: F.glu(x, 1), [MATRIX]),
    "sum": (torch.sum, [MATRIX]),
    "mean1": (lambda x: x.mean(1), [MATRIX]),
    "amax0": (lambda x: x.amax(0), [MATRIX]),
    "argmax1": (lambda x: x.argmax(1), [MATRIX]),
    "std1": (lambda x: x.std(1), [MATRIX]),
    "var_mean": (lambda x: torch.var_mean(x, 0), [MATRIX]),
    "norm": (torch.norm, [MATRIX]),
    "logsumexp": (lambda x: x.logsumexp(0), [MATRIX]),
    "softmax1": (lambda x: torch.softmax(x, 1), [MATRIX]),
    "cumsum1": (lambda x: x.cumsum(1), [MATRIX]),
    "topk": (lambda x: x.topk(2, 1), [MATRIX]),
    "sort0": (lambda x: x.sort(0), [MATRIX]),
    "sort1": (lambda x: x.sort(1), [MATRIX]),
    "t": (torch.t, [MATRIX]),
    "reshape": (lambda x: x.reshape(4, 2, 8), [MATRIX]),
    "flatten": (torch.flatten, [MATRIX]),
    "slice0": (lambda x: x[2:6], [MATRIX]),
    "split0": (lambda x: x.split(2, 0), [MATRIX]),
    "cat0": (lambda x: torch.cat([x, x], 0), [MATRIX]),
    "stack": (lambda x: torch.stack([x, x]), [MATRIX]),
    "roll": (lambda x: x.roll(1, 0), [MATRIX]),
    "flip": (lambda x: x.flip(0), [MATRIX]),
    "pad": (lambda x: F.pad(x, (1, 1)), [MATRIX]),
    "index_select0": (lambda x, i: x.index_select(0, i), [MATRIX, (3,)]),
    "gather1": (lambda x, i: x.gather(1, i), [MATRIX, MATRIX]),
    "embedding": (F.embedding, [(4,), MATRIX]),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), [MATRIX]),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), [MATRIX]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [IMAGES]),
    "group_norm": (lambda x: F.group_norm(x, 2), [IMAGES]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [IMAGES]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(4, 64, 8, 8), (4, 64, 3, 3)]),
    "attention": (F.scaled_dot_product_attention, [HEADS] * 3),
    "attention_causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [HEADS] * 3),
    "cross_entropy": (F.cross_entropy, [MATRIX, (8,)]),
    "mse_loss": (F.mse_loss, [MATRIX] * 2),
    "linear_cross_entropy": (loss_in_chunks, [(32, 8), (16, 8), (32,)]),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([3, 8], dtype=torch.int32)), [(8, 8), (2, 8, 8)]),
    "multinomial": (lambda x: seeded(lambda: torch.multinomial(x.abs(), 2)), [MATRIX]),
    "bernoulli": (lambda x: seeded(lambda: torch.bernoulli(x.sigmoid())), [MATRIX]),
    "normal": (lambda m, s: seeded(lambda: torch.normal(m, s.abs())), [MATRIX] * 2),
    "all_true": (lambda x: torch.ops.aten._is_all_true(x > 0), [MATRIX]),
    "masked_scatter": (lambda x, s: x.masked_scatter(x > 0, s), [MATRIX] * 2),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), [MATRIX]),
}
INDICES = {"embedding": 0, "index_select0": 1, "gather1": 1, "cross_entropy": 1, "linear_cross_entropy": 2}
"""Which input holds indices."""
NEWER = ("linear_cross_entropy", "grouped_mm")
"""Functions that an older PyTorch does not have."""

Row = tuple[str, list[list[Placement]], list[Placement], list[str]]
ROWS: list[Row] = [
    ("mm", [[S0], [R]], [S0], []),
    ("mm", [[R], [S1]], [S1], []),
    ("mm", [[S1], [S0]], [P], []),
    ("mm", [[S0], [S1]], [S0], ["all_gather tp 768"]),
    ("mm", [[S1], [R]], [R], ["all_gather tp 768"]),
    ("mm", [[P], [R]], [P], []),
    ("mm", [[S0, R], [R, S1]], [S0, S1], []),
    ("mm", [[S0, S1], [R, S0]], [S0, P], []),
    ("add", [[S0], [S0]], [S0], []),
    ("add", [[S0], [R]], [S0], []),
    ("add", [[S0], [S1]], [S0], ["all_to_all tp 192"]),
    ("add", [[P], [P]], [P], []),
    ("add", [[P], [R]], [R], ["all_reduce tp 1536"]),
    ("add", [[S0], [P]], [S0], ["reduce_scatter tp 768"]),
    ("mul", [[P], [R]], [P], []),
    ("mul", [[P], [P]], [P], ["all_reduce tp 1536"]),
    ("relu", [[S0]], [S0], []),
    ("relu", [[S1]], [S1], []),
    ("relu", [[P]], [R], ["all_reduce tp 1536"]),
    ("relu", [[S0, S1]], [S0, S1], []),
    ("sum", [[S0]], [P], []),
    ("sum", [[S1]], [P], []),
    ("sum", [[P]], [P], []),
    ("sum", [[S0, S1]], [P, P], []),
    ("mean1", [[S0]], [S0], []),
    ("mean1", [[S1]], [P], []),
    ("mean1", [[P]], [P], []),
    ("mean1", [[S0, S1]], [S0, P], []),
    ("softmax1", [[S0]], [S0], []),
    ("softmax1", [[S1]], [S1], ["all_reduce tp 192"] * 2),
    ("softmax1", [[P]], [R], ["all_reduce tp 1536"]),
    ("softmax1", [[S0, S1]], [S0, S1], ["all_reduce tp 64"] * 2),
    ("t", [[S0]], [S1], []),
    ("t", [[S1]], [S0], []),
    ("t", [[P]], [P], []),
    ("t", [[S0, S1]], [S1, S0], []),
    ("layer_norm", [[S0]], [S0], []),
    ("layer_norm", [[S1]], [S1], ["all_reduce tp 192"] * 2),
    ("layer_norm", [[P]], [R], ["all_reduce tp 1536"]),
    ("layer_norm", [[S0, S1]], [S0, S1], ["all_reduce tp 64"] * 2),
    ("amax0", [[S0]], [Partial("max")], []),
    ("amax0", [[S1]], [S0], []),
    ("amax0", [[P]], [R], ["all_reduce tp 1536"]),
    ("amax0", [[S0, S1]], [Partial("max"), S0], []),
    ("cumsum1", [[S0]], [S0], []),
    ("cumsum1", [[S1]], [S1], ["all_gather tp 384"]),
    ("cumsum1", [[P]], [P], []),
    ("cumsum1", [[S0, S1]], [S0, S1], ["all_gather tp 64"]),
    ("argmax1", [[S0]], [S0], []),
    ("argmax1", [[S1]], [R], ["all_gather tp 384", "all_gather tp 768"]),
    ("argmax1", [[P]], [R], ["all_reduce tp 1536"]),
    ("argmax1", [[S0, S1]], [S0, R], ["all_gather tp 64", "all_gather tp 128"]),
    ("reshape", [[S0]], [S0], []),
    ("reshape", [[S1]], [S2], []),
    ("reshape", [[P]], [P], []),
    ("reshape", [[S0, S1]], [S0, S2], []),
    ("slice0", [[S0]], [Shard(0, (0, 2, 2, 0))], []),
    ("slice0", [[S1]], [S1], []),
    ("slice0", [[P]], [P], []),
    ("slice0", [[S0, S1]], [S0, S1], []),
    ("cat0", [[S0]], [S0], ["all_to_all tp 192"] * 2),
    ("cat0", [[S1]], [S1], []),
    ("cat0", [[P]], [P], []),
    ("cat0", [[S0, S1]], [S0, S1], ["all_to_all dp 128"] * 2),
    ("topk", [[S0]], [S0], []),
    ("topk", [[S1]], [S0], ["all_to_all tp 192"]),
    ("topk", [[P]], [R], ["all_reduce tp 1536"]),
    ("topk", [[S0, S1]], [S0, S0], ["all_to_all tp 128"]),
    ("sort1", [[S0]], [S0], []),
    ("sort1", [[S1]], [S0], ["all_to_all tp 192"]),
    ("sort1", [[P]], [R], ["all_reduce tp 1536"]),
    ("sort1", [[S0, S1]], [S0, S0], ["all_to_all tp 128"]),
    ("std1", [[S0]], [S0], []),
    ("std1", [[S1]], [R], ["all_reduce tp 192"] * 2),
    ("std1", [[P]], [R], ["all_reduce tp 1536"]),
    ("std1", [[S0, S1]], [S0, R], ["all_reduce tp 64"] * 2),
    ("norm", [[S0]], [R], ["all_reduce tp 24"]),
    ("norm", [[S1]], [R], ["all_reduce tp 24"]),
    ("norm", [[P]], [R], ["all_reduce tp 1536"]),
    ("norm", [[S0, S1]], [R, R], ["all_reduce dp 16", "all_reduce tp 16"]),
    ("sort0", [[S0]], [S1], ["all_to_all tp 192"]),
    ("sort0", [[S1]], [S1], []),
    ("sort0", [[P]], [R], ["all_reduce tp 1536"]),
    ("sort0", [[S0, S1]], [S1, S1], ["exchange dp+tp 192"]),
    ("embedding", [[R], [S0]], [P], []),
    ("embedding", [[R], [S1]], [S1], []),
    ("embedding", [[S0], [R]], [S0], []),
    ("embedding", [[S0], [S0]], [P], ["all_gather tp 96"]),
    ("cross_entropy", [[S0], [S0]], [R], ["all_reduce tp 24"] * 2),
    ("cross_entropy", [[S1], [R]], [R], ["all_reduce tp 192", "all_reduce tp 192", "all_reduce tp 24", "all_reduce tp 24"]),
    ("cross_entropy", [[P], [R]], [R], ["all_reduce tp 1536"]),
    (
        "cross_entropy",
        [[S0, S1], [S0, R]],
        [R, R],
        ["all_reduce tp 64", "all_reduce tp 64", "all_gather tp 256", "all_reduce dp 16", "all_reduce dp 16"],
    ),
    ("attention", [[S0], [S0], [S0]], [S0], []),
    ("attention", [[S1], [S1], [S1]], [S1], []),
    ("attention", [[S2], [S2], [S2]], [S2], [*["all_to_all tp 3072"] * 3, "all_to_all tp 3456"]),
    ("attention", [[S0, S1], [S0, S1], [S0, S1]], [S0, S1], []),
    ("attention_causal", [[S1], [S1], [S1]], [S1], []),
    ("conv2d", [[S0], [R]], [S0], []),
    ("conv2d", [[R], [S0]], [S1], []),
    ("conv2d", [[S1], [S1]], [P], []),
    ("conv2d", [[S2], [R]], [S0], ["all_to_all tp 49152"]),
    ("max_pool2d", [[S0]], [S0], []),
    ("max_pool2d", [[S1]], [S1], []),
    ("max_pool2d", [[S2]], [S0], ["all_to_all tp 3072"]),
    ("batch_norm", [[S0]], [S0], ["all_reduce tp 96"] * 2),
    ("batch_norm", [[S1]], [S1], []),
    ("batch_norm", [[S2]], [S2], ["all_reduce tp 96"] * 2),
    ("group_norm", [[S0]], [S0], []),
    ("group_norm", [[S1]], [S1], ["all_to_all tp 48"] * 4),
    ("group_norm", [[S2]], [S2], ["all_reduce tp 384"] * 2),
    ("index_select0", [[S0], [R]], [S1], ["all_to_all tp 192"]),
    ("index_select0", [[S1], [R]], [S1], []),
    ("gather1", [[S0], [S0]], [S0], []),
    ("gather1", [[S1], [S1]], [S1], ["all_gather tp 768"]),
    ("bmm", [[S0], [S0]], [S0], []),
    ("bmm", [[S1], [S1]], [S1], ["all_gather tp 768"]),
    ("where", [[S0], [S0]], [S0], []),
    ("where", [[S1], [S1]], [S1], []),
    ("linear", [[S0], [S0]], [S0], ["all_gather tp 768"]),
    ("linear", [[S1], [S0]], [S1], ["all_gather tp 768"]),
    ("flatten", [[S0]], [S0], []),
    ("flatten", [[S1]], [S0], ["all_to_all tp 192"]),
    ("stack", [[S0]], [S1], []),
    ("stack", [[S1]], [S2], []),
    ("masked_fill", [[S0]], [S0], []),
    ("masked_fill", [[S1]], [S1], []),
    ("roll", [[S0]], [S0], ["exchange tp 128"]),
    ("roll", [[S1]], [S1], []),
    ("flip", [[S0]], [S0], ["exchange tp 256"]),
    ("flip", [[S1]], [S1], []),
    ("var_mean", [[S0]], [R], ["all_reduce tp 192"] * 2),
    ("var_mean", [[S1]], [S0], []),
    ("logsumexp", [[S0]], [R], ["all_reduce tp 192"] * 2),
    ("logsumexp", [[S1]], [S0], []),
    ("tril", [[S0]], [S0], []),
    ("tril", [[S1]], [S1], []),
    ("rms_norm", [[S0]], [S0], []),
    ("rms_norm", [[S1]], [S1], ["all_reduce tp 192"] * 2),
    ("mse_loss", [[S0], [S0]], [R], ["all_reduce tp 24"]),
    ("mse_loss", [[S1], [S1]], [R], ["all_reduce tp 24"]),
    ("pad", [[S0]], [S0], []),
    ("pad", [[S1]], [Shard(1, (3, 2, 2, 3))], []),
    ("split0", [[S0]], [Shard(0, (2, 0, 0, 0))], []),
    ("split0", [[S1]], [S1], []),
    ("clone", [[S0]], [S0], []),
    ("clone", [[S1]], [S1], []),
    ("glu", [[S0]], [S0], []),
    ("glu", [[S1]], [Shard(1, (2, 2, 0, 0))], ["all_to_all tp 128"]),
    ("einsum", [[S0], [S0]], [S0], ["all_gather tp 768"]),
    ("einsum", [[S1], [S1]], [P], []),
    ("linear_cross_entropy", [[S0], [R], [S0]], [R], ["all_reduce tp 24"] * 2),
    ("linear_cross_entropy", [[R], [S0], [R]], [R], ["all_reduce tp 768"] * 2 + ["all_reduce tp 24"] * 2),
    (
        "linear_cross_entropy",
        [[S0, R], [R, S0], [S0, R]],
        [R, R],
        ["all_reduce tp 256"] * 2 + ["all_reduce dp 16", "all_reduce tp 16"] * 2,
    ),
    ("grouped_mm", [[S0], [R]], [S0], []),
    ("grouped_mm", [[R], [S2]], [S1], []),
    ("grouped_mm", [[S1], [S1]], [P], []),
    ("grouped_mm", [[S0, R], [R, S2]], [S0, S1], []),
    ("multinomial", [[S0]], [S0], []),
    ("multinomial", [[S1]], [R], ["all_gather tp 768"]),
    ("bernoulli", [[S0]], [S0], []),
    ("bernoulli", [[S1]], [S1], []),
    ("bernoulli", [[S0, S1]], [S0, S1], []),
    ("normal", [[S0], [S0]], [S0], []),
    ("normal", [[S1], [R]], [S1], []),
    ("all_true", [[S0]], [Partial("min")], []),
    ("masked_scatter", [[S0], [R]], [S0], ["all_gather tp 96"]),
    ("masked_scatter", [[S1], [R]], [S1], ["all_to_all tp 48", "all_gather tp 96", "all_to_all tp 192"]),
    ("renorm", [[S0]], [S0], []),
    ("renorm", [[S1]], [S1], ["all_reduce tp 192"]),
]


def inputs_of(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in PROGRAMS[name][1]]
    if name in INDICES:
        at = INDICES[name]
        tensors[at] = torch.randint(0, 8, tensors[at].shape)
    return tensors


@pytest.mark.parametrize(("name", "placements", "out", "collectives"), ROWS)
def test_exactly_these_collectives(
    name: str, placements: list[list[Placement]], out: list[Placement], collectives: list[str]
) -> None:
    if name in NEWER and not hasattr(F, name):
        # Never under the version that constraints.txt pins, which has them all.
        pytest.skip(f"PyTorch {torch.__version__} has no {name}; the package takes versions from 2.11 on")
    program, plain = PROGRAMS[name][0], inputs_of(name)
    mesh = LINE if len(placements[0]) == 1 else GRID
    ours = [place(t, mesh, p) for t, p in zip(plain, placements, strict=True)]
    with torch.no_grad(), explain() as report:
        result, expected = program(*ours), program(*plain)
    first, right = (r[0] if isinstance(r, tuple) else r for r in (result, expected))
    assert [f"{e.comm.kind} {e.comm.axis} {e.comm.nbytes}" for e in report.events] == collectives
    assert list(first.placements) == out and not report.replicated
    torch.testing.assert_close(first.to_torch(), right, rtol=1e-4, atol=1e-4)


def test_the_table_is_large_and_has_no_row_twice() -> None:
    counts = Counter(str(row[:2]) for row in ROWS)
    assert len(ROWS) >= 60 and max(counts.values()) == 1
    assert {name for name, *_ in ROWS} == set(PROGRAMS)
