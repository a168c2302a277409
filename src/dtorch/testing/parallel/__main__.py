"""``python -m dtorch.testing.parallel``: run cells, or one, and say what came out."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.errors import UsageError, four_parts
from . import report
from .cell import Cell, parse_cell
from .draw import drawn
from .pool import records
from .record import GOOD
from .run import run_cell
from .store import Store
from .zoo import MODELS, be_quiet, missing

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 where all cells are right or refused rightly, else 1; 2 wrong use, reason on stderr.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    given = _parser().parse_args(arguments)
    try:
        return _one(given.cell) if given.cell else _many(given)
    except UsageError as error:
        print(f"parallel: {error}", file=sys.stderr)
        return WRONG_USE


def _one(text: str) -> int:
    cell = parse_cell(text)
    _check_models([cell.model])
    torch.set_num_threads(1)
    be_quiet()
    record = run_cell(cell)
    print(f"{cell}: {record.kind}, forward {record.forward:.1e}, backward {record.backward:.1e}, {record.seconds:.1f} s")
    print(record.text, end="\n" if record.text else "")
    return 0 if record.kind in GOOD else 1


def _many(given: Namespace) -> int:
    _check_models(given.models)
    left_out = {name: why for name in given.models if (why := missing(name))}
    cells = [c for name in given.models if name not in left_out for c in drawn(name, given.cells, given.seed)]
    store, began = Store(given.out), time.monotonic()
    waiting = [cell for cell in cells if _is_wanted(cell, store, given.again)]
    for number, record in enumerate(records(waiting, given.jobs, given.limit), len(cells) - len(waiting) + 1):
        store.add(record)
        print(f"{number}/{len(cells)} {record.cell}: {record.kind}, {record.seconds:.1f} s", file=sys.stderr, flush=True)
    found = [store.records[str(cell)] for cell in cells]
    numbers = report.summary(found, given.seed, left_out)
    (given.out / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    (given.out / "table.md").write_text(report.table(numbers) + "\n", encoding="utf-8")
    (given.out / "failures.md").write_text(report.failures(found) + "\n", encoding="utf-8")
    bad = [r for r in found if r.kind not in GOOD]
    print(*(f"{r.kind}: {r.text.splitlines()[0]}\n    {report.command(r.cell)}" for r in bad), sep="\n", end="\n" if bad else "")
    print(report.table(numbers), f"seed {given.seed}, {time.monotonic() - began:.0f} s; see {given.out}", sep="\n\n")
    return 1 if bad else 0


def _is_wanted(cell: Cell, store: Store, again: bool) -> bool:
    record = store.records.get(str(cell))
    return record is None or (again and record.kind not in GOOD)


def _check_models(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UsageError(four_parts(f"models {unknown}", "the zoo has no such model", "--models", f"use {', '.join(MODELS)}"))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m dtorch.testing.parallel", description="Models under combinations of axes against plain PyTorch."
    )
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help=f"these alone, of {', '.join(MODELS)}")
    add("--cells", type=int, default=300, metavar="N", help="cells of each model (default: 300)")
    add("--cell", metavar="CELL", help="one cell, as a failure's command names it")
    add("--seed", type=int, default=0, help="of the cells (default: 0)")
    add("--jobs", type=int, default=1, metavar="N", help="processes at once (default: 1)")
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="time for one cell (default: 600)")
    add("--out", type=Path, default=Path("parallel-out"), metavar="DIR", help="results; a run that ended early goes on from them")
    add("--again", action="store_true", help="run anew what was wrong or failed in --out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
