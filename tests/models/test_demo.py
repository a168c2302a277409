"""The demo from start to end, on the real model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch.cli import main
from dtorch.demo import run
from dtorch.demo.model import Loaded
from dtorch.demo.talk import Answer


@pytest.fixture(autouse=True)
def _loaded_once(smollm2: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dtorch.shutdown()
    monkeypatch.setattr(run, "load_model", lambda: Loaded(copy.deepcopy(smollm2.model), smollm2.tokenizer))
    yield
    dtorch.shutdown()


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--prompt", "Say hello.", "--mesh", "dp=1,tp=2,pp=2", "--tokens", "7"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("What is the capital of France?") == out.count("Say hello.") == 2
    assert out.count("The capital of France is Paris.") == 2
    assert out.count("tokens identical: yes") == 2
    assert "stage 1   [1][3]   layers 15 to 29, norm" in out
    assert "6 + 3 of 9 heads" in out
    assert re.search(r"tp +all_reduce +[\d,]+ times +[\d.]+ MB", out)
    assert re.search(r"pp +transfer +[\d,]+ times +[\d.]+ MB", out)


def test_a_difference_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(range(4))
    monkeypatch.setattr(run, "ask", lambda *_: Answer(torch.tensor([[next(answers)]]), 0, 0.0))
    assert main(["demo", "--mesh", "tp=3"]) == 1
    assert capsys.readouterr().out.count("tokens identical: no") == 2
