"""Errors: raised where they should be, telling what was given, which rule it breaks, where, what to do; nothing breaks after."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import (
    DeviceMesh,
    DTorchError,
    MeshError,
    Partial,
    PlacementError,
    RemoteError,
    Replicate,
    SessionClosedError,
    Shard,
    UsageError,
    init_device_mesh,
)
from dtorch.tensor import client as clients
from dtorch.testing.sessions import own_session
from dtorch.testing.thread import ThreadTransport
from dtorch.transport.inprocess import InlineTransport
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESH = init_device_mesh("cpu", 2)


@pytest.fixture(autouse=True)
def _session_stays_usable() -> Iterator[None]:
    x = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0)])
    yield
    assert (x + 1).tolist() == [2.0] * 4


def assert_four_parts(error: BaseException) -> None:
    lines = str(error).splitlines()
    starts = [line.strip().split(":")[0] for line in lines]
    assert lines[0] and all(part in starts for part in ("rule", "where", "to do")), str(error)


def split() -> dtorch.Tensor:
    return place(values(4, 6), MESH, (Shard(0),))


USAGE: dict[str, tuple[type, str, Callable[[], object]]] = {
    "too many placements": (
        PlacementError,
        "one placement per mesh axis",
        lambda: dtorch.ones(4, device_mesh=MESH, placements=[R, R]),
    ),
    "too few placements": (
        PlacementError,
        "one placement per mesh axis",
        lambda: dtorch.Tensor(torch.ones(4), device_mesh=init_device_mesh("cpu", (2, 2)), placements=[R]),
    ),
    "placements of the wrong length to redistribute": (
        PlacementError,
        "one placement per mesh axis",
        lambda: split().redistribute(placements=[]),
    ),
    "shard dim out of range": (PlacementError, "shard dim", lambda: dtorch.ones(4, device_mesh=MESH, placements=[Shard(1)])),
    "shard dim of a scalar": (PlacementError, "shard dim", lambda: dtorch.Tensor(3.0, device_mesh=MESH, placements=[Shard(0)])),
    "sizes that do not add up": (PlacementError, "add up", lambda: split().redistribute(placements=[Shard(0, (1, 2))])),
    "no placement at all": (PlacementError, "a placement is", lambda: split().redistribute(placements=["S0"])),
    "duplicate device ids": (MeshError, "distinct", lambda: DeviceMesh("cpu", [0, 1, 1])),
    "names that do not match the shape": (
        MeshError,
        "one distinct name",
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)),
    ),
    "an axis that is not there": (MeshError, "'pp'", lambda: MESH["pp"]),
    "two meshes": (MeshError, "one mesh", lambda: split() + place(values(4, 6), DeviceMesh("cpu", [1, 2]), (R,))),
    "two meshes in a list": (
        MeshError,
        "one mesh",
        lambda: torch.cat([split(), place(values(4, 6), DeviceMesh("cpu", [1, 2]), (R,))]),
    ),
    "two meshes in place": (MeshError, "one mesh", lambda: split().add_(place(values(4, 6), DeviceMesh("cpu", [1, 2]), (R,)))),
    "data that is no tensor": (UsageError, "made of", lambda: dtorch.Tensor("text")),
    "data of objects": (UsageError, "made of", lambda: dtorch.tensor([object()])),
    "ragged data": (UsageError, "made of", lambda: dtorch.tensor([[1], [2, 3]])),
    "local pieces that do not fit": (
        PlacementError,
        "make it",
        lambda: dtorch.from_local([torch.ones(2), torch.ones(3, 1)], MESH, [R]),
    ),
    "an unknown reduce op": (PlacementError, "'mode'", lambda: Partial("mode")),
    "pickling": (UsageError, "to_torch", lambda: split().__reduce_ex__(2)),
    "a second session": (UsageError, "one session", lambda: dtorch.init()),
    "a cuda mesh without cuda": (MeshError, "cuda", lambda: dtorch.ones(2, device_mesh=DeviceMesh("cuda", [10**6]))),
    "a mesh of the wrong type": (UsageError, "mesh", lambda: dtorch.ones(2, device_mesh="cpu")),
    "a mesh of the wrong type to redistribute": (UsageError, "mesh", lambda: split().redistribute((2, 2))),
}


@pytest.mark.parametrize(("error", "rule", "program"), USAGE.values(), ids=USAGE)
def test_usage_errors_are_raised_at_once(error: type, rule: str, program: Callable) -> None:
    with pytest.raises(error, match=rule) as raised:
        program()
    assert isinstance(raised.value, DTorchError)
    assert_four_parts(raised.value)


PYTORCH: dict[str, Callable[[torch.Tensor], object]] = {
    "shapes that do not broadcast": lambda x: x + x.new_ones(5),
    "a product of the wrong shape": lambda x: x @ x,
    "a dim out of range": lambda x: x.sum(5),
    "a view of the wrong size": lambda x: x.view(5, 5),
    "an index out of range": lambda x: x[9],
    "an unsqueeze out of range": lambda x: x.unsqueeze(7),
    "cat of different sizes": lambda x: torch.cat([x, x[:, :2]]),
    "gradients of integers": lambda x: x.long().requires_grad_(),
    "too many indices": lambda x: x[0, 0, 0],
    "expanding a dim that is not 1": lambda x: x.expand(7, 6),
    "no number": lambda x: x + "text",
    "no list of numbers": lambda x: x + [1, 2, 3, 4, 5, 6],
    "a wrong keyword": lambda x: x.sum(dims=3),
    "in place with another shape": lambda x: x[0].add_(x),
    "an item of many": lambda x: x.item(),
}


@pytest.mark.parametrize("program", PYTORCH.values(), ids=PYTORCH)
def test_what_pytorch_refuses_is_refused_at_once_in_its_own_words(program: Callable) -> None:
    with pytest.raises(Exception) as expected:
        program(values(4, 6))
    for placements in ((R,), (Shard(0),), (Shard(1),)):
        with pytest.raises(type(expected.value)):
            program(place(values(4, 6), MESH, placements))


REMOTE: dict[str, tuple[str, Callable[[dtorch.Tensor], torch.Tensor]]] = {
    "an index out of range in embedding": ("embedding", lambda x: F.embedding(dtorch.Tensor([99], device_mesh=MESH), x)),
    "a plain index out of range in embedding": ("embedding", lambda x: F.embedding(torch.tensor([99]), x)),
    "an index out of range": ("index", lambda x: x[dtorch.Tensor([99], device_mesh=MESH)]),
    "an index out of range in gather": ("gather", lambda x: x.gather(0, torch.full((1, 6), 99))),
    "ints divided by zero": ("div", lambda x: torch.div(x.long(), torch.zeros(6, dtype=torch.int64), rounding_mode="floor")),
    "ints modulo zero": ("remainder", lambda x: x.long() % torch.zeros(6, dtype=torch.int64)),
    "a class out of range": ("nll_loss", lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 77]))),
    "dtypes that do not fit": ("linalg", lambda x: torch.linalg.eigh(x[:, :4].long())[0]),
    "a singular matrix": ("linalg", lambda x: torch.linalg.inv(x[:, :4] * 0)),
    "probabilities out of range": ("bernoulli", lambda x: torch.bernoulli(x.abs() + 5)),
}


@pytest.mark.parametrize("transport", [InlineTransport, ThreadTransport])
@pytest.mark.parametrize("placement", [R, Shard(0)], ids=str)
@pytest.mark.parametrize(("operator", "program"), REMOTE.values(), ids=REMOTE)
def test_an_operator_that_fails_on_a_worker(operator: str, program: Callable, placement: object, transport: type) -> None:
    with own_session(transport=transport):
        x = place(values(4, 6), MESH, (placement,))
        with pytest.raises(RemoteError) as raised:
            (program(x) * 2 + 1).to_torch()
        error = raised.value
        assert operator in error.operator and "cpu:" in error.device
        assert __file__ in error.site and __file__ in str(error)
        assert "Traceback" in error.worker_traceback and error.shapes
        assert_four_parts(error)
        assert torch.equal(x.to_torch(), values(4, 6))
        assert (x + 1).sum().item() == pytest.approx(float((values(4, 6) + 1).sum()))


def test_a_failure_names_its_line_whenever_it_is_read() -> None:
    table = dtorch.ones(4, 2, device_mesh=MESH)
    rows = F.embedding(torch.tensor([9]), table); line = inspect.currentframe().f_lineno  # fmt: skip  # noqa: E702
    for value in (rows + 1, rows, rows * 2):
        with pytest.raises(RemoteError) as caught:
            value.to_torch()
        assert caught.value.site.startswith(f"{__file__}:{line} in ")
        assert table.sum().item() == 8.0


def test_a_failure_poisons_only_what_depends_on_it() -> None:
    with own_session():
        x = place(values(4, 6), MESH, (Shard(0),))
        y = x * 2
        bad = F.embedding(torch.tensor([99]), x)
        z = y + 1
        with pytest.raises(RemoteError):
            z.to_torch()
        assert torch.equal(z.to_torch(), values(4, 6) * 2 + 1)
        for dependent in (bad + 1, bad.sum(), bad.redistribute(placements=[R])):
            with pytest.raises(RemoteError, match="embedding"):
                dependent.to_torch()
        y[0] = 5.0
        assert y[0, 0].item() == 5.0


def test_a_failed_write_poisons_what_it_would_have_written() -> None:
    with own_session():
        x = place(values(4, 6), MESH, (R,))
        x.index_add_(0, torch.tensor([99]), torch.ones(1, 6))
        with pytest.raises(RemoteError, match="index_add"):
            x.to_torch()
        assert dtorch.ones(2).tolist() == [1.0, 1.0]


def test_several_failures_before_a_read_are_counted() -> None:
    with own_session():
        table = dtorch.ones(3, 2, device_mesh=MESH)
        for _ in range(3):
            kept = F.embedding(torch.tensor([9]), table)
        with pytest.raises(RemoteError, match="2 more operators failed"):
            kept.to_torch()
        assert table.sum().item() == 6


@pytest.mark.parametrize(
    "make",
    [lambda: dtorch.empty(2**60, device_mesh=MESH), lambda: dtorch.zeros(2**30, 2**30, device_mesh=MESH, placements=[Shard(0)])],
)
def test_shapes_that_cannot_be_allocated(make: Callable) -> None:
    with own_session():
        with pytest.raises((RemoteError, RuntimeError), match=r"memory|allocate|overflow|size"):
            (make() + 1)[0].sum().item()
        assert dtorch.ones(2).tolist() == [1.0, 1.0]


def test_a_tensor_larger_than_any_memory_works_by_its_pieces() -> None:
    x = dtorch.ones(4, 1, device_mesh=MESH, placements=[Shard(0)]).expand(4, 2**40)
    assert x.shape == (4, 2**40) and x[:, 2**39].tolist() == [1.0] * 4


def test_use_after_shutdown() -> None:
    before = clients.running()
    clients.set_current(None)
    try:
        x = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0)])
        lazy = x + 1
        future = lazy.to_torch_async()
        w = dtorch.ones(4, device_mesh=MESH).requires_grad_()
        loss = (w * 2).sum()
        # What has come by then can be read afterwards.
        assert future.wait(60)
        dtorch.shutdown()
        dtorch.shutdown()
        uses = [
            lambda: x + 1,
            lambda: x.to_torch(),
            lambda: x.shards,
            lambda: x.sum().item(),
            lambda: repr(x),
            lambda: x.redistribute(placements=[R]),
            lambda: x.add_(1),
            lambda: x[0],
            lambda: torch.cat([x, x]),
            lambda: x + torch.ones(4),
            lambda: torch.ones(4) + x,
            lambda: x.to_torch_async(),
            lambda: loss.backward(),
            lambda: x.t(),
            lambda: dtorch.Tensor(x),
            lambda: x.uniform_(),
            lambda: torch._foreach_add([x], 1.0),
            lambda: torch.equal(x, x),
            lambda: x.tolist(),
        ]
        for use in uses:
            with pytest.raises(SessionClosedError) as raised:
                use()
            assert_four_parts(raised.value)
        assert x.shape == (4,) and x.placements == (Shard(0),) and x.detach() is not None
        assert future.get().tolist() == [2.0] * 4
        y = dtorch.ones(4, device_mesh=MESH)
        for use in uses:
            with pytest.raises(SessionClosedError):
                use()
        with pytest.raises(SessionClosedError):
            y + x
        assert y.tolist() == [1.0] * 4
        dtorch.shutdown()
    finally:
        clients.set_current(before)


def test_init_after_shutdown_starts_anew() -> None:
    before = clients.running()
    clients.set_current(None)
    try:
        first = dtorch.init()
        assert dtorch.session() is first
        with pytest.raises(UsageError, match="one session"):
            dtorch.init()
        dtorch.shutdown()
        second = dtorch.init(simulate={"cpu": 4})
        assert second is not first and dtorch.ones(2, device_mesh=init_device_mesh("cpu", 4)).tolist() == [1.0, 1.0]
        with pytest.raises(MeshError, match="4") as raised:
            dtorch.ones(2, device_mesh=init_device_mesh("cpu", 5))
        assert_four_parts(raised.value)
        dtorch.shutdown()
    finally:
        clients.set_current(before)


def test_synchronous_mode_raises_on_the_very_line() -> None:
    with own_session(synchronous=True) as (client, _):
        table = dtorch.ones(3, 2, device_mesh=MESH)
        table = table + 1
        assert not client.outbox
        with pytest.raises(RemoteError, match="embedding"):
            F.embedding(torch.tensor([9]), table)
        assert (table * 2).sum().item() == 24.0


def test_the_environment_switches_synchronous_mode_on() -> None:
    program = """
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", 2)
        table = dtorch.ones(3, 2, device_mesh=mesh, placements=[dtorch.Shard(0)])
        model = torch.nn.Linear(2, 2)
        assert dtorch.session().synchronous
        assert (table @ table.t()).softmax(0).sum().item() > 2.9
        try:
            torch.nn.functional.embedding(torch.tensor([9]), table)
        except dtorch.RemoteError as error:
            print("raised", error.operator)
        print(table.sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": ":".join(sys.path), "DTORCH_SYNC": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    raised, total = done.stdout.splitlines()[-2:]
    assert raised.startswith("raised") and raised.endswith("aten::embedding.default") and total == "6.0", (
        done.stdout + done.stderr
    )


def test_keyboard_interrupt_in_a_worker_leaves_the_session_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with own_session() as (_, worker):
        x = dtorch.ones(4, device_mesh=MESH)
        assert (x * 3).sum().item() == 12

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        for number, plan in worker._plans.items():
            if "mul" in plan.plan.operator:
                monkeypatch.setitem(worker._runs, number, interrupted)
        y, z = x + 1, x * 3
        after = z + 1
        with pytest.raises(KeyboardInterrupt):
            z.to_torch()
        monkeypatch.undo()
        assert (x * 3).tolist() == [3.0] * 4 and y.tolist() == [2.0] * 4
        with pytest.raises(RemoteError, match="KeyboardInterrupt"):
            after.to_torch()
        assert (x * 4).tolist() == [4.0] * 4


@pytest.mark.parametrize("after", [False, True], ids=["before it is sent", "after it was sent"])
def test_an_interrupt_of_a_hand_over_undoes_nothing(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    with own_session() as (client, _):
        x = dtorch.ones(4, device_mesh=MESH)
        x.add_(1)
        sink, submit = client.sink, client.sink.submit

        def interrupted(first: int, batch: list[Any]) -> None:
            if after:
                submit(first, batch)
            signal.raise_signal(signal.SIGINT)
            if not after:
                submit(first, batch)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(sink, "submit", interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.flush()
        finally:
            monkeypatch.undo()
            signal.signal(signal.SIGINT, before)
        assert x.tolist() == [2.0] * 4
        # Nothing that was defined on the way is lost.
        assert dtorch.ones(4, device_mesh=MESH).add_(1).tolist() == [2.0] * 4


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupt_of_the_embedded_session_lets_the_batch_end_and_a_second_does_not(signals: int) -> None:
    def strike(x: torch.Tensor) -> torch.Tensor:
        for _ in range(0 if x.is_meta else signals):
            signal.raise_signal(signal.SIGINT)
        return x + 1

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with own_session() as (client, _):
            x = dtorch.ones(4, device_mesh=MESH, placements=[R])
            x.add_(1)
            struck = dtorch.local_map(strike, [[R]], [R])(x)
            x.mul_(2)
            with pytest.raises(KeyboardInterrupt):
                client.flush()
            if signals == 1:
                assert x.tolist() == [4.0] * 4 and struck.tolist() == [3.0] * 4
            else:
                with pytest.raises(RemoteError, match="KeyboardInterrupt"):
                    struck.tolist()
    finally:
        signal.signal(signal.SIGINT, before)
