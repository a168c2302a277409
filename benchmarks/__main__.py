"""``python -m benchmarks``: measure, print the table, write the JSON."""

from __future__ import annotations

import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import dtorch

from . import (
    add,
    bandwidth,
    decode,
    fsdp,
    layer,
    memory,
    planning,
    prefill,
    processes,
    report,
    scalar,
    tensor_parallel,
    throughput,
    training,
)
from .figure import Figure
from .setting import Setting

LATEST = Path(__file__).parent / "results" / "latest.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the groups that were asked for.

    Returns:
        0 when all were measured, whether or not the figures are where they must be; 1 when one broke; 2 without the device.
    """
    given = arguments(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: this machine has no CUDA device", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module="transformers")
    setting = Setting(device=given.device, threads=given.threads, quick=given.quick)
    setting.start()
    about = report.machine(setting)
    figures, failed = measure(given.only or list(GROUPS), setting)
    dtorch.shutdown()
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    print(report.table(figures), report.notes(figures), *(f"{k} broke: {v}" for k, v in failed.items()), sep="\n\n")
    report.write_json(given.json, about, figures, failed)
    return 1 if failed else 0


def measure(names: Sequence[str], setting: Setting) -> tuple[list[Figure], dict[str, str]]:
    """The figures of some groups, and the groups that broke with the reason; progress goes to stderr."""
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            for figure in GROUPS[name](setting):
                figures.append(figure)
                print(f"  {figure.title}: {figure.measured_text()}", file=sys.stderr, flush=True)
        except Exception as error:
            # One broken group must not take the other figures with it; it is named at the end and in the exit status.
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    return figures, failed


def arguments(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog="python -m benchmarks", description="What dtorch costs, beside plain PyTorch in the same run.")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="measure this group only; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that everything works")
    parser.add_argument("--json", type=Path, default=LATEST, help="where to write the figures (benchmarks/results/latest.json)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device type of both sides")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch's operators on both sides")
    return parser.parse_args(argv)


GROUPS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "add": add.figures,
    "planning": planning.figures,
    "scalar": scalar.figures,
    "layer": layer.figures,
    "decode": decode.figures,
    "prefill": prefill.figures,
    "memory": memory.figures,
    "fsdp": fsdp.figures,
    "processes": processes.figures,
    "bandwidth": bandwidth.figures,
    "training": training.figures,
    "throughput": throughput.figures,
    "tensor_parallel": tensor_parallel.figures,
}

if __name__ == "__main__":
    sys.exit(main())
