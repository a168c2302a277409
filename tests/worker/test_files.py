"""Values filled from files: boxes put in place, dtypes converted, failures kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dtorch.core.program import Barrier, Fetch, Filled, Load, MeshInfo, Read, Reply
from dtorch.worker.executor import Executor

PAIR = MeshInfo("cpu", [2], [4, 5])
A, B = torch.arange(12.0).reshape(3, 4), torch.arange(6).reshape(2, 3)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    save_file({"a": A, "s": torch.tensor(2.5), "e": torch.zeros(0, 3)}, tmp_path / "one")
    save_file({"b": B}, tmp_path / "two")
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def load(files: list[str], *values: Filled) -> Load:
    return Load(files, [(0, "a"), (1, "b"), (0, "s"), (0, "e"), (0, "no")], list(values))


def loaded(instruction: Load) -> list[list[torch.Tensor]]:
    executor = Executor()
    executor.submit(0, [instruction])
    return [executor.run(0, [Fetch(value.handle, value.mesh, value.axes)]).result for value in instruction.values]


def test_pieces_are_boxes_of_what_is_stored(files: list[str]) -> None:
    rows = Filled(
        7,
        PAIR,
        [0],
        "float32",
        [[2, 4], [1, 4]],
        [[Read(0, [0, 0], [2, 4], [0, 1], [0, 0], [2, 4])], [Read(0, [2, 0], [1, 4], [0, 1], [0, 0], [1, 4])]],
    )
    (pieces,) = loaded(load(files, rows))
    assert torch.equal(pieces[0], A[:2]) and torch.equal(pieces[1], A[2:])
    assert all(t.is_contiguous() and t.add_(1) is t for t in pieces)


def test_parts_of_several_files_are_put_together(files: list[str]) -> None:
    reads = [Read(0, [0, 1], [3, 2], [1, 0], [0, 0], [2, 3]), Read(1, [1, 0], [1, 3], [0, 1], [2, 0], [1, 3])]
    ((piece,),) = loaded(load(files, Filled(7, PAIR, [], "float64", [[3, 3]], [reads])))
    assert torch.equal(piece, torch.cat([A[:, 1:3].t(), B[1:]]).double())


def test_dims_of_length_one_come_and_go(files: list[str]) -> None:
    reads = [Read(0, [1, 0], [1, 4], [0, 1], [0, 0, 1], [4, 1, 1]), Read(0, [0, 0], [1, 4], [0, 1], [0, 0, 0], [4, 1, 1])]
    ((piece,),) = loaded(load(files, Filled(7, PAIR, [], "float32", [[4, 1, 2]], [reads])))
    assert torch.equal(piece, torch.stack([A[0], A[1]], -1).unsqueeze(1))


def test_scalars_empty_pieces_and_dtypes(files: list[str]) -> None:
    scalar = Filled(7, PAIR, [], "bfloat16", [[]], [[Read(2, [], [], [], [], [])]])
    empty = Filled(8, PAIR, [], "float32", [[0, 3]], [[]])
    ((number,), (nothing,)) = loaded(load(files, scalar, empty))
    assert number.dtype == torch.bfloat16 and number.item() == 2.5
    assert nothing.shape == (0, 3)


def failing(files: list[str]) -> list[Load]:
    good = Filled(7, PAIR, [], "float32", [[3, 4]], [[Read(0, [0, 0], [3, 4], [0, 1], [0, 0], [3, 4])]])
    bad = Filled(8, PAIR, [], "float32", [[1]], [[Read(4, [0], [1], [0], [0], [1])]])
    return [load(files, good, bad), load([files[0] + ".gone", files[1]], good)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_spoils_all_of_the_instruction_and_is_told(files: list[str], number: int) -> None:
    executor = Executor()
    instruction = failing(files)[number]
    executor.submit(0, [instruction])
    (failure,) = executor.run(0, [Barrier()]).failures
    assert failure.operator == "Load" and any(word in failure.message for word in ("no", "No such file"))
    for value in instruction.values:
        assert executor.run(0, [Fetch(value.handle, value.mesh, value.axes)]) == Reply(None, [failure])


def test_files_are_closed_and_what_was_read_outlives_them(files: list[str]) -> None:
    whole = Filled(7, PAIR, [], "float32", [[3, 4]], [[Read(0, [0, 0], [3, 4], [0, 1], [0, 0], [3, 4])]])
    executor = Executor()
    executor.submit(0, [load(files, whole)])
    Path(files[0]).write_bytes(b"\0" * Path(files[0]).stat().st_size)
    assert torch.equal(executor.run(0, [Fetch(7, PAIR, [])]).result[0], A)
