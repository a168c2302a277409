"""Operators that are easily without a rule, each on uneven shards, forward, backward and in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.harness import check, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning", "ignore::UserWarning")
MASK = torch.arange(15).view(5, 3) % 3 == 0
ROWS = torch.tensor([4, 0, 1, 0, 2])
INDEX = torch.tensor([[4, 0, 1], [0, 2, 3]])
SQUARE = torch.eye(3) * 3 + torch.arange(9.0).view(3, 3) / 8

WITHOUT_GRADIENT: dict[str, Callable[[torch.Tensor], object]] = {
    "_chunk_cat": lambda x: torch._chunk_cat([x, x * 2], 0, 2),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 0, 3]), axis=0),
    "segment_reduce by offsets": lambda x: torch.segment_reduce(x, "max", offsets=torch.tensor([0, 2, 5]), axis=0),
    "_unsafe_masked_index": lambda x: torch.ops.aten._unsafe_masked_index(x, MASK[:, :1], [ROWS], 0.0),
    "_unsafe_masked_index_put_accumulate": lambda x: torch.ops.aten._unsafe_masked_index_put_accumulate(
        x, MASK[:, :1], [ROWS], x
    ),
    "addbmm": lambda x: torch.addbmm(x[:2, :2], x.view(1, 5, 3)[:, :2], x.view(1, 5, 3)[:, 2:].transpose(1, 2)[:, :, :2]),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "as_strided of part": lambda x: x[1:].as_strided((2, 2), (3, 1)),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (3, 2), (2, 1), 1),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, torch.ones(3, 2), (3, 2), (4, 1), 1),
    "block_diag": lambda x: torch.block_diag(x, x[:2]),
    "cdist": lambda x: torch.cdist(x, x[:2]),
    "combinations": lambda x: torch.combinations(x[:, 0], 2),
    "histogram": lambda x: tuple(torch.histogram(x, 4)),
    "histogramdd": lambda x: torch.histogramdd(x, [2, 2, 2]).hist,
    "lstsq": lambda x: torch.linalg.lstsq(x + torch.eye(5, 3) * 3, x[:, :1]).solution,
    "masked_scatter": lambda x: x.masked_scatter(MASK, torch.arange(15.0)),
    "masked_select": lambda x: x.masked_select(MASK),
    "nanquantile": lambda x: torch.nanquantile(x, 0.3, 0),
    "quantile": lambda x: torch.quantile(x, torch.tensor([0.1, 0.5]), 1),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 3, 3), torch.ones(2)),
    "ctc_loss": lambda x: F.ctc_loss(
        x.view(5, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "embedding_bag": lambda x: F.embedding_bag(INDEX, x, mode="mean"),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.tensor([0, 2, 1, 1, 0])),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, -1, 1]] * 5)),
    "pad by reflection": lambda x: F.pad(x, (1, 2), "reflect"),
    "pad by replication": lambda x: (F.pad(x, (1, 2), "replicate"), F.pad(x.view(1, 5, 3), (1, 0, 2, 1), "replicate")),
    "pdist": lambda x: F.pdist(x),
    "nonzero": lambda x: (torch.nonzero(x > 0), torch.nonzero(x, as_tuple=True)),
    "nonzero_static": lambda x: torch.nonzero_static(x > 0, size=6),
    "normal": lambda x: (torch.manual_seed(0), torch.normal(x, 1.0), torch.normal(0.0, x.abs()))[1:],
    "pca_lowrank": lambda x: (torch.manual_seed(0), torch.pca_lowrank(x, 2)[1])[1],
    "svd_lowrank": lambda x: (torch.manual_seed(0), torch.svd_lowrank(x, 2)[1])[1],
    "put": lambda x: x.put(torch.tensor([14, 0]), torch.tensor([1.0, 2.0])),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "resize_": lambda x: x.clone().resize_(3, 5),
    "resize_as_": lambda x: x.clone().resize_as_(torch.empty(3, 2)),
    "searchsorted": lambda x: torch.searchsorted(x.sort(1).values, x),
    "stft": lambda x: torch.stft(x.flatten(), 4, return_complex=True, window=torch.ones(4)),
    "unfold": lambda x: (x.unfold(0, 3, 1), torch.unfold_copy(x, 1, 2, 1)),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.sort(0).values.flatten()),
    "bincount": lambda x: torch.bincount(x.abs().long().flatten(), minlength=4),
    "isin": lambda x: torch.isin(x, torch.tensor([0.0, 1.0, -0.5])),
    "histc": lambda x: (torch.histc(x, 10, -2, 2), torch.histc(x, 4, -2, 2)),
    "squeeze_copy": lambda x: (torch.squeeze_copy(x.view(5, 1, 3, 1), 2), torch.squeeze_copy(x.view(5, 1, 3, 1), 1)),
    "tensor_split": lambda x: (*x.tensor_split(4), *x.tensor_split([1, 1, 4])),
    "unbind": lambda x: (*x.unbind(0), *x.unbind(1)),
    "unflatten": lambda x: x.flatten().unflatten(0, (3, 5)),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "repeat_interleave": lambda x: (x.repeat_interleave(2, 0), x.repeat_interleave(ROWS[:5], 0), x.repeat_interleave(3)),
    "ihfft": lambda x: (torch.fft.ihfftn(x), torch.fft.ihfft2(x)),
    "fft": lambda x: (torch.fft.fft(x, dim=0).abs(), torch.fft.rfft2(x).abs(), torch.fft.irfftn(torch.fft.rfftn(x), s=(5, 3))),
    "reductions": lambda x: (x.amax(0), x.amin(1), x.argmax(0), x.argmin(), *x.max(0), *x.min(1), *x.median(0), *x.mode(1)),
    "norms of negative order": lambda x: (torch.linalg.vector_norm(x, -1, 0), torch.linalg.vector_norm(x, float("-inf"))),
    "norms of a matrix": lambda x: tuple(torch.linalg.matrix_norm(x, o) for o in (float("inf"), -1, 2, -2, "fro", "nuc")),
    "tensordot": lambda x: (torch.tensordot(x, x, 2), torch.tensordot(x, x, ([0], [0])), torch.einsum("ij,kj->ik", x, x)),
    "vector times matrix": lambda x: (x[0] @ x.t(), x @ x[1], x[0] @ x[1]),
    "expanded": lambda x: (x[:, :1].expand(5, 4), x.view(5, 1, 3).expand(2, 5, 4, 3), x[:1].expand(6, 3), x[:1].expand_as(x)),
    "of masks": lambda x: tuple(
        f(x, mask=MASK) for f in (torch.masked.sum, torch.masked.mean, torch.masked.amax, torch.masked.std, torch.masked.var)
    ),
    "fractional pooling": lambda x: F.fractional_max_pool2d(
        x.view(1, 1, 5, 3), 2, output_size=(2, 2), _random_samples=torch.full((1, 1, 2), 0.5)
    ),
    "scatter_reduce": lambda x: tuple(x.scatter_reduce(0, INDEX, x[:2], how) for how in ("sum", "prod", "mean", "amax", "amin")),
    "linear_cross_entropy of parts": lambda x: F.cross_entropy(x @ torch.ones(3, 4), torch.tensor([0, 3, 1, -100, 2])),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[:, 0], x[0]),
    "kthvalue": lambda x: (*x.kthvalue(2, 0), *x.sort(dim=0, stable=True), *torch.topk(x, 2), *torch.topk(x, 3)),
    "pad circular": lambda x: F.pad(x.view(1, 5, 3), (1, 1), "circular"),
    "determinant": lambda x: (torch.linalg.det(x[:3]), torch.linalg.qr(x)[1].abs(), torch.linalg.svdvals(x)),
}

WITH_GRADIENT: dict[str, Callable[[torch.Tensor], object]] = {
    "as_strided": lambda x: x.as_strided((3, 2), (3, 1), 1),
    "cummax": lambda x: (x.cummax(0).values, x.cummin(1).values),
    "cumprod": lambda x: (x.cumprod(0), x.cumsum(1), x.logcumsumexp(0)),
    "masked.cumprod": lambda x: torch.masked.cumprod(x, 1, mask=MASK),
    "group_norm": lambda x: F.group_norm(x.view(1, 15, 1), 5, torch.ones(15), torch.ones(15)),
    "adaptive_max_pool": lambda x: (
        F.adaptive_max_pool1d(x, 2),
        F.adaptive_max_pool2d(x.view(1, 5, 3), 2),
        F.adaptive_max_pool3d(x.view(1, 1, 5, 3), (1, 2, 2)),
    ),
    "avg_pool": lambda x: (F.avg_pool1d(x, 2), F.avg_pool2d(x.view(1, 5, 3), 2, 1), F.avg_pool3d(x.view(1, 1, 5, 3), (1, 2, 1))),
    "max_pool": lambda x: (F.max_pool1d(x, 2), F.max_pool3d(x.view(1, 1, 5, 3), (1, 2, 2), 1)),
    "hardshrink": lambda x: (F.hardshrink(x), F.hardsigmoid(x), F.hardswish(x), F.hardtanh(x), F.softshrink(x)),
    "local_response_norm": lambda x: F.local_response_norm(x.view(1, 5, 3), 2),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, MASK.float()),
    "prelu": lambda x: (F.prelu(x, torch.tensor([0.1, 0.2, 0.3])), F.prelu(x, torch.tensor(0.25))),
    "relu6": lambda x: (F.relu6(x), F.rrelu(x), F.glu(x.repeat(1, 2)), F.celu(x), F.selu(x), F.mish(x)),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs() + 1, x)),
    "slice_scatter": lambda x: (torch.slice_scatter(x, x[:2] * 2, 0, 1, 5, 2), torch.select_scatter(x, x[0] * 3, 0, 3)),
    "take": lambda x: (x.take(torch.tensor([14, 0, 0])), torch.take_along_dim(x, INDEX, 0)),
    "trace": lambda x: x.trace(),
    "index_put": lambda x: (
        x.index_put((ROWS[:2],), x[3:] * 2),
        x.index_put((torch.tensor([1, 1]),), x[:2], accumulate=True),
        x.index_add(0, ROWS, x),
        x.index_copy(0, torch.tensor([4, 1]), x[:2] * 2),
    ),
    "scatter": lambda x: (
        x.scatter(1, torch.tensor([[2, 0], [1, 2]]), x[2:4, :2] * 2),
        x.scatter_add(0, INDEX, x[:2]),
        x.gather(0, INDEX),
    ),
    "where": lambda x: (torch.where(MASK, x, torch.zeros(())), torch.where(MASK, 0.0, x), torch.cat([x, x.new_zeros(2, 3)])),
    "masked": lambda x: (x.masked_fill(MASK, 2.0), x.masked_scatter(MASK, x * 2), x[MASK], x.masked_select(MASK)),
    "views": lambda x: (x.view(-1), x.reshape(3, 5), x.flatten(), x.ravel(), x.t().reshape(-1), x.unflatten(1, (3, 1))),
    "joined": lambda x: (torch.stack(x.unbind(0)), torch.cat(x.split(2)), *x.chunk(3), torch.hstack([x, x]), x.tile(2, 2)),
    "ormqr": lambda x: torch.linalg.householder_product(x, x[:3, 0]),
    "products of groups": lambda x: (
        torch.einsum("ij,ik->jk", x, x),
        torch.addr(x[:3], x[0], x[1]),
        torch.addmm(x[:3], x.t(), x),
        torch.linalg.multi_dot([x, x.t(), x]),
        torch.kron(x[:2], x[2:4]),
    ),
    "norms": lambda x: (x.norm(), torch.linalg.vector_norm(x, 3, 0), x.std(0), x.var(), torch.nn.functional.normalize(x + 3)),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(1), F.softmin(x, 0), x.logsumexp(0), F.gumbel_softmax(x.detach(), 0.5) * 0),
    "prod": lambda x: (x.prod(), x.prod(0), x.sum(0), x.mean(), x.nansum(1), x.amax(1), x.median()),
    "solved": lambda x: torch.linalg.solve(SQUARE, x.t()),
    "cosine": lambda x: (
        F.cosine_similarity(x, x.flip(0)),
        F.cosine_embedding_loss(x, x.flip(0), torch.tensor([1, -1, 1, 1, -1])),
        F.pairwise_distance(x, x.roll(1, 0)),
    ),
}

IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "unsqueeze_": lambda z: z.unsqueeze_(1),
    "t_": lambda z: z.t_(),
    "transpose_": lambda z: z.transpose_(0, 1),
    "squeeze_": lambda z: z.unsqueeze_(0).squeeze_(),
    "tril_": lambda z: z.tril_(),
    "triu_": lambda z: z.triu_(1),
    "cumsum_": lambda z: z.cumsum_(0),
    "cumprod_": lambda z: z.cumprod_(0),
    "addbmm_": lambda z: z.addbmm_(torch.ones(2, 5, 2), torch.ones(2, 2, 3)),
    "addr_": lambda z: z.addr_(torch.arange(5.0), torch.ones(3)),
    "addmm_": lambda z: z.addmm_(torch.ones(5, 2), torch.ones(2, 3)),
    "floor_divide_": lambda z: z.floor_divide_(2),
    "masked_scatter_": lambda z: z.masked_scatter_(MASK, torch.arange(15.0)),
    "renorm_": lambda z: z.renorm_(1, 0, 1.0),
    "put_": lambda z: z.put_(torch.tensor([0, 14]), torch.tensor([5.0, 6.0])),
    "resize_": lambda z: z.resize_(3, 5),
    "scatter_reduce_": lambda z: z.scatter_reduce_(0, INDEX, torch.ones(2, 3), "amax"),
    "as_strided_": lambda z: z.as_strided_((3, 2), (3, 1), 1),
    "scatter_add_": lambda z: z.scatter_add_(0, INDEX, torch.ones(2, 3)),
    "index_copy_": lambda z: z.index_copy_(0, torch.tensor([4, 1]), torch.ones(2, 3)),
    "index_fill_": lambda z: z.index_fill_(0, torch.tensor([3]), 2),
    "detach_": lambda z: z.detach_(),
    "fill_diagonal_": lambda z: z.fill_diagonal_(4),
    "clamp_": lambda z: z.clamp_(-1, 1).lerp_(torch.ones(5, 3), 0.5).remainder_(2).logical_not_(),
    "swapdims_": lambda z: z.swapdims_(0, 1).mul_(2),
    "erfinv_ and others": lambda z: z.sigmoid_().sqrt_().neg_().exp_().round_(),
}


@pytest.mark.parametrize("fn", WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT)
def test_values(fn: Callable) -> None:
    check(fn, values(5, 3), rule=False, limit=3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fn", WITH_GRADIENT.values(), ids=WITH_GRADIENT)
def test_values_and_gradients(fn: Callable) -> None:
    def program(x: torch.Tensor) -> object:
        torch.manual_seed(0)
        return fn(x)

    check(program, values(5, 3, distinct=True), grad=True, rule=False, limit=3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fn", IN_PLACE.values(), ids=IN_PLACE)
def test_writes(fn: Callable) -> None:
    def program(x: torch.Tensor) -> object:
        z = x.clone()
        seen = z.view(-1)
        return fn(z), z, seen, tuple(z.shape), z.stride()

    check(program, values(5, 3), rule=False, limit=4, rtol=1e-4, atol=1e-5)
