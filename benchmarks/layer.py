"""One Llama decoder layer of hidden size 64: many small operators, so that every microsecond around them shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import dtorch

from .figure import Figure
from .setting import SEED, Setting
from .timing import Pairs, Work, paired

TIMES = 20
BATCH, SEQUENCE, HIDDEN = 1, 32, 64


def figures(setting: Setting) -> Iterator[Figure]:
    """Total time of a forward, to eager."""
    layer, inputs = decoder_layer(setting.device)
    mesh = setting.mesh()
    ours = dtorch.parallelize(copy.deepcopy(layer), mesh)
    placed = [dtorch.Tensor(t, device_mesh=mesh) for t in inputs]
    plain = setting.plain(forwards(layer, *inputs))
    other = setting.ours(forwards(ours, *placed))
    assert torch.equal(forward(layer, *inputs), forward(ours, *placed).to_torch()), "the outputs differ"
    calls = dtorch.session().calls
    with torch.no_grad():
        other()
        operators = (dtorch.session().calls - calls) / TIMES
        total = _warm(plain, other, setting)
    with torch.inference_mode():
        inference = _warm(plain, other, setting)
    graph = _warm(plain, other, setting)
    yield Figure(
        name="layer.forward",
        title=f"Llama decoder layer forward, hidden {HIDDEN}, one-device mesh, total time to eager",
        measured=total.ratio,
        limit=4,
        spread=total.spread,
        peer="6.2x (torch DTensor)",
        notes=(
            f"{total.times(1e-3, 'ms', TIMES)} under no_grad, {operators:.0f} operators; processor time {total.cpu_ratio:.2f}x",
            f"under inference_mode {inference.ratio:.2f}x; recording the graph for a backward {graph.ratio:.2f}x",
            f"batch {BATCH}, {SEQUENCE} positions, 4 heads, inner size 256; outputs bit for bit equal",
        ),
    )


def decoder_layer(device: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A layer with random weights, and its inputs: hidden states ``(batch, seq, hidden)`` and the rotary cos and sin."""
    torch.manual_seed(SEED)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, layer_idx=0).eval().to(device)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, device=device)
    cos, sin = LlamaRotaryEmbedding(config).to(device)(hidden, torch.arange(SEQUENCE, device=device)[None])
    return layer, [hidden, cos, sin]


def forward(layer: torch.nn.Module, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The layer's output."""
    out = layer(hidden, position_embeddings=(cos, sin))
    return out[0] if isinstance(out, tuple) else out


def forwards(layer: torch.nn.Module, *inputs: torch.Tensor) -> Callable[[], None]:
    """``TIMES`` forwards."""

    def run() -> None:
        for _ in range(TIMES):
            forward(layer, *inputs)

    return run


def _warm(plain: Work, other: Work, setting: Setting) -> Pairs:
    plain()
    other()
    return paired(plain, other, setting.times(41, 3))
