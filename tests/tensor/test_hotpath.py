"""The hot path, in C and in Python: both do the same."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import time
from _thread import start_new_thread
from types import ModuleType
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard, init_device_mesh
from dtorch.core.program import Barrier, Call, Free
from dtorch.tensor import purepath
from dtorch.tensor.hotpath import fastpath
from dtorch.testing.sessions import own_session

BOTH = [pytest.param(m, id=m.__name__.rpartition(".")[2]) for m in (purepath, fastpath) if m is not None]
MESH = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def stream_of(module: Any) -> Any:
    class Stream(module.Stream):
        """Keeps what it hands over."""

        def __init__(self) -> None:
            super().__init__()
            self.room, self.batch_limit, self.large_nbytes, self.free_limit = 1000, 4, 100, 3
            self.sent: list = []

        def flush(self) -> None:
            self.sent.append(self.take())
            self.room = 1000

        def free_early(self, nbytes: int) -> None:
            self.end_run()
            self.outbox.append(Free(self.take_freed(), nbytes >= 500))

    return Stream()


def told(batch: list) -> list:
    """Calls and frees of a batch, in order."""
    return [x for i in batch for x in ([i] if isinstance(i, Free) else i.unpacked())]


def pack(stream: Any, number: int, nbytes: int = 0, scalars: tuple = ()) -> None:
    stream.pack(number, [number, 2**40], [number + 1], list(scalars), "code", number, nbytes)


@pytest.mark.parametrize("module", BOTH)
def test_handles_count_from_one(module: ModuleType) -> None:
    stream = stream_of(module)
    assert [stream.new_handle() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("module", BOTH)
def test_calls_are_handed_over_in_order_when_the_batch_is_long(module: ModuleType) -> None:
    stream = stream_of(module)
    for n in range(1, 6):
        pack(stream, n, scalars=(n, 0.5, True, 2**70))
    ((batch, sites),) = stream.sent
    assert told(batch) == [Call(n, [n, 2**40], [n + 1], [n, 0.5, True, 2**70]) for n in range(1, 5)]
    assert sites == [x for n in range(1, 5) for x in ("code", n)]
    assert told(stream.take()[0]) == [Call(5, [5, 2**40], [6], [5, 0.5, True, 2**70])] and stream.take() == ([], [])


@pytest.mark.parametrize("module", BOTH)
def test_calls_are_handed_over_when_their_results_are_large(module: ModuleType) -> None:
    stream = stream_of(module)
    pack(stream, 1, nbytes=900)
    assert stream.sent == []
    pack(stream, 2, nbytes=101)
    assert [len(told(batch)) for batch, _ in stream.sent] == [2]


@pytest.mark.parametrize("module", BOTH)
def test_what_died_is_freed_after_its_calls_and_before_what_is_large(module: ModuleType) -> None:
    stream = stream_of(module)
    values = [module.Value(stream, stream.new_handle()) for _ in range(4)]
    pack(stream, 1)
    del values[0]
    pack(stream, 2)
    assert stream.freed == [1] and stream.outbox == []
    pack(stream, 3, nbytes=500)
    del values[0]
    del values[0]
    del values[0]
    gc.collect()
    pack(stream, 4)
    ((batch, _),) = stream.sent
    kinds = [x.plan if isinstance(x, Call) else (x.handles, x.release) for x in told(batch)]
    assert kinds == [1, 2, ([1], True), 3, ([2, 3, 4], False), 4]


@pytest.mark.parametrize("module", BOTH)
def test_a_value_has_one_group(module: ModuleType) -> None:
    value = module.Value(stream_of(module), 7)
    assert value.group is None and value.settled is None and value.handle == 7
    assert value.shared_group() is value.shared_group() is value.group


@pytest.mark.parametrize("module", BOTH)
def test_bad_calls_are_refused(module: ModuleType) -> None:
    if module is purepath:
        with pytest.raises(TypeError):
            stream_of(module).pack(1)
        return
    stream = stream_of(module)
    for bad in [(), (1, (), [], [], None, 0, 0), (1, ["x"], [], [], None, 0, 0), ("x", [], [], [], None, 0, 0)]:
        with pytest.raises(TypeError):
            stream.pack(*bad)
    assert stream.take() == ([], [])
    with pytest.raises(TypeError):
        module.Value("no stream", 1)


NUMBERS = [0.0, -0.0, float("nan"), 1.0, 1, True, complex(0.0, -0.0), complex(-0.0, 0.0), complex(0.0, 0.0)]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("before", NUMBERS, ids=repr)
def test_static_numbers_that_are_equal_but_not_alike_have_plans_of_their_own(before: Any, number: Any) -> None:
    x, plain = dtorch.tensor([1.0, 2.0], device_mesh=MESH, placements=[Shard(0)]), torch.tensor([1.0, 2.0])
    for fill in (before, number):
        ours, theirs = torch.full_like(x, fill, dtype=torch.complex64), torch.full_like(plain, fill, dtype=torch.complex64)
        bits = [torch.view_as_real(t).view(torch.int32) for t in (ours.to_torch(), theirs)]
        assert torch.equal(*bits)


def test_a_nan_makes_one_plan() -> None:
    x = dtorch.ones(4, device_mesh=MESH)
    torch.full_like(x, float("nan"))
    planned = dtorch.session().planned
    for _ in range(3):
        torch.full_like(x, float("nan"))
    assert dtorch.session().planned == planned


class Sub(dtorch.Tensor):
    """Dispatches as PyTorch's documentation shows."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args=args, kwargs=kwargs)


def test_plans_keep_the_class_of_their_tensors() -> None:
    whole = torch.arange(6.0).view(2, 3)
    tensors = [cls(whole, device_mesh=MESH, placements=[Shard(0)]) for cls in (Sub, dtorch.Tensor) * 2]
    for t in tensors:
        results = [t + 1, t.t(), *torch.max(t, 1), *t.unbind(1), t.redistribute(placements=[Shard(1)])]
        assert {type(r) for r in results} == {type(t)}
        assert torch.equal(results[0].to_torch(), whole + 1)


@pytest.mark.parametrize("operator", [torch.neg, torch.t, torch.erf])
def test_a_thread_without_python_frames_issues_operators(operator: Any) -> None:
    x, caught = dtorch.ones(2, 2, device_mesh=MESH), []
    before, sys.unraisablehook = sys.unraisablehook, caught.append
    try:
        for _ in range(2):
            issued = dtorch.session().new_handle()
            start_new_thread(operator, (x,))
            while dtorch.session().new_handle() == issued + 1 and not caught:
                issued += 1
                time.sleep(0.001)
    finally:
        sys.unraisablehook = before
    assert not caught


def test_results_are_freed_where_handing_over_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush() -> None:
        raise RuntimeError("handed over")

    with own_session() as (client, worker):
        x = dtorch.ones(4, 2, device_mesh=MESH)
        calls = [lambda: x + 1, lambda: x.t(), lambda: torch.max(x, 1), lambda: x.redistribute(placements=[Shard(0)])]
        for call in calls:
            call()
        client.request(Barrier())
        gc.collect()
        client.flush()
        held = len(worker.store)
        for call in calls:
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="handed over"):
                patch.setattr(client, "flush", flush)
                patch.setattr(client, "room", -1)
                call()
        client.flush()
        assert len(worker.store) == held


PROGRAM = """
import torch, dtorch
from dtorch import Shard, init_device_mesh
from dtorch.core.compiled import compiled
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (3,))
x = dtorch.randn(7, 5, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
v = (x * 2)[1:, ::2].t()
y = torch.cat([v, v + 1]).softmax(-1) @ torch.ones(6, 2)
y.sum().backward()
with torch.inference_mode():
    z = x.detach().clone()
    z.view(35)[3:9].mul_(3)
try:
    torch.nn.functional.embedding(torch.tensor([9]), z).to_torch()
except dtorch.RemoteError as error:
    site = error.site
print(compiled("dtorch.tensor._fastpath") is not None, y.tolist(), x.grad.tolist(), z.tolist(), site)
"""


def test_both_give_the_same_results() -> None:
    outputs = []
    for pure in ("0", "1"):
        environment = {**os.environ, "DTORCH_PURE_PYTHON": pure, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split(" ", 1))
    built = importlib.util.find_spec("dtorch.tensor._fastpath") is not None
    assert outputs[0][0] == str(built) and outputs[1][0] == "False"
    assert outputs[0][1] == outputs[1][1] and "<string>:15" in outputs[0][1]
