"""The command ``dtorch``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import dtorch
from dtorch.cluster.addresses import PORT
from dtorch.cluster.commands import run_agent, run_controller
from dtorch.cluster.keys import Keys
from dtorch.cluster.showing import show_status, show_top
from dtorch.cluster.up import up
from dtorch.demo import run_demo

WRONG_USE = 2
"""Exit code of a command that was asked for something impossible."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 done, 1 the answer is no, 2 wrong use, with the reason on stderr.

    Args:
        arguments: what follows ``dtorch`` on the command line; this process' own when omitted.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except dtorch.UsageError as error:
        print(f"dtorch: {error}", file=sys.stderr)
        return WRONG_USE
    finally:
        dtorch.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dtorch", description=dtorch.__doc__)
    parser.add_argument("--version", action="version", version=f"dtorch {dtorch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="a real language model answers on a simulated mesh, as it does on plain PyTorch")
    demo.add_argument("--prompt", help="your question, besides the capital of France")
    demo.add_argument("--mesh", default="tp=2,pp=2", help="axes and devices, e.g. dp=1,tp=2,pp=2 (default: %(default)s)")
    demo.add_argument("--tokens", type=_positive, default=48, help="length of an answer, at most (default: %(default)s)")
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what the mesh is simulated on (default: %(default)s)"
    )
    demo.set_defaults(run=lambda given: run_demo(given.prompt, given.mesh, given.tokens, given.device))
    keygen = commands.add_parser("keygen", help="make the key of a cluster: a file that every member of it needs")
    keygen.add_argument("path", nargs="?", help="where to write it (default: what DTORCH_KEY says, else ~/.dtorch/key)")
    keygen.set_defaults(run=lambda given: _keygen(given.path))
    controller = commands.add_parser("controller", help="be the controller of a cluster, which agents and programs join")
    listen = f"HOST:PORT to listen at; the next port is used as well (default: 127.0.0.1:{PORT})"
    controller.add_argument("--listen", default=f"127.0.0.1:{PORT}", metavar="HOST:PORT", help=listen)
    controller.set_defaults(run=lambda given: run_controller(given.listen, given.key, given.metrics))
    agent = commands.add_parser("agent", help="start and supervise the workers of this host")
    agent.add_argument("--controller", required=True, metavar="HOST:PORT", help="the controller to join")
    agent.add_argument("--devices", default=f"cpu:{os.cpu_count()}", help="what this host has (default: %(default)s)")
    agent.add_argument("--address", help="what other hosts reach this one by (default: as seen on the way to the controller)")
    agent.set_defaults(run=lambda given: run_agent(given.controller, given.devices, given.key, given.address, given.metrics))
    key = "the cluster's key (default: DTORCH_KEY, else ~/.dtorch/key)"
    for command in (controller, agent):
        command.add_argument("--metrics", metavar="HOST:PORT", help="serve metrics for Prometheus there (default: nowhere)")
        command.add_argument("--key", metavar="FILE", help=f"{key}; - for the first line of the standard input")
    for command in _add_showing(commands):
        command.add_argument("--key", metavar="FILE", help=key)
    start = commands.add_parser("up", help="start the cluster that a file describes, over ssh, and watch it until Ctrl-C")
    start.add_argument("file", metavar="cluster.yaml", help="the hosts; see docs/clusters.md")
    start.add_argument("--dry-run", action="store_true", help="print the commands, and start nothing")
    start.set_defaults(run=lambda given: up(given.file, given.dry_run))
    return parser


def _add_showing(commands: Any) -> list[argparse.ArgumentParser]:
    shown = []
    for name, show, text in (
        ("status", show_status, "how a cluster does: its workers, what they are at, and what has passed"),
        ("top", show_top, "the same each second, until Ctrl-C"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--controller", default=f"127.0.0.1:{PORT}", metavar="HOST:PORT", help="whom to ask (default: %(default)s)"
        )
        command.add_argument("--json", action="store_true", help="as JSON")
        command.set_defaults(run=lambda given, show=show: show(given.controller, given.key, given.json))
        shown.append(command)
    return shown


def _keygen(path: str | None) -> int:
    print(Keys.generate().write(path))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a positive number is needed")
    return number
