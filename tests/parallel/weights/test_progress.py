"""The bar: with tqdm, without it, and not at all."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from dtorch.parallel.weights.progress import Silent, bar


def test_nothing_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("loading", 10, None) as shown:
        shown.update(10)
    assert isinstance(shown, Silent) and capsys.readouterr() == ("", "")


def test_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar("loading", 10, None) as shown:
        shown.update(10)
    assert "100%" in capsys.readouterr().err
    with bar("loading", 10, False):
        pass
    assert capsys.readouterr().err == ""


def test_lines_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with bar("loading", 40, True) as shown:
        for nbytes in (1, 3, 16, 20):
            shown.update(nbytes)
    assert capsys.readouterr().err.splitlines() == ["loading: 10%", "loading: 50%", "loading: 100%"]
