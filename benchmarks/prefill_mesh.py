"""Started by ``memory.py`` in a process of its own: prefills on a one-device mesh, then prints the peak."""

from __future__ import annotations

import sys

import torch

import dtorch

from .peak import peak_nbytes
from .setting import Setting, finish


def main(file: str, device: str, threads: str, runs: str) -> None:
    """Load ``(model, ids)`` from a file that this program's parent wrote, put the model on a mesh, run, and print bytes."""
    setting = Setting(device=device, threads=int(threads))
    setting.start()
    model, ids = torch.load(file, weights_only=False)
    model = dtorch.parallelize(model, setting.mesh())
    with torch.inference_mode():
        for _ in range(int(runs)):
            model(ids)
            finish()
    print(peak_nbytes(device))


if __name__ == "__main__":
    main(*sys.argv[1:])
