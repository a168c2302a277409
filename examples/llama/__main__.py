"""``python -m examples.llama --mesh dp=2,tp=2,pp=2``: the example on simulated devices, compared with transformers."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dtorch import DeviceMesh, UsageError, init_device_mesh
from dtorch.demo.model import load_model

from .compare import compare, distributed

TINY = {
    "vocab_size": 61,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "initializer_range": 0.2,
}
"""Nothing divides by two."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 where both errors are within bounds, 1 where not, 2 after wrong use."""
    given = _parser().parse_args(arguments)
    torch.manual_seed(given.seed)
    try:
        plain = load_model().model if given.smollm2 else LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=given.tied))
        model = distributed(plain, given.mesh, given.sp, given.zero)
    except UsageError as error:
        print(f"examples.llama: {error}", file=sys.stderr)
        return 2
    ids_BT = torch.randint(0, plain.config.vocab_size, (given.batch, given.length))
    found = compare(plain, model, ids_BT)
    c = plain.config
    print(f"{given.mesh!r}, {given.batch} x {given.length} tokens, seed {given.seed}{', sp' if given.sp else ''}")
    print(f"{c.num_hidden_layers} layers, {c.num_attention_heads} query and {c.num_key_value_heads} key/value heads")
    print(*found.lines(), sep="\n")
    return 0 if found.right else 1


def mesh_of(text: str) -> DeviceMesh:
    """The mesh that a text such as ``dp=2,tp=2`` names."""
    try:
        sizes: dict[str, Any] = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not axis=devices,...: {error}") from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m examples.llama", description=__doc__)
    add = parser.add_argument
    add("--mesh", type=mesh_of, default="dp=2,tp=2,pp=2", help="axes of dp fsdp tp pp ulysses_cp ring_cp ep")
    add("--sp", action="store_true", help="split residuals along the sequence over tp")
    add("--zero", type=int, default=3, help="what fsdp splits (default: 3)")
    add("--tied", action="store_true", help="one weight for embedding and output layer")
    add("--smollm2", action="store_true", help="real weights, those of SmolLM2-135M-Instruct, from a package")
    add("--batch", type=int, default=4, help="sequences (default: 4)")
    add("--length", type=int, default=17, help="tokens of each (default: 17)")
    add("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
