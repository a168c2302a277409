"""A client's way to a cluster: one of its own on this machine, or one that runs somewhere."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec

from ..core.control import Hello, Record, Start
from ..core.errors import DTorchError, WorkerLost, four_parts
from ..observability.logs import Inlet
from ..observability.status import Status
from ..transport.trunk import Trunk
from .addresses import ports
from .asking import ask
from .beating import HealthMember
from .head import HeadTask
from .keys import Keys
from .local import END_S, how, launch, let_go
from .membership import Member
from .node import VERSIONS
from .pulse import REFUSED, Word

START_S = 120.0
"""How long workers may take to be there."""

_NUMBERS = itertools.count()

ANSWER_S = 30.0
"""How long a controller may take to answer: it may be about to start."""

WITHOUT_CONTROLLER = {
    True: "call dtorch.shutdown(), read what you saved, and go on from there in a new session",
    False: "start the controller and the agents that have ended again, call dtorch.session().reset(), read what you saved",
}
"""What to do when the controller is gone, of one's own or of a cluster."""

REMEDY = "read what you saved, call dtorch.session().reset() and go on from there on the workers that are left"


class Connection:
    """A ``Network``: a link to a cluster, over which runs one session after the other.

    Args:
        address: of the controller.
        health: of the health service.
        keys: of the cluster.
        owned: a controller that ends with the link.

    Attributes:
        submit, request: see ``Network``.
        story: tells what was last asked of the workers, for errors.
    """

    def __init__(self, address: str, health: str, keys: Keys, owned: subprocess.Popen[bytes] | None = None) -> None:
        self.story: Callable[[], str] = str
        self._address, self._health, self._keys, self._owned = address, health, keys, owned
        self._start: Start | None = None
        self._closed = self._gone = False
        self._inlet: Inlet | None = None
        self._link()
        _OPEN.add(self)
        if owned is not None:
            threading.Thread(target=self._watch, args=(owned,), name="dtorch-controller", daemon=True).start()

    def _link(self) -> None:
        self._name = f"client-{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"
        self._trunk = Trunk(self._address, self._name, self._keys.line, self._lost, self._logged)
        self.submit, self.request = self._trunk.submit, self._trunk.request
        who = Member(name=self._name, role="client", incarnation=0, host=socket.gethostname(), pid=os.getpid())
        self._member = HealthMember(self._keys, self._health, who, on_word=self._told, on_silence=self._silent, first_s=ANSWER_S)

    def begin(self, wanted: int, counts: Mapping[str, Sequence[int]], threads: int, log_level: int | None = None) -> Start:
        """Begin a session on so many workers, or all that are there; what is left of an earlier one ends.

        Raises:
            WorkerLost: there were not enough workers in time, or none.
        """
        if self._gone:
            self._link_anew()
        given = {kind: list(n) for kind, n in counts.items()}
        if log_level is not None and self._inlet is None:
            self._inlet = Inlet(log_level)
        hello = Hello("client", self._name, VERSIONS, [], wanted, given, threads, log_level)
        try:
            self._start = self._trunk.start(hello, START_S)
        except TimeoutError:
            text = f"{self._trunk.there or 'no'} workers were there within {START_S:.0f} s" + (f", of {wanted}" if wanted else "")
            rule, where = "a session begins when its workers are there", f"the cluster at {self._address}"
            remedy = "start agents and look at what they print, or do with fewer: dtorch.shutdown(), and init() without workers="
            raise WorkerLost(four_parts(text, rule, where, remedy)) from None
        return self._start

    def answered(self) -> Self:
        """This link, once the controller has answered; it is closed where it has not.

        Raises:
            WorkerLost: it has not.
        """
        try:
            self.await_answer()
        except WorkerLost:
            self.close()
            raise
        return self

    def await_answer(self) -> None:
        """Wait until the controller has answered.

        Raises:
            WorkerLost: it has not.
        """
        if not self._member.await_answer(ANSWER_S):
            given, rule = f"no answer from {self._address} within {ANSWER_S:.0f} s", "a controller answers who has its key"
            remedy = "start it (dtorch controller --listen HOST:PORT), and see that both use the same key file and version"
            raise WorkerLost(four_parts(given, rule, "the link to the cluster", remedy))

    def status(self) -> Status:
        """How the cluster does.

        Raises:
            UsageError: its controller does not answer.
        """
        return ask(self._keys, self._health)

    def close(self) -> None:
        """End the link, and the controller and its workers with it where they are ours; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._member.close()
        self._trunk.close(everything=self._owned is not None)
        if self._inlet is not None:
            self._inlet.close()
        if self._owned is not None:
            if self._gone:
                self._owned.kill()
            try:
                self._owned.wait(2 * END_S)
            except subprocess.TimeoutExpired:
                self._owned.kill()
                self._owned.wait()
            let_go(self._owned)

    def leave(self) -> None:
        """In a forked child: be no reason for a controller to outlive its owner, who may be killed before the child."""
        if self._owned is not None:
            let_go(self._owned)

    def _link_anew(self) -> None:
        """The controller may be there again, or another in its place; one of this process' own is not."""
        if self._owned is not None:
            given, rule = "reset() of a session whose controller is gone", "its workers have ended with it"
            raise WorkerLost(
                four_parts(given, rule, "dtorch.session().reset()", "call dtorch.shutdown() and dtorch.init() again")
            )
        self._member.close()
        self._trunk.close()
        self._link()
        self.await_answer()
        self._gone = False

    def _told(self, word: Word) -> None:
        if word.text == REFUSED:
            self._trunk.lose(None, f"has given this program up: {word.detail}")

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._trunk.lose(None, how(process))

    def _silent(self, silent_s: float) -> None:
        self._trunk.lose(None, f"has been silent for {silent_s:.1f} s")

    def _logged(self, record: Record) -> None:
        if self._inlet is not None:
            self._inlet.take(record)

    def _lost(self, number: int | None, how: str) -> DTorchError:
        rule, where = "a session needs all its workers", f"the last instructions were\n{self.story()}"
        self._gone = self._gone or number is None
        if number is None or self._start is None:
            return WorkerLost(
                four_parts(f"the controller at {self._address} {how}", rule, where, WITHOUT_CONTROLLER[self._owned is not None])
            )
        worker, hosting = self._start.workers[number], self._start.hosting
        given = f"worker {number} (process {worker.pid} on {worker.host}), which hosts {hosting.told(number)}, {how}"
        return WorkerLost(four_parts(given, rule, where, REMEDY))


_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    for connection in list(_OPEN):
        connection.leave()


os.register_at_fork(after_in_child=_forked)


def join(address: str, key: str | os.PathLike[str] | None = None) -> Connection:
    """Connect to a cluster that runs, with a key file.

    Raises:
        UsageError: the address or the key is none.
        WorkerLost: no controller answers.
    """
    controller, health = ports(address)
    return Connection(controller, health, Keys.read(key)).answered()


def own(workers: int) -> Connection:
    """Start a controller with so many workers on this machine, which end with this process."""
    return own_controller(workers)[0]


def own_controller(workers: int) -> tuple[Connection, Keys, str]:
    """The same with what else lets others join: the key, and the controller's address."""
    keys = Keys.generate()
    reading, writing = os.pipe()
    task = HeadTask(workers, writing, msgspec.structs.asdict(keys))
    process = launch("dtorch.cluster.head", task, pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading) as answer:
        address, _, health = answer.readline().strip().partition(" ")
    if not health:
        process.wait()
        let_go(process)
        rule, where = "the controller tells where it listens", "dtorch.init"
        raise WorkerLost(four_parts(f"the controller {how(process)}", rule, where, "its standard error says more"))
    return Connection(address, health, keys, process), keys, address
