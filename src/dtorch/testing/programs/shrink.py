"""Cut a failing program down: fewer lines, simpler placements, a smaller mesh, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .program import Program, defined, used
from .run import ERROR, Failure, run

BUDGET = 400
"""Programs run at most."""
WORDS = 5
"""Words of an error's text that tell one cause from another."""


def shrunk(program: Program, failure: Failure) -> Program:
    """The smallest program found that fails in the same way."""
    return reduced(program, lambda p: (f := run(p).failure) is not None and _way(f) == _way(failure))


def _way(failure: Failure) -> tuple[str, ...]:
    """Kind of a failure, and the first words of an error."""
    return failure.kind, *(re.sub(r"\d+", "", failure.text).split()[:WORDS] if failure.kind == ERROR else ())


def reduced(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Take the first smaller program that still fails, until none does."""
    tried = {program}
    while len(tried) < BUDGET:
        for smaller in _smaller(program):
            if smaller not in tried:
                tried.add(smaller)
                if fails(smaller):
                    program = smaller
                    break
        else:
            break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    lines = program.lines
    yield Program(program.mesh, lines[: len(lines) // 2])
    for number in reversed(range(len(lines))):
        yield Program(program.mesh, _without(lines, number))
    if len(program.mesh) > 1:
        for axis in range(len(program.mesh)):
            mesh = program.mesh[:axis] + program.mesh[axis + 1 :]
            yield Program(mesh, tuple(_without_axis(line, axis) for line in lines))
    for number, line in enumerate(lines):
        for pattern, simple in SIMPLER:
            for match in re.finditer(pattern, line):
                simpler = line[: match.start()] + simple.format(*match.groups()) + line[match.end() :]
                yield Program(program.mesh, (*lines[:number], simpler, *lines[number + 1 :]))


def _without(lines: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The lines without one, and without what needs it."""
    gone, kept = set(defined(lines[number])), list(lines[:number])
    for line in lines[number + 1 :]:
        if gone.isdisjoint(used(line)):
            kept.append(line)
        else:
            gone.update(defined(line))
    return tuple(kept)


PLACEMENTS = re.compile(r"\[((?:Shard|Replicate|Partial)\(.*\))\](?=[,)])")


def _without_axis(line: str, axis: int) -> str:
    match = PLACEMENTS.search(line)
    if match is None:
        return line
    placements = re.findall(r"(?:Shard|Partial)\((?:[^()]|\([^()]*\))*\)|Replicate\(\)", match[1])
    kept = ", ".join(p for a, p in enumerate(placements) if a != axis)
    return f"{line[: match.start()]}[{kept}]{line[match.end() :]}"


SIMPLER = (
    (r"Shard\((\d+), sizes=\([^()]*\)\)", "Shard({})"),
    (r"Shard\(\d+\)|Partial\([^()]*\)|Shard\(\d+, sizes=\([^()]*\)\)", "Replicate()"),
    (r", grad=True", ""),
    (r"torch\.(?:float64|bfloat16|complex64|int64|bool)", "torch.float32"),
)
"""What a part of a line may be replaced with."""
