"""The service: a sink over a transport, refused once closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dtorch.controller.service import Service
from dtorch.core.errors import MeshError, SessionClosedError
from dtorch.core.program import Fetch, Free, Sink
from dtorch.testing.thread import ThreadTransport
from dtorch.transport.base import Each
from dtorch.transport.inprocess import InlineTransport
from tests.transport.runners import Recorder
from tests.worker.plans import ONE


@pytest.mark.parametrize("transport", [InlineTransport, ThreadTransport])
def test_batches_reach_the_worker_and_replies_come_back(transport: type) -> None:
    recorder = Recorder()
    sink: Sink = Service(Each(transport(recorder)))
    sink.submit(0, [Free([1])])
    assert sink.request(0, [Fetch(2, ONE, [])]).result(10).result == [2, 2]
    sink.close()
    assert recorder.batches == [(0, [Free([1])]), (0, [Fetch(2, ONE, [])])] and recorder.closed == 1


USES: list[Callable[[Service], object]] = [
    lambda s: s.submit(0, []),
    lambda s: s.request(0, [Fetch(1, ONE, [])]),
    lambda s: s.check_mesh("cpu", [0]),
]


@pytest.mark.parametrize("use", USES)
def test_a_closed_service_refuses_and_says_what_to_do(use: Callable[[Service], object]) -> None:
    recorder = Recorder()
    service = Service(Each(InlineTransport(recorder)))
    service.close()
    service.close()
    assert recorder.closed == 1
    with pytest.raises(SessionClosedError, match="to do: make new tensors"):
        use(service)


def test_meshes_are_checked_on_the_client_side() -> None:
    def check(device_type: str, ids: Sequence[int]) -> None:
        if max(ids) > 3:
            raise MeshError(f"no {device_type} {max(ids)}")

    service = Service(Each(InlineTransport(Recorder())), check_mesh=check)
    service.check_mesh("cpu", [0, 3])
    with pytest.raises(MeshError, match="no cpu 4"):
        service.check_mesh("cpu", [4])
    Service(Each(InlineTransport(Recorder()))).check_mesh("cuda", [9])
