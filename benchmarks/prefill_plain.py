"""Started by ``memory.py`` in a process of its own: prefills on plain PyTorch, then prints the peak. No dtorch here."""

from __future__ import annotations

import sys

import torch

from .peak import peak_nbytes


def main(file: str, device: str, threads: str, runs: str) -> None:
    """Load ``(model, ids)`` from a file that this program's parent wrote, run, and print bytes."""
    torch.set_num_threads(int(threads))
    model, ids = torch.load(file, weights_only=False)
    with torch.inference_mode():
        for _ in range(int(runs)):
            model(ids)
    print(peak_nbytes(device))


if __name__ == "__main__":
    main(*sys.argv[1:])
