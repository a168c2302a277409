"""``python -m dtorch.testing.opdb``: run the sweep, or one case of it, and say what came out."""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.errors import UsageError, four_parts
from . import baseline, child, report
from .cases import parse_case
from .database import OPERATORS
from .pool import sweep
from .record import LAYOUT, RIGHT, Record
from .run import run_case
from .settings import Settings
from .store import Store

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 done; 1 worse than the baseline, or the one case that was asked for is not right; 2 wrong use, reason on stderr.
    """
    given = _parser().parse_args(arguments)
    settings = Settings(
        combinations=given.combinations,
        samples=given.samples,
        seed=given.seed,
        main_only=given.main_dtype_only,
        limit_s=given.limit,
    )
    try:
        names = _names(given)
        return _one_case(names, given.case, settings) if given.case else _sweep(names, given, settings)
    except UsageError as error:
        print(f"opdb: {error}", file=sys.stderr)
        return WRONG_USE


def _sweep(names: list[str], given: Namespace, settings: Settings) -> int:
    store, began = Store(given.out, settings), time.monotonic()
    missing = [name for name in names if name not in store.records]

    def done(record: Record) -> None:
        store.add(record)
        at = f"{len(names) - len(missing) + sum(n in store.records for n in missing)}/{len(names)}"
        print(f"{at} {record.op}: {record.verdict}, {record.total()} cases, {record.seconds:.1f} s", file=sys.stderr, flush=True)

    sweep(missing, settings, given.jobs, child.main, done)
    records = [store.records[name] for name in names]
    numbers = report.summary(records)
    (given.out / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    (given.out / "table.md").write_text(report.table(records) + "\n", encoding="utf-8")
    (given.out / "failures.md").write_text(report.failures(records, settings) + "\n", encoding="utf-8")
    print(json.dumps(numbers, indent=2), f"{time.monotonic() - began:.0f} s; see {given.out}", sep="\n")
    if given.record:
        baseline.write(given.record, settings, records)
    worse = baseline.regressions(given.baseline, settings, records) if given.baseline else []
    print(*worse, sep="\n", end="\n" if worse else "")
    return 1 if worse else 0


def _one_case(names: list[str], text: str, settings: Settings) -> int:
    (name,), case = names, parse_case(text)
    torch.set_num_threads(1)
    record = run_case(OPERATORS[name], case, settings)
    wrong = [f for f in record.failures if f.kind != LAYOUT]
    for failure in record.failures:
        print(f"{failure.kind}: {failure.text}")
    print(f"{name} {case}: {'fails' if wrong else RIGHT}; planned by {record.planned or 'nothing sharded'}")
    return 1 if wrong else 0


def _names(given: Namespace) -> list[str]:
    """The operators that are asked for, in the order of the alphabet."""
    unknown = [name for name in given.only if name not in OPERATORS]
    if unknown or (given.case and len(given.only) != 1):
        rule = "--case wants one operator of the database" if given.case else "the database has no such operator"
        remedy = "names are those of the results' table, e.g. add or div.floor_rounding"
        raise UsageError(four_parts(f"operators {given.only}", rule, "--only", remedy))
    names = sorted(given.only or OPERATORS)
    number, count = given.slice
    order = random.Random(given.seed).sample(names, len(names))
    return sorted(order[number::count])


def _slice(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number - 1, count


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m dtorch.testing.opdb", description="PyTorch's operator database against dtorch.")
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="these operators alone")
    add("--slice", type=_slice, default=(0, 1), metavar="K/N", help="the K-th of N seeded parts of the operators, from 1")
    add("--case", metavar="CASE", help="one case of one operator, as a failure's command names it")
    add("--samples", type=int, metavar="N", help="at most N samples of each operator and dtype (default: all)")
    add("--combinations", type=int, default=16, metavar="N", help="placements for each sample, mesh and variant (default: 16)")
    add("--seed", type=int, default=0, help="of samples, combinations and slices (default: 0)")
    add("--main-dtype-only", action="store_true", help="float32 alone, or the first dtype that an operator takes instead")
    add("--jobs", type=int, default=1, metavar="N", help="processes at once (default: 1)")
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="time for one operator (default: 600)")
    add("--out", type=Path, default=Path("opdb-out"), metavar="DIR", help="results; a sweep that ended early goes on from them")
    add("--record", type=Path, metavar="FILE", help="write the result as a baseline")
    add("--baseline", type=Path, metavar="FILE", help="exit with 1 where something is worse than recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
