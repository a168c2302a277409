"""Small networks written with ``torch.nn`` alone: a diffusion transformer, a residual and an U-shaped network of convolutions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_features(t: Tensor, width: int) -> Tensor:
    """Sinusoids of a step number: (n,) -> (n, width)."""
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    angles = t[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Tokens shifted and scaled alike within a sample."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiffusionBlock(nn.Module):
    """Attention and a perceptron, each modulated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)])
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(n, tokens, width), (n, width) -> (n, tokens, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition).chunk(6, 1)
        n, tokens, width = x.shape
        qkv = self.qkv(modulated(self.norms[0](x), shift, scale)).reshape(n, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + gate[:, None] * self.proj(attended)
        return x + gate2[:, None] * self.mlp(modulated(self.norms[1](x), shift2, scale2))


class DiffusionTransformer(nn.Module):
    """Patches of images, a step and a class to what is to be predicted of each pixel."""

    def __init__(self, width: int = 16, patch: int = 2, channels: int = 3, size: int = 8) -> None:
        super().__init__()
        self.width, self.patch, self.channels = width, patch, channels
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2, width))
        self.step = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(5, width)
        self.blocks = nn.ModuleList([DiffusionBlock(width, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        """(n, channels, size, size), (n,), (n,) -> as the first."""
        h = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        condition = self.step(timestep_features(t, self.width)) + self.classes(label)
        for block in self.blocks:
            h = block(h, condition)
        h = self.out(modulated(self.norm(h), *self.modulation(condition).chunk(2, 1)))
        n, side = h.shape[0], int(h.shape[1] ** 0.5)
        h = h.reshape(n, side, side, self.patch, self.patch, self.channels)
        return torch.einsum("nhwpqc->nchpwq", h).reshape(n, self.channels, side * self.patch, side * self.patch)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        h = self.second(self.relu(self.first(x)))
        h += self.short(x)
        return self.relu(h)


class ResidualNetwork(nn.Module):
    """Images to scores of seven classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.average, self.out = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, height, width) -> (n, 7)."""
        return self.out(torch.flatten(self.average(self.blocks(self.pool(self.stem(x)))), 1))


class UNetwork(nn.Module):
    """A level down and up again, with attention below, and every way of changing an image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.last = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(16, 3, 3, padding=1),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)])
        self.step, self.qkv = nn.Linear(8, 16), nn.Conv1d(16, 48, 1)
        self.up, self.wide = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """(n, 3, height, width), (n,) -> as the first."""
        top = self.first(x)
        h = self.down(F.silu(self.norms[0](top))) + self.step(timestep_features(t, 8))[:, :, None, None]
        h = F.silu(self.norms[1](h))
        q, k, v = self.qkv(h.flatten(2)).chunk(3, 1)
        weights = torch.einsum("bct,bcs->bts", q * 0.5, k * 0.5).softmax(-1)
        h = h + torch.einsum("bts,bcs->bct", weights, v).reshape(h.shape)
        h = self.up(h) + self.wide(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.last(torch.cat([F.dropout(h, 0.1, self.training), top], 1))
        small = F.interpolate(F.avg_pool2d(x, 2), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return h + small + F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2)
