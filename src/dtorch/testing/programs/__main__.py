"""``python -m dtorch.testing.programs``: run random programs, print each that fails as a script, and the figures."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence

from .batch import Report, Settings
from .pool import batches

OPERATORS_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 where both sides agree in all programs, else 1.
    """
    given = _parser().parse_args(arguments)
    began, total = time.monotonic(), Report()
    settings = Settings(seed=given.seed, shrink=not given.no_shrink, limit_s=given.limit)
    for report in batches(range(given.first, given.first + given.count), settings, given.jobs):
        total.add(report)
        for failure in report.failures:
            print(f"# program {failure.number}: {failure.kind}: {failure.text}\n{failure.script}\n", flush=True)
        print(f"{total.programs}/{given.count}", file=sys.stderr, flush=True)
    print(_figures(total, time.monotonic() - began))
    return 1 if total.failures else 0


def _figures(total: Report, seconds: float) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in total.kinds().items())
    shown = ", ".join(f"{name} {n}" for name, n in total.operators.most_common(OPERATORS_SHOWN))
    return "\n".join(
        (
            f"programs {total.programs} (seed {total.seed}): {kinds}",
            f"statements: {total.ran} ran on both sides, {total.refused} refused by both",
            f"tensors: {total.rounded} right up to rounding, by the judge; {total.layouts} right under other strides",
            f"operators, {len(total.operators)} different, {total.operators.total()} calls: {shown}, ...",
            f"{seconds:.0f} s",
        )
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m dtorch.testing.programs", description="Random programs against plain PyTorch.")
    add = parser.add_argument
    add("--count", type=int, default=1000, metavar="N", help="programs (default: 1000)")
    add("--first", type=int, default=0, metavar="N", help="number of the first program, to run one again (default: 0)")
    add("--seed", type=int, default=0, help="of all programs (default: 0)")
    add("--jobs", type=int, default=1, metavar="N", help="processes at once (default: 1)")
    add("--limit", type=float, default=60.0, metavar="SECONDS", help="time for one program (default: 60)")
    add("--no-shrink", action="store_true", help="print failing programs as they were drawn")
    return parser


if __name__ == "__main__":
    sys.exit(main())
