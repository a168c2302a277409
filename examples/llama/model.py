"""A Llama written with the modules of ``dtorch.nn``: one program for one device and for any mesh.

Shapes are global, and stand in names:

    B batch   T tokens   D model   N query heads   K key/value heads   H features of a head   F inner   V vocabulary

Parameters have the names and shapes of the ``LlamaForCausalLM`` of transformers, so its state dict loads as it is.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Shard, nn, use_mesh

from .sequence import Norm, ScatteredEmbedding, ScatteredRow

INPUT = {"dp": Shard(0), "fsdp": Shard(0), "ep": Shard(0), "ulysses_cp": Shard(1), "ring_cp": Shard(1)}
"""How tokens (B, T) lie. All else follows: positions, attention and the loss go by where the tokens are."""


class Attention(nn.Module):
    """Causal attention with grouped queries. A device has whole heads, and the queries of a key go with it."""

    def __init__(self, config: Any, mesh: DeviceMesh, row: type[nn.RowParallelLinear]) -> None:
        super().__init__()
        d, n, k, self.h = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias, h = config.attention_bias, self.h
        # With fewer key/value heads than devices, every device has all of these, and query heads are split on their own.
        grouped = k >= len(mesh.unbind("tp"))
        together = n // k * h if grouped else h
        self.q_proj = nn.ColumnParallelLinear(d, n * h, bias, multiple_of=together)
        keyed = partial(nn.ColumnParallelLinear, multiple_of=h) if grouped else nn.Linear
        self.k_proj, self.v_proj = keyed(d, k * h, bias), keyed(d, k * h, bias)
        self.o_proj = row(n * h, d, bias, multiple_of=together)

    def forward(self, x_BTD: torch.Tensor, turns_2TH: torch.Tensor) -> torch.Tensor:
        """Output of attention, (B, T, D)."""
        q_BTNH, k_BTKH, v_BTKH = (proj(x_BTD).unflatten(-1, (-1, self.h)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_BNTH, k_BKTH = turned(q_BTNH.transpose(1, 2), turns_2TH), turned(k_BTKH.transpose(1, 2), turns_2TH)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BTKH.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(y_BNTH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any, row: type[nn.RowParallelLinear]) -> None:
        super().__init__()
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.ColumnParallelLinear(d, f, bias)
        self.up_proj = nn.ColumnParallelLinear(d, f, bias)
        self.down_proj = row(f, d, bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Output of the block, (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """Attention and SwiGLU, each after a norm and beside a residual."""

    def __init__(self, config: Any, mesh: DeviceMesh, row: type[nn.RowParallelLinear]) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, mesh, row)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, row)

    def forward(self, x_BTD: torch.Tensor, turns_2TH: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer, (B, T, D)."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), turns_2TH)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nn.Module):
    """The layers, each on the mesh of its pipeline stage; the embedding before and the norm after them."""

    def __init__(self, config: Any, mesh: DeviceMesh, sp: bool) -> None:
        super().__init__()
        embedding = ScatteredEmbedding if sp else nn.VocabParallelEmbedding
        row = ScatteredRow if sp else nn.RowParallelLinearWithReplicateOutput
        homes = nn.assign_layers_to_stages(config.num_hidden_layers, mesh.unbind("pp"))
        self.first, self.last = homes[0], homes[0] if config.tie_word_embeddings else homes[-1]
        with use_mesh(self.first):
            self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for home in homes:
            with use_mesh(home):
                self.layers.append(Layer(config, home, row))
        with use_mesh(self.last):
            self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.homes, self.h, self.theta = homes, config.head_dim, config.rope_parameters["rope_theta"]

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """What the tokens became, (B, T, D), on the mesh of the output layer."""
        x_BTD = self.embed_tokens(ids_BT)
        for home, layers in groupby(zip(self.homes, self.layers, strict=True), key=lambda pair: pair[0]):
            with use_mesh(home):
                turns_2TH = turns(ids_BT.shape[1], self.h, self.theta)
            x_BTD = x_BTD.redistribute_by_dict({}, home)
            for _, layer in layers:
                x_BTD = layer(x_BTD, turns_2TH)
        return self.norm(x_BTD.redistribute_by_dict({}, self.last))


class Llama(nn.Module):
    """A Llama on a mesh with axes of any of the names ``dp fsdp tp pp ulysses_cp ring_cp ep``.

    Args:
        config: a ``LlamaConfig`` of transformers, or anything with its attributes.
        mesh: where it lives. ``pp`` splits the layers, ``tp`` their weights; tokens come split over the others.
        sp: split residuals and norms along the sequence over ``tp``.

    Raises:
        ValueError: a configuration that is none of a plain Llama.
        dtorch.UsageError: more stages than layers.
    """

    def __init__(self, config: Any, mesh: DeviceMesh, sp: bool = False) -> None:
        super().__init__()
        if (config.hidden_act, config.rope_parameters["rope_type"]) != ("silu", "default"):
            raise ValueError(f"{config.hidden_act!r}, {config.rope_parameters!r}: SwiGLU and plain rotary positions are written")
        self.model = Decoder(config, mesh, sp)
        with use_mesh(self.model.last):
            self.lm_head = nn.ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V), split over the vocabulary; the ids may be plain."""
        return self.lm_head(self.model(split(ids_BT, self.model.first)))

    def loss(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each token but the first, given those before it."""
        next_BT = split(F.pad(ids_BT[:, 1:], (0, 1), value=-100), self.model.last)
        return F.cross_entropy(self(ids_BT).transpose(1, 2), next_BT)


def split(ids_BT: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Token ids on a mesh: the batch and the sequence split over the axes that do so."""
    return dtorch.Tensor(ids_BT, device_mesh=mesh).redistribute_by_dict(INPUT)


def turns(t: int, h: int, theta: float) -> torch.Tensor:
    """Cosine and sine of the angles by which a head is turned at each position, (2, T, H)."""
    angles_TH = torch.outer(torch.arange(t), theta ** (-torch.arange(0, h, 2) / h)).repeat(1, 2)
    return torch.stack((angles_TH.cos(), angles_TH.sin()))


def turned(x_BNTH: torch.Tensor, turns_2TH: torch.Tensor) -> torch.Tensor:
    """Heads turned by their positions: features ``i`` and ``i + H / 2`` are the coordinates of a plane."""
    a_BNTh, b_BNTh = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * turns_2TH[0] + torch.cat((-b_BNTh, a_BNTh), dim=-1) * turns_2TH[1]
