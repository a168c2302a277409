"""A program as data: a mesh and lines of Python, each of which is one statement."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

LOOK = "look()"
"""The line at which everything is read and compared."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can be run on both sides, printed, and cut down.

    Attributes:
        mesh: shape of the CPU mesh of the global side.
        lines: statements such as ``b = a.sum(0)``. They may use ``torch``, the placements, and the functions of ``sides``.
    """

    mesh: tuple[int, ...]
    lines: tuple[str, ...]

    def script(self) -> str:
        """The program as Python text that runs it and fails as it does."""
        body = "\n".join(self.lines)
        return f'from dtorch.testing.programs import check\n\ncheck({self.mesh}, """\n{body}\n""")'


@cache
def defined(line: str) -> tuple[str, ...]:
    """Names that a line assigns."""
    tree = ast.parse(line)
    return tuple(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


@cache
def used(line: str) -> frozenset[str]:
    """Names that a line reads or deletes."""
    tree = ast.parse(line)
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store))


def operators(line: str) -> list[str]:
    """Names of what a line calls; ``[]`` stands for an index."""
    nodes = list(ast.walk(ast.parse(line)))
    calls = [n.func for n in nodes if isinstance(n, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)]
    names += ["[]=" if isinstance(n.ctx, ast.Store) else "[]" for n in nodes if isinstance(n, ast.Subscript)]
    names += [type(n.op).__name__.lower() for n in nodes if isinstance(n, ast.BinOp | ast.AugAssign)]
    return [n for n in names if n not in NO_OPERATORS]


NO_OPERATORS = frozenset(("Shard", "Partial", "Replicate", "look", "manual_seed", "slice"))
