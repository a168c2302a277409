"""Local collectives against plain torch: values, memory layout, and that results are copies."""

from __future__ import annotations

import pytest
import torch

from dtorch.communication.local import all_gather, all_reduce, all_to_all, assemble, fill, keep, reduce_scatter

OPS = ("sum", "avg", "max", "min", "prod")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -3, 4, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 1, 0), (0, 0), (5,)])
@pytest.mark.parametrize("dim", [0, 1])
def test_gathering_puts_cut_pieces_together(dtype: torch.dtype, sizes: tuple[int, ...], dim: int) -> None:
    shape = [4, 4]
    shape[dim] = sum(sizes)
    whole = torch.randn(shape).to(dtype) if dtype.is_complex else sample(tuple(shape), dtype)
    pieces = list(whole.split(list(sizes), dim))
    assert torch.equal(all_gather(pieces, dim), whole)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathering_keeps_the_order_of_strides(order: tuple[int, ...], dim: int) -> None:
    whole = torch.randn(4, 6, 8).permute(order).contiguous().permute([order.index(d) for d in range(3)])
    pieces = [p.clone() for p in whole.chunk(2, dim)]
    gathered = all_gather(pieces, dim)
    assert torch.equal(gathered, whole) and gathered.stride() == whole.stride()


def test_gathering_looks_for_its_layout_past_empty_pieces() -> None:
    whole = torch.randn(6, 4).t()
    gathered = all_gather([torch.empty(4, 0), whole], 1)
    assert torch.equal(gathered, whole) and gathered.stride() == whole.stride()


def test_gathering_pieces_of_size_1_takes_the_order_it_is_given() -> None:
    whole = torch.randn(1, 5, 3, 4).transpose(1, 2)
    pieces = [p.clone() for p in whole.split(1, 1)]
    gathered = all_gather(pieces, 1, (0, 2, 1, 3))
    assert torch.equal(gathered, whole) and gathered.stride() == whole.stride()


@pytest.mark.parametrize("sizes", [(3, 3), (2, 1, 3), (0, 6)])
@pytest.mark.parametrize(("from_dim", "dim"), [(0, 1), (1, 0)])
def test_splitting_anew(sizes: tuple[int, ...], from_dim: int, dim: int) -> None:
    whole, start = torch.randn(6, 6), 0
    for size in sizes:
        piece = all_to_all(whole.split(list(sizes), from_dim), from_dim, dim, start, size)
        assert torch.equal(piece, whole.narrow(dim, start, size)) and piece.is_contiguous()
        start += size


def test_gathering_expanded_pieces_is_row_major() -> None:
    assert all_gather([torch.ones(1, 3).expand(2, 3)] * 2, 0).stride() == (3, 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reducing_goes_from_left_to_right(op: str, dtype: torch.dtype) -> None:
    line = [sample((2, 3), dtype) for _ in range(4)]
    kept = [t.clone() for t in line]
    total = kept[0]
    for piece in kept[1:]:
        total = {"max": torch.maximum, "min": torch.minimum, "prod": torch.mul}.get(op, torch.add)(total, piece)
    if op == "avg" and dtype != torch.bool:
        total = torch.div(total, 4, rounding_mode=None if dtype.is_floating_point else "floor")
    result = all_reduce(line, op)
    assert result.dtype == dtype and torch.equal(result, total)
    assert all(torch.equal(a, b) for a, b in zip(line, kept, strict=True)), "reducing wrote to its sources"


def test_reducing_propagates_nan() -> None:
    line = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 0.0])]
    assert all_reduce(line, "max").isnan().tolist() == [False, True]


def test_reducing_complex_numbers() -> None:
    line = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    assert all_reduce(line, "avg").tolist() == [2 + 0.5j]


def test_reducing_one_piece_is_a_copy() -> None:
    piece = torch.ones(2)
    all_reduce([piece], "sum").zero_()
    assert piece.tolist() == [1, 1]


def test_reducing_keeps_strides() -> None:
    line = [torch.randn(3, 5).t() for _ in range(3)]
    assert all_reduce(line, "sum").stride() == (1, 5)


@pytest.mark.parametrize("op", OPS)
def test_scattered_pieces_are_those_of_the_whole_reduction(op: str) -> None:
    line = [torch.randn(5, 4) for _ in range(3)]
    whole = all_reduce(line, op)
    for start, size in ((0, 2), (2, 3), (5, 0)):
        assert torch.equal(reduce_scatter(line, op, 0, start, size), whole.narrow(0, start, size))


def test_keeping_a_part_is_a_copy_without_the_rest() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    part = keep(whole, 1, 1, 2)
    assert part.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert part.untyped_storage().nbytes() == part.nbytes
    part.zero_()
    assert whole[0, 1] == 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reducing_what_was_filled_gives_the_value_back(op: str, dtype: torch.dtype) -> None:
    value = sample((3, 2), dtype)
    parts = [fill(value, op, first=i == 0) for i in range(3)]
    assert torch.equal(all_reduce(parts, op), value)
    parts[0].zero_()
    assert torch.equal(all_reduce([fill(value, op, first=True)], op), value), "a part shares the value's memory"


def test_assembling_copies_overlaps() -> None:
    sources = [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)]
    parts = [(0, [1, 0], [0, 0], [1, 3]), (1, [0, 1], [1, 0], [1, 2]), (1, [1, 0], [1, 2], [1, 1])]
    assert assemble(sources, parts, [2, 3], torch.int64, torch.device("cpu"), [0, 1]).tolist() == [[3, 4, 5], [7, 8, 9]]


def test_assembling_keeps_the_order_of_strides_and_shares_nothing() -> None:
    source = torch.randn(3, 4).t()
    target = assemble([source], [(0, [0, 0], [0, 0], [4, 3])], [4, 3], torch.float32, torch.device("cpu"), [1, 0])
    assert torch.equal(target, source) and target.stride() == (1, 4)
    target.zero_()
    assert source.abs().sum() > 0


def test_assembling_nothing_gives_an_empty_piece_of_the_right_dtype() -> None:
    empty = assemble([], [], [0, 2], torch.int8, torch.device("cpu"), [0, 1])
    assert empty.shape == (0, 2) and empty.dtype == torch.int8


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("sizes", [(3, 1), (4, 0), (0, 0)])
def test_gathering_into_memory_that_was_dropped(order: tuple[int, int], sizes: tuple[int, int]) -> None:
    whole = torch.randn(sum(sizes), 5).permute(order).contiguous().permute(order)
    pieces = [p.clone() for p in whole.split(list(sizes))]
    held = all_gather(pieces, 0, order)
    view = held.t()[2]
    held.untyped_storage().resize_(0)
    assert all_gather(pieces, 0, order, held) is not None
    assert torch.equal(held, whole) and torch.equal(view, whole.t()[2])
