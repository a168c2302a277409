"""Sessions of worker processes: the same program, and nothing left behind."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dtorch
from dtorch import MeshError, Partial, RemoteError, Replicate, SessionClosedError, Shard, UsageError, WorkerLost, init_device_mesh
from dtorch.transport.messages import encode_batch
from tests.models.zoo import MODELS, VOCABULARY, assert_same_training, llama, mixtral, without_dropout
from tests.worker.test_workers import picky

SMALL = """
import torch, dtorch
from dtorch import Shard, init_device_mesh
mesh = init_device_mesh("cpu", 3, mesh_dim_names=("tp",))
x = dtorch.Tensor(torch.arange(7.0), device_mesh=mesh).redistribute(placements=[Shard(0)])
print(x.sum().item(), flush=True)
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(workers=3, devices={"cpu": [3, 2, 3]})
    yield
    dtorch.shutdown()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def started(before: set[int]) -> list[psutil.Process]:
    """The workers among the processes that were not there before."""
    return [p for p in children() if p.pid not in before and "dtorch.process" in " ".join(p.cmdline())]


@dataclass(frozen=True)
class Begun:
    """A session of one's own.

    Attributes:
        before: the processes that were there before it.
        ones: two for each worker, which has a device each.
    """

    before: set[int]
    ones: dtorch.Tensor

    def workers(self) -> list[psutil.Process]:
        """Its workers, the first to be started first."""
        return sorted(started(self.before), key=lambda p: p.pid)

    def read_until_lost(self, match: str) -> str:
        """What is said when a reading fails."""
        with pytest.raises(WorkerLost, match=match) as caught:
            while True:
                self.ones.sum().item()
        return str(caught.value)


@contextmanager
def begun(workers: int) -> Iterator[Begun]:
    """A session of worker processes that work, of which no process is left afterwards."""
    dtorch.shutdown()
    before = {p.pid for p in children()}
    dtorch.init(workers=workers)
    try:
        ones = dtorch.ones(2 * workers, device_mesh=init_device_mesh("cpu", workers), placements=[Shard(0)])
        assert ones.sum().item() == 2 * workers
        yield Begun(before, ones)
    finally:
        dtorch.shutdown()
    assert {p.pid for p in children()} == before


@pytest.mark.usefixtures("processes")
def test_pieces_travel() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    whole = torch.randn(301, 38, generator=torch.Generator().manual_seed(1))
    placed = (Replicate(), Shard(0), Shard(1), Partial())
    tensor = dtorch.Tensor(whole, device_mesh=mesh)
    for source in placed:
        for target in placed[:3]:
            moved = tensor.redistribute(placements=[Shard(0), source]).redistribute(placements=[target, Shard(1)])
            torch.testing.assert_close(moved.to_torch(), whole)


@pytest.mark.usefixtures("processes")
def test_random_numbers_are_those_of_plain_pytorch() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    torch.manual_seed(5)
    drawn = [dtorch.rand(9, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)]) for _ in range(3)]
    after = torch.rand(2)
    dropped = torch.nn.functional.dropout(drawn[0], 0.5)
    torch.manual_seed(5)
    expected = [torch.rand(9, 4) for _ in range(3)]
    assert all(torch.equal(a.to_torch(), b) for a, b in zip(drawn, expected, strict=True)) and torch.equal(after, torch.rand(2))
    assert torch.equal(dropped.to_torch(), torch.nn.functional.dropout(expected[0], 0.5))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("processes")
def test_models_train(name: str) -> None:
    model = without_dropout(MODELS[name]())
    ids = torch.randint(1, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp", "tp", "pp"))
    assert_same_training(dtorch.parallelize(copy.deepcopy(model), mesh), model, input_ids=ids, labels=ids)


@pytest.mark.usefixtures("processes")
def test_functions_travel_to_the_workers() -> None:
    model = without_dropout(mixtral())
    ids = torch.randint(1, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    assert_same_training(dtorch.parallelize(copy.deepcopy(model), mesh), model, input_ids=ids, labels=ids)


@pytest.mark.usefixtures("processes")
def test_weights_are_read_by_the_workers(tmp_path: Path) -> None:
    model = llama().eval()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    dtorch.save_pretrained(dtorch.parallelize(copy.deepcopy(model), mesh), tmp_path)
    loaded = dtorch.load_pretrained(type(model), tmp_path, init_device_mesh("cpu", 3, mesh_dim_names=("fsdp",)))
    for (name, a), b in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a.to_torch(), b), name


@pytest.mark.usefixtures("processes")
def test_a_failure_is_told_and_the_session_goes_on() -> None:
    mesh = init_device_mesh("cpu", 3)
    bad = dtorch.Tensor(torch.tensor([1.0, 2.0, -3.0]), device_mesh=mesh).redistribute(placements=[Shard(0)])
    mapped = dtorch.local_map(picky, [[Shard(0)]], [Shard(0)])
    with pytest.raises(RemoteError, match="a negative number") as caught:
        mapped(bad).sum().item()
    assert "test_processes.py" in str(caught.value) and "cpu:2" in str(caught.value)
    assert mapped(bad.abs()).sum().item() == 12


class Mute(Exception):
    """Does not say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


RAISED = {
    "nothing to say": (Mute(), "text cannot be had"),
    "no text that can be encoded": (ValueError("bad \udcff"), "bad"),
    "very much to say": (ValueError("x" * 10_000_000), "10000012 characters"),
    "exit": (SystemExit(3), "SystemExit: 3"),
    "interrupt": (KeyboardInterrupt("mine"), "KeyboardInterrupt: mine"),
    "generator": (GeneratorExit(), "GeneratorExit"),
    "not to be pickled": (ValueError(threading.Lock()), "ValueError"),
}


@pytest.mark.parametrize("what", RAISED)
@pytest.mark.usefixtures("processes")
def test_whatever_a_function_raises_is_its_failure_alone(what: str) -> None:
    mesh, client = init_device_mesh("cpu", 8), os.getpid()

    def refuse(piece: torch.Tensor) -> torch.Tensor:
        if os.getpid() != client and (piece == 5).any():
            raise importlib.import_module("tests.test_processes").RAISED[what][0]
        return piece + 1

    x = dtorch.arange(8.0, device_mesh=mesh).redistribute(placements=[Shard(0)])
    y = dtorch.local_map(refuse, [[Shard(0)]], [Shard(0)])(x)
    with pytest.raises(RemoteError, match=RAISED[what][1]) as caught:
        y.redistribute(placements=[Replicate()]).to_torch()
    assert len(str(caught.value)) < 100_000
    assert (x + 1).sum().item() == 36


@pytest.mark.usefixtures("processes")
def test_a_child_that_a_function_forks_is_no_second_worker() -> None:
    client = os.getpid()

    def forks(piece: torch.Tensor) -> torch.Tensor:
        codes = [0, 0]
        for number, error in enumerate((SystemExit(4), ValueError()) if os.getpid() != client else ()):
            child = os.fork()
            if child == 0:
                raise error
            codes[number] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return piece * 0 + codes[0] * 10 + codes[1]

    x = dtorch.arange(8.0, device_mesh=init_device_mesh("cpu", 8)).redistribute(placements=[Shard(0)])
    y = dtorch.local_map(forks, [[Shard(0)]], [Shard(0)])(x)
    assert y.to_torch().tolist() == [41.0] * 8 and (x + 1).sum().item() == 36


@pytest.mark.usefixtures("processes")
def test_a_function_that_cannot_travel_is_refused_and_nothing_is_lost() -> None:
    mesh, lock = init_device_mesh("cpu", 3), threading.Lock()
    x = dtorch.Tensor(torch.ones(3), device_mesh=mesh).redistribute(placements=[Shard(0)])
    y = x * 5
    with pytest.raises(UsageError, match="pickle"):
        dtorch.local_map(lambda piece: piece * bool(lock), [[Shard(0)]], [Shard(0)])(x)
    assert (y + x).sum().item() == 18


@pytest.mark.usefixtures("processes")
def test_devices_that_no_worker_hosts() -> None:
    with pytest.raises(MeshError, match="there are 8 'cpu' devices"):
        dtorch.zeros(9, device_mesh=init_device_mesh("cpu", 9))
    with pytest.raises(MeshError, match="worker processes run on the CPU"):
        dtorch.zeros(9, device_mesh=init_device_mesh("cuda", 2))


@pytest.mark.usefixtures("processes")
def test_an_interrupt_leaves_the_session_as_it_is() -> None:
    mesh = init_device_mesh("cpu", 3)
    x = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for process in children():
            process.send_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (x + 1).sum().item() == 12


@pytest.mark.usefixtures("processes")
def test_an_interrupt_while_a_batch_is_made_ready_loses_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = dtorch.ones(6, device_mesh=init_device_mesh("cpu", 3), placements=[Shard(0)])
    x.add_(1)

    def interrupted(*given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return encode_batch(*given)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("dtorch.transport.trunk.encode_batch", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            dtorch.session().flush()
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
    assert x.tolist() == [2.0] * 6


def test_wrong_use() -> None:
    dtorch.shutdown()
    for workers, devices in (
        (0, None),
        (-1, None),
        (2, {"cpu": [1]}),
        (2, {"cpu": [1, -1]}),
        (2, {"tpu": [1, 1]}),
        ("two", None),
    ):
        with pytest.raises(UsageError, match="to do"):
            dtorch.init(workers=workers, devices=devices)
    with pytest.raises(UsageError, match="embedded"):
        dtorch.init(workers=2, simulate={"cpu": 4})
    assert not [p for p in children() if "dtorch" in " ".join(p.cmdline())]


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_that_dies_is_told_at_once(waits: bool) -> None:
    with begun(2) as session:
        worker = session.workers()[0]
        if waits:
            # The client waits for a worker that waits.
            worker.suspend()
            timer = threading.Timer(0.5, worker.kill)
            timer.start()
        else:
            worker.kill()
        session.read_until_lost(rf"process {worker.pid} on .*, which hosts devices 0, 2, ..., was ended by signal 9")
        if waits:
            timer.join()


def test_nothing_is_left() -> None:
    files = {p.name for p in Path(tempfile.gettempdir()).glob("dtorch-*")}
    with begun(2) as session:
        assert len(session.workers()) == 2
    assert {p.name for p in Path(tempfile.gettempdir()).glob("dtorch-*")} <= files


ENDS = {
    "": 0,
    "raise SystemExit(3)": 3,
    "1 / 0": 1,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    # Ctrl-C, which all processes at a terminal get.
    "import os, signal; signal.signal(2, signal.default_int_handler); os.killpg(0, 2)": -signal.SIGINT,
}


@pytest.mark.parametrize("end", ENDS)
def test_an_environment_variable_is_enough_and_no_worker_outlives_its_client(end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DTORCH_WORKERS": "2", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    script = SMALL + "import psutil\nprint(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)\n" + end
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, start_new_session=True)
    total, workers = ran.stdout.splitlines()
    assert total == "21.0" and len(workers.split()) == 3
    for worker in map(int, workers.split()):
        if psutil.pid_exists(worker):
            psutil.wait_procs([psutil.Process(worker)], timeout=30)
        assert not psutil.pid_exists(worker)
    assert ran.returncode == ENDS[end]
    assert not list(tmp_path.glob("dtorch-*"))


def test_the_survivors_go_on_after_a_reset() -> None:
    with begun(3) as session:
        first = session.workers()
        first[0].kill()
        session.read_until_lost(f"process {first[0].pid} ")
        dtorch.session().reset()
        mesh = session.ones.device_mesh
        assert dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)]).sum().item() == 6
        # The health service notices as well, in its own time, and does no harm then.
        threading.Event().wait(3)
        assert dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)]).sum().item() == 6
        assert set(session.workers()) & set(first) == set(first[1:])
        with pytest.raises(SessionClosedError):
            (session.ones + 1).to_torch()


@pytest.mark.parametrize("waits", [True, False])
def test_a_frozen_worker_is_lost_and_the_others_go_on(waits: bool) -> None:
    with begun(3) as session:
        first = session.workers()
        frozen = first[0]
        if not waits:
            frozen.suspend()
        else:
            timer = threading.Timer(0.3, frozen.suspend)
            timer.start()
        said = session.read_until_lost(rf"process {frozen.pid} .*has been silent for \d")
        assert "reset()" in said and "the last instructions were" in said
        if waits:
            timer.join()
        dtorch.session().reset()
        assert dtorch.ones(6, device_mesh=session.ones.device_mesh, placements=[Shard(0)]).sum().item() == 6
        assert set(session.workers()) & set(first) == set(first[1:])


def test_a_controller_that_dies_or_freezes_is_told_and_ends_its_workers() -> None:
    for end in (psutil.Process.kill, psutil.Process.suspend):
        with begun(2) as session:
            new = [p for p in children() if p.pid not in session.before]
            (controller,) = [p for p in new if p not in session.workers()]
            end(controller)
            session.read_until_lost("the controller at")
            psutil.wait_procs([p for p in new if p != controller], timeout=30)


def test_what_workers_log_arrives_until_the_end(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    dtorch.shutdown()
    with pytest.raises(UsageError, match="a level is"):
        dtorch.init(workers=2, log_level="loud")
    dtorch.init(workers=2, log_level="info")
    mesh = init_device_mesh("cpu", 2)
    x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
    log = logging.getLogger("theirs")

    def talk(piece: torch.Tensor) -> torch.Tensor:
        log.info("sum %d", piece.sum())
        log.debug("less")
        warnings.warn("careful", stacklevel=1)
        print("said")
        return piece

    for reset in (False, True):
        if reset:
            dtorch.session().reset()
            x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
        caplog.clear()
        assert dtorch.local_map(talk, [[Shard(0)]], [Shard(0)])(x).sum().item() == 4
        status = dtorch.session().status()
        assert [w.number for w in status.workers] == [0, 1] and all(w.memory_nbytes for w in status.workers)
    dtorch.shutdown()
    arrived = [r for r in caplog.records if r.name.startswith("dtorch.remote.")]
    for worker in (0, 1):
        mine = [r for r in arrived if vars(r)["worker"] == worker]
        assert [(r.levelname, vars(r)["source"]) for r in mine] == [("INFO", "theirs"), ("WARNING", "py.warnings")]
        assert mine[0].name == f"dtorch.remote.{worker}" and mine[0].getMessage().endswith("] sum 2")
    assert capfd.readouterr().out.count("said") == 4


def test_the_embedded_session_tells_of_itself() -> None:
    dtorch.shutdown()
    dtorch.init(log_level=logging.INFO)
    status = dtorch.session().status()
    assert (status.role, status.workers[0].pid) == ("embedded", os.getpid())
    dtorch.shutdown()


@pytest.mark.parametrize("first_use", [True, False])
def test_threads_that_begin_a_session_at_once_begin_one(first_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtorch.shutdown()
    monkeypatch.setenv("DTORCH_WORKERS", "2")
    before, told = {p.pid for p in children()}, []

    def begin() -> None:
        try:
            dtorch.session() if first_use else dtorch.init(workers=2)
        except UsageError as error:
            told.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started(before)) == 2 and len(told) == (0 if first_use else 3)
    dtorch.shutdown()
    assert {p.pid for p in children()} == before


@pytest.mark.parametrize("ends", ["shutdown", "reset"])
def test_values_on_their_way_do_not_come_when_the_session_ends(ends: str) -> None:
    client = os.getpid()
    with begun(2) as session:
        slow = dtorch.local_map(lambda p: (os.getpid() != client and time.sleep(1)) or p, [[Shard(0)]], [Shard(0)])
        pending = [slow(session.ones).to_torch_async() for _ in range(2)][1]
        dtorch.shutdown() if ends == "shutdown" else dtorch.session().reset()
        with pytest.raises(SessionClosedError, match="on its way"):
            pending.get(30)


FORKS = """
import os, sys, time, torch, dtorch
from dtorch import Shard, init_device_mesh
dtorch.init(workers=2)
x = dtorch.ones(4, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(0)])
assert x.sum().item() == 4
"""


def test_a_forked_child_has_no_part_in_the_session_and_does_not_end_it() -> None:
    script = (
        FORKS
        + """
child = os.fork()
if child == 0:
    for refused in (lambda: x.sum().item(), lambda: dtorch.init(workers=2)):
        try:
            refused()
        except dtorch.UsageError as error:
            print(type(error).__name__, flush=True)
    assert dtorch.ones(3).sum().item() == 3  # embedded
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
time.sleep(3)
print((x + 1).sum().item())
"""
    )
    # With the variable the child's own session would be one of processes as well.
    plain = {name: value for name, value in os.environ.items() if name != "DTORCH_WORKERS"}
    ran = subprocess.run([sys.executable, "-c", script], env=plain, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout.split(), ran.returncode) == (["SessionClosedError", "UsageError", "8.0"], 0), ran.stderr


def test_a_forked_child_keeps_no_process_of_a_killed_client() -> None:
    script = (
        FORKS
        + """
import psutil
print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
time.sleep(1)
os.kill(os.getpid(), 9)
"""
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    left, child = ran.stdout.splitlines()
    try:
        _, alive = psutil.wait_procs([psutil.Process(int(p)) for p in left.split() if psutil.pid_exists(int(p))], timeout=30)
        assert not alive and len(left.split()) == 3
    finally:
        os.kill(int(child), signal.SIGKILL)
