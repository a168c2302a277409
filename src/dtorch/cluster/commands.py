"""What ``dtorch controller`` and ``dtorch agent`` do."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable

import zmq

from ..core.errors import UsageError, four_parts
from ..transport.relay import Relay
from .addresses import devices, ports, reached_by
from .agent import Agent
from .head import Controller
from .keys import Keys
from .metrics import exposed
from .node import end_with_parent

FAILED = 1

INPUT = "-"
"""In place of a key file: the key is the first line of the standard input, with whose end the process ends."""


def run_controller(listen: str, key: str | None, metrics: str | None = None) -> int:
    """Be the controller of a cluster until told to end; returns the exit code."""
    _log()
    keys, (address, health) = _keys(key), ports(listen)
    with exposed(metrics) as expose:
        relay = _listening(keys, address, listen)
        controller = Controller(relay, keys, health)
        expose(lambda: relay.ask(controller.status))
        logging.getLogger("dtorch.controller").info("listening at %s, health at %s", address, health)
        _follow_input(key, lambda: relay.call(controller.close))
        controller.run()
    return 0


def run_agent(controller: str, given: str, key: str | None, address: str | None, metrics: str | None = None) -> int:
    """Be the agent of this host until told to end; returns the exit code."""
    _log()
    keys, (parent, health), each = _keys(key), ports(controller), devices(given)
    name, here = f"{socket.gethostname()}-{os.getpid()}", address or reached_by(health)
    with exposed(metrics) as expose:
        relay = Relay(keys.lock, "tcp://127.0.0.1:*", (parent, name, keys.line))
        agent = Agent(relay, keys, health, name, each, here)
        expose(lambda: relay.ask(agent.status))
        # Before it has joined nothing has to be ended in order.
        _follow_input(key, lambda: relay.call(agent.close) if agent.joined else os._exit(FAILED))
        agent.run()
    return FAILED if agent.failed else 0


def _listening(keys: Keys, address: str, given: str) -> Relay:
    try:
        return Relay(keys.lock, address)
    except zmq.ZMQError as error:
        rule, remedy = "a controller listens at a free port of this machine", "give another HOST:PORT"
        raise UsageError(four_parts(f"the address {given!r}: {error}", rule, "dtorch controller --listen", remedy)) from error


def _keys(key: str | None) -> Keys:
    return Keys.from_line(sys.stdin.buffer.readline()) if key == INPUT else Keys.read(key)


def _follow_input(key: str | None, then: Callable[[], None]) -> None:
    """Who has given the key over the standard input ends the process by closing it."""
    if key == INPUT:
        end_with_parent(then)


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # What a client asks to be sent is not for this terminal.
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
