"""The façade: every public name is sorted, documented in docs/api.md, and has a docstring of its own."""

from __future__ import annotations

import re
from pathlib import Path

import dtorch

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def names_in_code(markdown: str) -> set[str]:
    """Identifiers that stand in code, inline or fenced, where a reader looks a name up."""
    code = re.findall(r"```.*?```|`[^`\n]+`", markdown, flags=re.DOTALL)
    return {name for span in code for name in re.findall(r"[A-Za-z_]\w*", span)}


def has_own_docstring(name: str, value: object) -> bool:
    """Whether somebody wrote the docstring: an inherited one, or a dataclass' generated signature, does not count."""
    text = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return bool(text and text.strip()) and not text.startswith(f"{name}(")


def test_all_is_sorted_and_unique() -> None:
    assert list(dtorch.__all__) == sorted(set(dtorch.__all__))


def test_every_name_exists() -> None:
    assert [name for name in dtorch.__all__ if not hasattr(dtorch, name)] == []


def test_every_name_is_on_the_api_page() -> None:
    documented = names_in_code(API_PAGE.read_text(encoding="utf-8"))
    assert sorted(set(dtorch.__all__) - documented) == []


def test_every_name_has_a_docstring() -> None:
    assert [name for name in dtorch.__all__ if not has_own_docstring(name, getattr(dtorch, name))] == []


def test_every_name_of_nn_is_documented() -> None:
    documented = names_in_code(API_PAGE.read_text(encoding="utf-8"))
    assert sorted(set(dtorch.nn.__all__) - documented) == []
    assert [name for name in dtorch.nn.__all__ if not has_own_docstring(name, getattr(dtorch.nn, name))] == []


def test_prose_is_no_documentation() -> None:
    assert names_in_code("The zeros of `ones(n)`.\n```python\nx = full(3)\n```\n") == {"ones", "n", "python", "x", "full"}


def test_an_inherited_docstring_is_not_ones_own() -> None:
    class Base:
        """Written."""

    class Derived(Base):
        pass

    assert has_own_docstring("Base", Base)
    assert not has_own_docstring("Derived", Derived)
