"""The figure: what a client holds while workers elsewhere load a model of 2 GB. Run with ``-s`` to see it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

LAYERS, SIZE = 8, 8192
LAYER_NBYTES = SIZE * SIZE * 4
ALLOWED_NBYTES = LAYER_NBYTES // 4
"""Modules that are imported at a first use take some; a quarter of one weight is well above that."""

PROGRAM = """
import resource, sys
import torch
import dtorch
from dtorch.core.program import Load, Put, Reply
from dtorch.tensor import client as clients

class Elsewhere:
    "Takes instructions as a controller of other machines would, and answers that all went well."
    def __init__(self):
        self.put = self.loaded = 0
    def submit(self, first, batch):
        self.put += sum(t.nbytes for i in batch if isinstance(i, Put) for t in i.tensors)
        self.loaded += sum(1 for i in batch if isinstance(i, Load) for _ in i.values)
    def request(self, first, batch):
        self.submit(first, batch)
        return self
    def result(self, timeout=None):
        return Reply()
    def close(self):
        pass

sink = Elsewhere()
clients.set_current(clients.Client(sink, lambda mesh: None))
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear({size}, {size}, bias=False) for _ in range({layers})])
mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
import safetensors
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dtorch.load_pretrained(model, sys.argv[1], mesh, {{"*": "colwise"}})
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(sink.put, sink.loaded, grown)
"""


def sparse_file(file: Path) -> None:
    """A file of zeros that takes no room on the disk."""
    header = {
        f"{i}.weight": {"dtype": "F32", "shape": [SIZE, SIZE], "data_offsets": [i * LAYER_NBYTES, (i + 1) * LAYER_NBYTES]}
        for i in range(LAYERS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + LAYERS * LAYER_NBYTES)


def test_a_client_never_holds_a_weight(tmp_path: Path) -> None:
    sparse_file(tmp_path / "model.safetensors")
    program = PROGRAM.format(size=SIZE, layers=LAYERS)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True)
    put, loaded, grown = map(int, done.stdout.split())
    print(f"client: {put} bytes of weights sent, peak memory grown by {grown / 2**20:.1f} MiB; weights of 256 MiB: {loaded}")
    assert (put, loaded) == (0, LAYERS)
    assert grown < ALLOWED_NBYTES
