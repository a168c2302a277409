"""The Chinese README says what the English one says: same code, same headings, same links, same figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

CODE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _readmes() -> list[str]:
    return [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")]


def figures(markdown: str) -> list[list[str]]:
    """The second and third cells of each table row, where figures stand, without words."""
    rows = [line.split("|")[2:4] for line in markdown.splitlines() if line.startswith("|")]
    return [re.findall(r"[\d.,]+", " ".join(cells)) for cells in rows]


def anchors(markdown: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_code_is_the_same() -> None:
    english, chinese = map(CODE.findall, _readmes())
    assert english == chinese != []


def test_headings_links_and_figures_are_the_same() -> None:
    english, chinese = _readmes()
    assert [h.count("#") for h in re.findall(r"^#+ ", english, re.M)] == [
        h.count("#") for h in re.findall(r"^#+ ", chinese, re.M)
    ]
    assert LINK.findall(english)[1:] == LINK.findall(chinese)[1:]
    assert figures(english) == figures(chinese)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target
