"""Small files and flat functions, held by numbers."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC, EXAMPLES = ROOT / "src" / "dtorch", ROOT / "examples"

MEDIAN_LINES = 170
LONGEST_FILE_LINES = 600
LONGEST_FUNCTION_LINES = 39


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of source lines the function's docstring takes, 0 without one."""
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return 0
    return first.end_lineno - first.lineno + 1


def function_lengths(source: str) -> Iterator[tuple[int, str, int]]:
    """``(line, name, lines from def to end without docstring)`` of every function, nested ones too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, node.end_lineno - node.lineno + 1 - docstring_lines(node)


def _sources(*folders: Path) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_no_file_is_long() -> None:
    lengths = {name: source.count("\n") for name, source in _sources(SRC, EXAMPLES).items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE_LINES} == {}


def test_the_median_file_is_short() -> None:
    # A façade has a handful of lines and would only flatter the median.
    lengths = [source.count("\n") for name, source in _sources(SRC).items() if Path(name).name != "__init__.py"]
    assert statistics.median(lengths) <= MEDIAN_LINES


def test_functions_are_flat() -> None:
    long = [
        f"{name}:{line}: {function} has {n} lines, at most {LONGEST_FUNCTION_LINES}"
        for name, source in _sources(SRC, EXAMPLES).items()
        for line, function, n in function_lengths(source)
        if n > LONGEST_FUNCTION_LINES
    ]
    assert long == []


def test_a_docstring_does_not_count_and_a_decorator_neither() -> None:
    source = '@cache\ndef f():\n    """One\n\n    two.\n    """\n    a = 1\n    return a\n'
    assert list(function_lengths(source)) == [(2, "f", 3)]
    assert list(function_lengths("async def g(): return 1")) == [(1, "g", 1)]
