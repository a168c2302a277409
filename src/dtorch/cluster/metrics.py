"""A node's status as metrics for Prometheus, over HTTP and without a key: numbers and names, no data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, get_args

from ..core.errors import UsageError, four_parts
from ..observability.status import State, Status, WorkerStatus

ANSWER_S = 2.0
"""How long the node may take to tell its status."""

Ask = Callable[[], "Future[Status]"]


class Collector:
    """Makes metrics of a status, each time that somebody reads them."""

    def __init__(self) -> None:
        self.ask: Ask | None = None

    def collect(self) -> Iterator[Any]:
        """The metrics; of a node that does not answer only that it does not."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            status = None if self.ask is None else self.ask().result(ANSWER_S)
        except (TimeoutError, OSError):
            # It is held up, or ends.
            status = None
        yield GaugeMetricFamily("dtorch_up", "Whether the node answers.", value=status is not None)
        if status is not None:
            yield from _node(status)
            yield from _workers(status.workers)


@contextmanager
def exposed(address: str | None) -> Iterator[Callable[[Ask], None]]:
    """Metrics over HTTP while the block runs; gives a function that takes where their content comes from.

    Args:
        address: ``HOST:PORT``; None for no metrics.

    Raises:
        UsageError: it cannot listen there.
    """
    collector = Collector()

    def expose(ask: Ask) -> None:
        collector.ask = ask

    if address is None:
        yield expose
        return
    server, thread = _served(address, collector)
    try:
        yield expose
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _served(address: str, collector: Collector) -> Any:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    match = re.fullmatch(r"\[?([^/\s\[\]]+)\]?:(\d{1,5})", address)
    try:
        if match is None:
            raise ValueError("it is not HOST:PORT")
        return start_http_server(int(match[2]), match[1], registry)
    except (OSError, OverflowError, ValueError) as error:
        given, rule = f"the address {address!r}: {error}", "metrics are served at a free port of this machine"
        raise UsageError(four_parts(given, rule, "--metrics", "give another HOST:PORT, or leave it out")) from error


def _node(status: Status) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counters = status.counters
    yield CounterMetricFamily("dtorch_messages", "Messages that came.", value=counters.messages)
    yield CounterMetricFamily("dtorch_message_bytes", "Their bytes.", value=counters.nbytes)
    yield CounterMetricFamily("dtorch_batches", "Batches that were sent on.", value=counters.batches)
    dropped = CounterMetricFamily("dtorch_dropped", "What could not be taken.", labels=["reason"])
    for reason, count in counters.dropped.items():
        dropped.add_metric([reason], count)
    yield dropped
    yield GaugeMetricFamily(
        "dtorch_session", "Number of the session that is on; 0 for none.", value=status.epoch * status.running
    )
    yield GaugeMetricFamily("dtorch_clients", "Programs that are joined.", value=status.client is not None)
    yield GaugeMetricFamily("dtorch_agents", "Agents that are joined.", value=len(status.agents))


def _workers(workers: list[WorkerStatus]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    for name, text, value in GAUGES:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for worker in workers:
            number = value(worker)
            if number is not None:
                family.add_metric(_labels(worker), number)
        yield family
    states = GaugeMetricFamily("dtorch_worker_state", "1 for the state that a worker is in.", labels=[*LABELS, "state"])
    about = GaugeMetricFamily("dtorch_worker_info", "1 for each worker.", labels=[*LABELS, "pid", "devices"])
    for worker in workers:
        about.add_metric([*_labels(worker), str(worker.pid or ""), worker.devices], 1)
        for state in get_args(State):
            states.add_metric([*_labels(worker), state], state == worker.state)
    yield from (states, about)


def _labels(worker: WorkerStatus) -> list[str]:
    return ["" if worker.number is None else str(worker.number), worker.name, worker.host]


LABELS = ["worker", "name", "host"]

GAUGES: list[tuple[str, str, Callable[[WorkerStatus], float | None]]] = [
    ("dtorch_worker_busy_seconds", "For how long a worker has been at the batch at hand.", lambda w: w.busy_s),
    ("dtorch_worker_memory_bytes", "What of a worker is in memory.", lambda w: w.memory_nbytes),
    ("dtorch_worker_queue_batches", "Batches that a worker has not done yet.", lambda w: w.queue),
    ("dtorch_worker_session_batches", "Batches that a worker was sent in this session.", lambda w: w.batches),
    ("dtorch_worker_heartbeat_age_seconds", "Since when nothing was heard of a worker.", lambda w: w.heard_s),
]
