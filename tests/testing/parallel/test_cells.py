"""A fixed part of the cells: ten of each small model, as the command draws them, and some on many devices."""

from __future__ import annotations

import pytest

from dtorch.testing.parallel.cell import parse_cell
from dtorch.testing.parallel.draw import drawn
from dtorch.testing.parallel.record import GOOD
from dtorch.testing.parallel.run import run_cell
from dtorch.testing.parallel.zoo import MODELS, REAL
from tests.models.zoo import ANY_RULE

SEED, EACH = 0, 10

CELLS = [cell for name in MODELS if name != REAL for cell in drawn(name, EACH, SEED)]

# Six axes, 64 devices.
LARGE = [
    "llama:dp=2,fsdp=2,tp=2,pp=2,ulysses_cp=2,ring_cp=2:batch=7,length=11",
    "mixtral:ep=2,fsdp=2,tp=2,pp=2,ulysses_cp=2,ring_cp=2:sp=1,length=11",
    "gpt2:pp=2,ring_cp=2,dp=2,tp=2,ulysses_cp=2,fsdp=2:sp=1,zero=2",
]


@pytest.mark.parametrize("text", [*sorted(map(str, CELLS)), *LARGE])
@ANY_RULE
def test_the_numbers_are_those_of_plain_pytorch(text: str) -> None:
    record = run_cell(parse_cell(text))
    assert record.kind in GOOD, record.text


def test_there_are_sixty() -> None:
    assert len(set(CELLS)) == 60
