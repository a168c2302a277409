"""``torch.nn`` modules, unmodified, with split parameters and inputs: outputs and gradients equal plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import place, tensors_in, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning", "ignore:.*nested tensor.*:UserWarning")
R = Replicate()

MODULES = {
    "Linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 3), (3, 6), (3, 6)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 7)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 7, 7)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (2, 4, 5, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (3, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (3, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (2, 4, 4, 4)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 3, 4, 4)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), (2, 3, 4, 4)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), (2, 3, 5, 5)),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), (2, 3, 5)),
    "Upsample nearest": (lambda: nn.Upsample(scale_factor=2), (2, 3, 4, 4)),
    "Upsample bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (2, 4, 3, 3)),
    "Unfold": (lambda: nn.Unfold(2), (2, 3, 4, 4)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), (2, 3, 4, 4)),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), (2, 3, 4, 4)),
    "PReLU": (lambda: nn.PReLU(3), (2, 3, 4)),
    "GLU": (lambda: nn.GLU(), (3, 6)),
    "Softmax": (lambda: nn.Softmax(1), (3, 6)),
    "GELU": (lambda: nn.GELU(), (3, 6)),
    "Hardswish": (lambda: nn.Hardswish(), (3, 6)),
    "CELU": (lambda: nn.CELU(), (3, 6)),
    "Softplus": (lambda: nn.Softplus(), (3, 6)),
    "RNN": (lambda: nn.RNN(6, 4, batch_first=True), (2, 3, 6)),
    "LSTM": (lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True), (3, 2, 6)),
    "GRU": (lambda: nn.GRU(6, 4), (3, 2, 6)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 4), (2, 6)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 3, 8), (2, 3, 8), (2, 3, 8)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), (3, 2, 8), (4, 2, 8)),
    "MSELoss": (lambda: nn.MSELoss(), (5, 4), (5, 4)),
    "L1Loss": (lambda: nn.L1Loss(), (5, 4), (5, 4)),
    "CosineEmbeddingLoss": (lambda: _With(nn.CosineEmbeddingLoss(), torch.tensor([1, -1, 1, 1, -1])), (5, 4), (5, 4)),
    "TripletMarginLoss": (lambda: nn.TripletMarginLoss(), (5, 4), (5, 4), (5, 4)),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(4) * 2), (5, 4), (5, 4)),
    "KLDivLoss": (lambda: nn.KLDivLoss(reduction="batchmean"), (5, 4), (5, 4)),
    "CrossEntropyLoss": (lambda: _With(nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 3, 1, -100, 2])), (5, 4)),
    "NLLLoss": (lambda: _With(nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0])), torch.tensor([0, 3, 1, 1, 2])), (5, 4)),
    "MultiMarginLoss": (lambda: _With(nn.MultiMarginLoss(), torch.tensor([0, 3, 1, 1, 2])), (5, 4)),
    "CTCLoss": (
        lambda: _With(nn.CTCLoss(), torch.tensor([[1, 2], [2, 1]]), torch.tensor([6, 6]), torch.tensor([2, 2])),
        (6, 2, 4),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (3, 6)),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), (5, 4), (5, 4)),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), (5, 4), (5, 4)),
    "Flatten": (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 3))), (2, 3, 4)),
    "Dropout in eval": (lambda: nn.Dropout().eval(), (5, 4)),
}


class _With(nn.Module):
    """A module that is also given plain targets."""

    def __init__(self, inner: nn.Module, *targets: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.targets = inner, targets

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs, *self.targets)


def placed_like(module: nn.Module, mesh: dtorch.DeviceMesh) -> nn.Module:
    """A copy with every parameter and buffer split on its first dim, or replicated where it has none."""
    module = copy.deepcopy(module)
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(
                name, nn.Parameter(dtorch.Tensor(p.data, device_mesh=mesh, placements=[Shard(0) if p.ndim else R]))
            )
        for name, b in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(name, dtorch.Tensor(b, device_mesh=mesh, placements=[Shard(0) if b.ndim else R]))
        if isinstance(owner, nn.RNNBase):
            owner._flat_weights = [getattr(owner, n) for n in owner._flat_weights_names]
    return module


def outputs_and_gradients(module: nn.Module, inputs: list[torch.Tensor]) -> tuple[list, list, list]:
    inputs = [t.detach().requires_grad_() for t in inputs]
    outs = tensors_in(module(*inputs))
    sum((t * (torch.arange(t.numel()).view(t.shape) % 5 + 1)).sum() for t in outs).backward()
    return outs, [t.grad for t in inputs], [p.grad for p in module.parameters()] + list(module.buffers())


@pytest.mark.parametrize("split", ["batch", "last dim", "nothing"])
@pytest.mark.parametrize("spec", MODULES.values(), ids=MODULES)
def test_modules(spec: tuple, split: str) -> None:
    make, *shapes = spec
    torch.manual_seed(0)
    module, inputs = make(), [values(*s, seed=i) for i, s in enumerate(shapes)]
    mesh = init_device_mesh("cpu", 2)
    placement = {"batch": Shard(0), "last dim": Shard(-1), "nothing": R}[split]
    placed = outputs_and_gradients(placed_like(module, mesh), [place(t, mesh, (placement,)) for t in inputs])
    plain = outputs_and_gradients(module, inputs)
    for got, expected in zip(placed, plain, strict=True):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert (g is None) == (e is None)
            if e is not None:
                torch.testing.assert_close(
                    g.detach().to_torch() if isinstance(g, dtorch.Tensor) else g, e.detach(), rtol=1e-4, atol=1e-5, equal_nan=True
                )
