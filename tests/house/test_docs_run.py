"""Documentation that runs: the python blocks of each page are executed in order, in one namespace a page."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S)
PYTHON_WORDS = {"py", "python", "python3", "pycon"}


def python_blocks(markdown: str) -> list[tuple[int, str]]:
    """``(first line number, source)`` of each python block.

    Raises:
        ValueError: a block is marked as python in a way that would keep it from being run.
    """
    blocks = []
    for match in FENCE.finditer(markdown):
        info = match["info"].strip()
        line = markdown.count("\n", 0, match.start("body")) + 1
        if info == "python":
            blocks.append((line, textwrap.dedent(match["body"])))
        elif re.split(r"\W", info.lower(), maxsplit=1)[0] in PYTHON_WORDS:
            raise ValueError(f"line {line - 1}: ```{info}: every python block is marked ```python and runs")
    return blocks


def run_page(page: Path, namespace: dict[str, object]) -> None:
    """Executes the page's blocks; a traceback points at the page's own line."""
    for line, source in python_blocks(page.read_text(encoding="utf-8")):
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("docs_page")
    # Dataclasses and pickle look their module up by name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    run_page(page, vars(module))


def test_blocks_share_a_namespace_and_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\nx = 1\n```\n\n```bash\nfalse\n```\n\n- item\n\n  ```python\n  y = x + 1\n  1 / 0\n  ```\n"
    )
    namespace: dict[str, object] = {}
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, namespace)
    assert namespace["y"] == 2
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 15)


@pytest.mark.parametrize("info", ["python no-run", "python3", "pycon", "Python", "py"])
def test_no_block_escapes(info: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        python_blocks(f"text\n```{info}\nx = 1\n```\n")
