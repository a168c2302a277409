"""Layers and losses under placements that are easily wrong: windows over a cut, masks, weighted means, packed sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*has no sharding rule:RuntimeWarning", "ignore:enable_nested_tensor", "ignore:.*oneDNN"
)
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
HOMES = [
    (LINE, (Shard(0),)),
    (LINE, (Shard(1),)),
    (LINE, (Shard(2),)),
    (LINE, (Partial(),)),
    (GRID, (Shard(0), Shard(1))),
    (GRID, (Shard(1), Shard(1))),
]

CONVOLUTIONS: dict[str, tuple[Callable, tuple, tuple]] = {
    "padded": (lambda x, w: F.conv2d(x, w, padding=1), (2, 3, 5, 4), (4, 3, 3, 3)),
    "stridden": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (2, 3, 5, 4), (4, 3, 3, 3)),
    "with a bias": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0]), (2, 3, 5, 4), (4, 3, 2, 2)),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=2), (2, 3, 5, 5), (4, 3, 2, 2)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=2, padding=1), (2, 4, 5, 4), (6, 2, 3, 3)),
    "depthwise": (lambda x, w: F.conv1d(x, w, groups=4, padding=2), (2, 4, 7), (4, 1, 3)),
    "one dim": (lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 7), (4, 3, 3)),
    "three dims": (lambda x, w: F.conv3d(x, w, padding=1), (1, 2, 3, 4, 3), (2, 2, 3, 3, 3)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (2, 3, 4, 3), (3, 2, 3, 3)),
    "same": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 3, 5, 4), (4, 3, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_split_and_partial_images_and_weights(name: str) -> None:
    fn, image, weight = CONVOLUTIONS[name]
    check(fn, values(*image), values(*weight, seed=1), grad=True, limit=10, rule=False, rtol=1e-4, atol=1e-4)


ATTENTIONS: dict[str, Callable] = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 5).tril(1).bool()),
    "masked by numbers": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.arange(25.0).view(5, 5) / 9),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
    "one key head": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
    "other keys": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :2], k, v, is_causal=True),
}


@pytest.mark.parametrize("fn", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_over_split_batches_heads_and_positions(fn: Callable) -> None:
    check(fn, *[values(3, 4, 5, 4, seed=s) for s in range(3)], grad=True, limit=8, rule=False, rtol=1e-4, atol=1e-4)


TARGET = torch.tensor([0, 4, -100, 2, 3, 1, 1])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
LOSSES: dict[str, Callable] = {
    "cross entropy": lambda x: F.cross_entropy(x, TARGET),
    "weighted": lambda x: F.cross_entropy(x, TARGET, weight=WEIGHT),
    "smoothed and weighted": lambda x: F.cross_entropy(x, TARGET, weight=WEIGHT, label_smoothing=0.1),
    "ignoring": lambda x: F.cross_entropy(x, TARGET.clamp(min=0), ignore_index=1),
    "nll weighted": lambda x: F.nll_loss(x.log_softmax(1), TARGET, weight=WEIGHT),
    "of probabilities": lambda x: F.cross_entropy(x, x.detach().softmax(0)),
    "of sequences": lambda x: F.cross_entropy(x.t()[None], TARGET[None]),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2 + 1, beta=0.5),
    "huber": lambda x: F.huber_loss(x, x.detach() * 3),
    "l1": lambda x: F.l1_loss(x, x.detach() * 2 + 0.1),
    "soft margin": lambda x: F.soft_margin_loss(x, x.detach().sign()),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).float()),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float(), pos_weight=WEIGHT),
    "kl": lambda x: F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"),
    "poisson": lambda x: F.poisson_nll_loss(x, x.detach().abs()),
    "gaussian": lambda x: F.gaussian_nll_loss(x, x.detach() * 2, x.detach().abs() + 1),
    "hinge": lambda x: F.hinge_embedding_loss(x, x.detach().sign()),
    "margin ranking": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], x.detach()[:, 2].sign()),
    "triplet": lambda x: F.triplet_margin_loss(x, x.detach() * 2, x.detach() + 1),
    "cosine": lambda x: F.cosine_embedding_loss(x, x.detach().roll(1, 0), TARGET.sign().clamp(min=-1)),
    "multi margin": lambda x: F.multi_margin_loss(x, TARGET.clamp(min=0)),
}


@pytest.mark.parametrize("fn", LOSSES.values(), ids=LOSSES)
def test_mean_losses_and_gradients_of_uneven_and_empty_shards(fn: Callable) -> None:
    for meshes in (((4,), (2, 3)), ((8,),)):
        check(fn, values(7, 5), grad=True, rule=False, meshes=meshes, limit=6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "home", [(GRID, (Shard(0), Shard(2))), (GRID, (Shard(2), Shard(1))), (GRID, (Shard(1), Shard(2)))], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_logits_split_over_batch_and_vocabulary(home: tuple, reduction: str) -> None:
    logits, target = values(3, 4, 7), torch.randint(0, 7, (3, 4))
    target[1, 2] = -100
    grads = []
    for x in (logits, place(logits, *home)):
        x = x.detach().requires_grad_()
        with dtorch.explain() as report:
            loss = F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction=reduction)
            loss.sum().backward()
        grads.append((loss, x.grad))
    same(grads[1], grads[0], str(home), rtol=1e-4, atol=1e-5)
    assert not report.replicated


LOOKUPS: dict[str, Callable] = {
    "two tables": lambda w: F.embedding(torch.tensor([5, 0, 6]), w) + F.embedding(torch.tensor([6, 6, 0]), w * 2),
    "padding": lambda w: F.embedding(torch.tensor([[5, 0], [6, 2]]), w, padding_idx=5),
    "tied": lambda w: F.embedding(torch.tensor([5, 0, 6]), w) @ w.t(),
    "one number": lambda w: F.embedding(torch.tensor(6), w),
    "bags": lambda w: F.embedding_bag(torch.tensor([5, 0, 6, 6]), w, torch.tensor([0, 1]), mode="mean", padding_idx=0),
    "normalised": lambda w: F.embedding(torch.tensor([5, 0]), w.detach().clone(), max_norm=1.0),
    "no numbers": lambda w: F.embedding(torch.zeros(0, 2, dtype=torch.long), w),
    "scaled": lambda w: F.embedding(torch.tensor([1, 1, 6]), w, scale_grad_by_freq=True),
}


@pytest.mark.parametrize("fn", LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_in_split_tables(fn: Callable) -> None:
    check(fn, values(7, 4), grad=fn is not LOOKUPS["normalised"], rule=False, limit=10, rtol=1e-4, atol=1e-5)


def placed_copy(module: nn.Module, mesh: dtorch.DeviceMesh, placements: tuple) -> nn.Module:
    """A copy whose weights lie so; as PyTorch's own, recurrent layers are told of their new weights."""
    module = copy.deepcopy(module)
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(place(p.data, mesh, placements)))
        if isinstance(owner, nn.RNNBase):
            owner._flat_weights = [getattr(owner, n) for n in owner._flat_weights_names]
    return module


class Attending(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 3, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> tuple:
        hidden = torch.zeros(3, 5, dtype=torch.bool)
        hidden[1, 3:] = True
        causal = torch.ones(5, 5).triu(1).bool()
        return self.inner(x, x, x, key_padding_mask=hidden, attn_mask=causal), self.inner(x, x, x, need_weights=False)[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attending,
    "attention with extra keys": lambda: Attending(add_bias_kv=True, add_zero_attn=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(6, 3, 12, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, norm_first=True), 2),
    "lstm": lambda: nn.LSTM(6, 4, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3),
    "lstm with projections": lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True),
    "gru": lambda: nn.GRU(6, 4, batch_first=True),
    "rnn": lambda: nn.RNN(6, 4, nonlinearity="relu", batch_first=True),
    "bilinear": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Softplus(), nn.Linear(5, 5), nn.RMSNorm(5)),
}


@pytest.mark.parametrize("weights", [(LINE, (Shard(0),)), (LINE, (R,)), (GRID, (R, Shard(0)))], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_without_a_plan(name: str, training: bool, weights: tuple) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().train(training)
    placed = placed_copy(plain, *weights)
    x, results = values(3, 5, 6), []
    inputs = [x, place(x, weights[0], (Shard(0), R)[: weights[0].ndim]), place(x, weights[0], (Shard(1), R)[: weights[0].ndim])]
    for model, given in zip((plain, placed, placed), inputs, strict=True):
        torch.manual_seed(1)
        model.zero_grad()
        given = given.detach().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = model(given)
        first = out[0][0] if isinstance(out[0], tuple) else out[0] if isinstance(out, tuple) else out
        if training:
            first.pow(2).sum().backward()
        results.append((out, [given.grad, *(p.grad for p in model.parameters())] if training else []))
    for got in results[1:]:
        got = (got[0], [g if g is not None else torch.zeros(()) for g in got[1]])
        wanted = (results[0][0], [g if g is not None else torch.zeros(()) for g in results[0][1]])
        same(got, wanted, name, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("home", [(LINE, (Shard(0),)), (LINE, (Shard(1),)), (GRID, (Shard(0), Shard(2)))], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences(in_order: bool, kind: type, home: tuple) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 3, 2] if in_order else [2, 5, 3])
    plain, results = kind(4, 3, bidirectional=True, batch_first=True), []
    placed = placed_copy(plain, home[0], (Shard(0), R)[: home[0].ndim])
    given = [lengths, lengths.tolist(), place(lengths, home[0], (R,) * home[0].ndim)]
    for model, counts in zip((plain, placed, placed), given, strict=True):
        x = values(3, 5, 4)
        x = (x if model is plain else place(x, *home)).detach().requires_grad_()
        model.zero_grad()
        rows = nn.utils.rnn.pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=in_order)
        out, state = model(rows)
        padded, found = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, padding_value=-1.0)
        assert found.tolist() == lengths.tolist()
        padded.pow(2).sum().backward()
        results.append((padded, state, x.grad, [p.grad for p in model.parameters()]))
    for got in results[1:]:
        same(got, results[0], str(home), rtol=1e-4, atol=1e-5)


def test_lengths_that_do_not_fit_are_refused_as_in_torch() -> None:
    x = place(values(3, 5, 4), LINE, (Shard(0),))
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        nn.utils.rnn.pack_padded_sequence(x, [2, 5, 3], batch_first=True)
    with pytest.raises(RuntimeError, match=r"batch_size|batch size"):
        nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
