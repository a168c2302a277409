"""Everything can cross a socket, and comes out as it went in."""

from __future__ import annotations

import math
import struct
import typing
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from dtorch.core.errors import InternalError, ProtocolError
from dtorch.core.program import (
    VERSION,
    Apply,
    Barrier,
    Call,
    Calls,
    Collective,
    Const,
    DefaultDtype,
    DefinePlan,
    Draw,
    Drop,
    Exchange,
    Failure,
    Fetch,
    Filled,
    Forget,
    Free,
    Instruction,
    Load,
    Local,
    MeshInfo,
    Put,
    PutFunction,
    Read,
    Reply,
    Scalar,
    Shutdown,
    Slot,
    Together,
    Vary,
)
from dtorch.transport.inprocess import InlineTransport
from dtorch.transport.messages import EncodedTransport, decode_batch, decode_reply, deflated, encode_batch, encode_reply
from dtorch.worker.executor import Executor
from tests.worker.plans import ONE

MESH = MeshInfo("cpu", [2], [3, 4])
ARGS: list[Any] = [
    Slot(0),
    [Slot(1), [Scalar(0)], None],
    Vary([[1, 2], [3], Const("dtype", "int8")]),
    Const("dtype", "bfloat16"),
    True,
    "sum",
    float("inf"),
    -0.0,
    0.1,
    1 + 2j,
    2**64 - 1,
    -(2**70),
]
STEPS = [
    Local("aten::x.default", ARGS, {"a": Slot(0), "b": [Vary([1, 2])]}, [1], [0], 0),
    Collective("slice", 1, 2, 1, 0, [1, 2], "sum", 0, [0]),
    Exchange(0, 1, [[(0, [1], [2], [3])], []], [[4], [0]], 0, 1, "float32"),
    Apply(0, [1], [2], [0], 1),
    Together([Collective("all_gather", 1, 0, 1, 0, [1, 2], "sum", 0, [], [1, 0], refill=True)]),
]
INSTRUCTIONS: list[Instruction] = [
    DefinePlan(1, "aten::x.default", [MESH, MESH], [[0], []], [0, 1], 1, STEPS, [1], True),
    Calls.of(Call(1, [10**12], [2], [2**100, 1.5, None, True])),
    Load(["f"], [(0, "a"), (0, "b")], [Filled(3, MESH, [0], "float16", [[2], [0]], [[Read(1, [4], [2], [0], [0], [2])], []])]),
    Fetch(1, ONE, [0], True),
    Free([1, 2]),
    Drop([1, 2]),
    Forget([1]),
    DefaultDtype("float64"),
    Barrier(),
    Shutdown(),
]


def through(batch: list[Instruction]) -> list[Instruction]:
    first, result = decode_batch([bytes(f) for f in encode_batch(41, batch)])
    assert first == 41
    return result


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: type(i).__name__)
def test_every_instruction(instruction: Instruction) -> None:
    (back,) = through([instruction])
    assert back == instruction and type(back) is type(instruction)


def test_a_whole_batch() -> None:
    assert through(INSTRUCTIONS) == INSTRUCTIONS


@given(st.floats(allow_nan=True))
def test_doubles_are_exact_to_the_bit(number: float) -> None:
    (back,) = through([Calls.of(Call(1, [], [], [number]))])
    assert isinstance(back, Calls) and struct.pack("<d", back.scalars[0]) == struct.pack("<d", number)


@given(st.integers() | st.booleans())
def test_integers_of_any_size(number: int) -> None:
    (back,) = through([Calls.of(Call(1, [], [], [number, [number]]))])
    assert isinstance(back, Calls) and back.scalars == [number, [number]] and type(back.scalars[0]) is type(number)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.uint8,
]


def tensors() -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        base = torch.randint(0, 2, (3, 4, 2)).to(dtype)
        yield from (base, base.permute(2, 0, 1), base[:, 1:3], base[0, 0, 0], base[:0], base[0, 0, :1].expand(5))
    yield torch.tensor([1 + 2j]).conj()
    yield torch.tensor([float("nan"), math.inf, -0.0])
    yield torch.ones(2, requires_grad=True)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_tensors_of_every_kind_in_one_message() -> None:
    given_tensors = list(tensors())
    (back,) = through([Put(1, MESH, [0], given_tensors)])
    assert isinstance(back, Put)
    for a, b in zip(given_tensors, back.tensors, strict=True):
        assert same(a.detach(), b), a
        assert not b.requires_grad and b.add_(b) is b, "the tensor is writable memory of its own"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_dense_tensors_keep_their_strides(order: tuple[int, ...]) -> None:
    tensor = torch.randn(3, 4, 2).permute(order)
    (back,) = through([Put(1, MESH, [], [tensor])])
    assert isinstance(back, Put) and back.tensors[0].stride() == tensor.stride()


def test_a_dense_tensor_is_not_copied_to_be_sent() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    frame = encode_batch(0, [Put(1, MESH, [], [tensor])])[1]
    tensor[2] = 9
    assert bytes(frame) == b"\0\0\x09\0"


def test_a_generator_state() -> None:
    state = torch.Generator().manual_seed(3).get_state()
    (back,) = through([Draw(1, [], [2], [], state)])
    assert isinstance(back, Draw) and torch.equal(back.state, state)


def test_replies() -> None:
    failure = Failure(3, "aten::mm.default", 7, "cpu:0", "[2]", "RuntimeError: no", "Traceback\n")
    reply = Reply([[[2, 3], [3, 1], "float32"]], [failure])
    assert decode_reply(encode_reply(reply)) == reply
    back = decode_reply([bytes(f) for f in encode_reply(Reply([torch.ones(2), torch.zeros(0)]))])
    assert [t.tolist() for t in back.result] == [[1, 1], []]


def test_big_ints_beside_tensors_lose_no_frame() -> None:
    put, call = through([Put(1, MESH, [], [torch.ones(2)]), Calls.of(Call(1, [], [], [2**90]))])
    assert isinstance(put, Put) and put.tensors[0].tolist() == [1, 1]
    assert isinstance(call, Calls) and call.scalars == [2**90]


def test_another_version_is_refused_before_the_rest_is_read() -> None:
    frames = [msgpack.encode((VERSION + 1, 0, {"a": "future body"}))]
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}"):
        decode_batch(frames)


def test_what_cannot_be_read_is_refused() -> None:
    frames = [bytes(f) for f in encode_batch(0, [Put(1, MESH, [], [torch.ones(2)])])]
    for bad in (
        [frames[0][:-3], frames[1]],
        frames[:1],
        [frames[0], frames[1][:-1]],
        [msgpack.encode((VERSION, 0, [{"type": "no"}]))],
    ):
        with pytest.raises(ProtocolError):
            decode_batch(bad)
    with pytest.raises(ProtocolError):
        decode_batch([msgpack.encode((VERSION, 0, [["call"], msgpack.Ext(77, b"")]))])


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode_batch(0, [Calls.of(Call(1, [], [], [object()]))])


def test_a_call_is_a_few_dozen_bytes() -> None:
    many = [Call(900, [10**6, 10**6 + 1], [10**6 + 2], [])] * 100
    assert len(encode_batch(0, [Calls.of(*many)])[0]) < 100 * 64


def test_a_worker_behind_encoding_computes_the_same() -> None:
    add = DefinePlan(
        1,
        "add",
        [MESH],
        [[0]] * 3,
        [0] * 3,
        2,
        [Local("aten::add.Tensor", [Slot(0), Slot(1)], {"alpha": Scalar(0)}, [2], [0])],
        [2],
    )
    transport = EncodedTransport(InlineTransport(Executor()))
    pieces = [torch.randn(2, 2).t(), torch.randn(1, 2)]
    transport.submit(0, [add, Put(1, MESH, [0], pieces), Calls.of(Call(1, [1, 1], [2], [2.0]))])
    result = transport.request(1, [Fetch(2, MESH, [0])]).result().result
    assert all(torch.equal(r, p + 2 * p) for r, p in zip(result, pieces, strict=True))
    transport.submit(1, [Calls.of(Call(1, [1], [3], [2.0]))])
    assert transport.request(2, [Fetch(3, ONE, [])]).result().failures[0].sequence == 1
    transport.close()


def test_instructions_are_all_covered() -> None:
    covered = {type(i) for i in INSTRUCTIONS} | {Put, Draw, PutFunction}
    assert covered == set(typing.get_args(Instruction))


def test_a_function_travels_pickled_only() -> None:
    with pytest.raises(InternalError, match="not made ready"):
        encode_batch(0, [PutFunction(1, len)])
    assert decode_batch(encode_batch(0, [PutFunction(1, b"pickled")]))[1] == [PutFunction(1, b"pickled")]


def test_long_frames_travel_compressed_and_what_is_no_such_frame_is_refused() -> None:
    batch = [Calls.of(*(Call(7, [n], [n + 1], []) for n in range(2000)))]
    frames = encode_batch(3, batch)
    frames[0], plain = deflated(frames[0]), frames[0]
    assert len(frames[0]) < len(plain) / 4
    assert decode_batch(frames) == decode_batch([plain]) == (3, batch)
    short = encode_batch(0, [])
    assert deflated(short[0]) is short[0]
    for wrong in (frames[0][:-9], frames[0][:40] + b"\0" * 40 + frames[0][80:], b"", b"\x78"):
        with pytest.raises(ProtocolError):
            decode_batch([wrong])


def test_a_frame_that_inflates_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.transport.messages.MOST_INFLATED_NBYTES", 1 << 16)
    with pytest.raises(ProtocolError, match="more than 65536 bytes"):
        decode_batch([zlib.compress(b"\0" * (1 << 24), 9)])
    long = bytes(1 << 17)
    assert deflated(long) is long
