"""Worker processes: SmolLM2 reads a prompt over an axis ``tp``, beside ``transformers`` with its own plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dtorch import init_device_mesh

from . import smollm2
from .figure import Figure
from .prefill import compare
from .processes import beside, session
from .ranks import ranks
from .setting import Setting

WORKERS, TOKENS = 3, 512


def figures(setting: Setting) -> Iterator[Figure]:
    """Time of a forward to the logits ``(1, tokens, vocabulary)`` of the real weights."""
    ids = smollm2.prompt(TOKENS, "cpu", 1)
    with saved() as folder, ranks(WORKERS, setting.threads, split, folder) as peer, session(WORKERS) as client:
        model = smollm2.distributed(init_device_mesh("cpu", WORKERS, mesh_dim_names=("tp",)))
        forward = torch.inference_mode()(lambda: model(ids).logits)
        equality = compare(torch.tensor(peer.answer("logits")), forward().to_torch()[0, -1], exact=False)
        pairs, issued_s = beside(client, forward, peer.run, setting.times(8, 2))
    yield Figure(
        name="tensor_parallel.prefill_3",
        title=f"SmolLM2 prefill of {TOKENS} tokens, tp={WORKERS} in processes, to transformers with its tp_plan",
        measured=pairs.ratio,
        limit=1.1,
        spread=pairs.spread,
        notes=(
            f"{pairs.times(1e-3, 'ms')}; threads: {setting.threads}; {equality}",
            f"the client takes {issued_s * 1e3:.1f} ms of processor time a forward",
        ),
    )


@contextmanager
def saved() -> Iterator[str]:
    """A folder with the model's float32 weights, as ``transformers`` reads them where it splits them."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = smollm2.plain("cpu")
        # A model of its own, for one that was read from a quantized file is not written.
        config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        yield folder


def split(rank: int, workers: int, folder: str) -> Callable[[str], Any]:
    """A rank of the other side, as torchrun would start it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    ids = smollm2.prompt(TOKENS, "cpu", 1)

    @torch.inference_mode()
    def run(name: str) -> Any:
        logits = model(ids).logits
        # Numbers of the last token, for a tensor would be shared memory, whose owner may end first.
        return logits[0, -1].tolist() if name == "logits" else None

    return run
