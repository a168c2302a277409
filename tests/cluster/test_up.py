"""``dtorch up``: hosts from a file, commands over ssh, and one end for all."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import dtorch
from dtorch import UsageError, init_device_mesh
from dtorch.cli import main
from dtorch.cluster import connection
from dtorch.cluster import up as watching
from dtorch.cluster.description import Launch, launches, read
from dtorch.cluster.keys import Keys
from dtorch.cluster.up import MOST_LINE_NBYTES, Watch, up
from tests.cluster.network import COMMAND, ENVIRONMENT, WAIT_S, eventually

WHOLE = """
controller: {host: head.example, user: root, ssh: [-p, "2222"]}
reached: 10.0.0.1
port: 7000
user: me
python: /opt/my env/bin/python
devices: cpu:4
hosts:
  - node1
  - {host: node2, user: you, devices: "cpu:8", address: 10.0.0.3, python: "~/my env/bin/python", ssh: [-J, gate]}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_what_is_started_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = read(write(tmp_path, WHOLE))
    head, first, second = launches(described)
    assert [launch.is_controller for launch in (head, first, second)] == [True, False, False]
    assert head.command[-4:] == [
        "-p",
        "2222",
        "root@head.example",
        "exec '/opt/my env/bin/python' -m dtorch controller --listen 0.0.0.0:7000 --key -",
    ]
    agent = "-m dtorch agent --controller 10.0.0.1:7000 --devices"
    assert first.command[-2:] == ["me@node1", f"exec '/opt/my env/bin/python' {agent} cpu:4 --key -"]
    assert second.command[-4:] == [
        "-J",
        "gate",
        "you@node2",
        f"exec ~/'my env/bin/python' {agent} cpu:8 --address 10.0.0.3 --key -",
    ]
    # Nothing is started, and no key is needed.
    assert up(str(tmp_path / "cluster.yaml"), dry_run=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and all(line.startswith("ssh -T -o BatchMode=yes") for line in printed)


def test_a_short_file_is_enough(tmp_path: Path) -> None:
    head, agent = launches(read(write(tmp_path, "hosts: [node1]")))
    assert head.command[-2:] == ["node1", "exec python3 -m dtorch controller --listen 0.0.0.0:7717 --key -"]
    assert agent.command[-2:] == ["node1", "exec python3 -m dtorch agent --controller node1:7717 --key -"]


WRONG = {
    "hosts: []": "$.hosts",
    "port: 7717": "hosts",
    "hosts: [a]\nport: 70000": "$.port",
    "hosts: [a]\nport: many": "$.port",
    "hosts: [a]\nprot: 1": "prot",
    "hosts: [a, {host: b, devcies: 'cpu:1'}]": "$.hosts[1]",
    "hosts: [a, {host: b, devices: 'gpu:1'}]": "$.hosts[1].devices",
    "hosts: [a]\ndevices: 'cpu:0'": "$.devices",
    "hosts: [-oProxyCommand=evil]": "$.hosts[0]",
    "hosts: [a]\nuser: -x": "$.user",
    "hosts: [a": "the file as a whole",
    "": "the file as a whole",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_with_its_field(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read(file)
    said = str(caught.value)
    assert str(file) in said and WRONG[text] in said
    assert all(f"  {part}" in said for part in ("rule:  ", "where: ", "to do: "))


def test_there_has_to_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.yaml.*No such file"):
        read(tmp_path / "nothing.yaml")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which ``ssh`` runs commands on this machine, and a file for it."""
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_ssh.py")} "$@"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    yield {**ENVIRONMENT, "PATH": path, "FAKE_SSH_LOG": str(tmp_path / "calls")}
    dtorch.shutdown()


def free_port() -> int:
    """A port with a free one after it, of those that the system gives to nobody else."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000, 2):
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("0.0.0.0", port))
            other.bind(("0.0.0.0", port + 1))
            return port
    raise RuntimeError("no port is free")


def begin(tmp_path: Path, environment: dict[str, str], port: int) -> subprocess.Popen[str]:
    Keys.generate().write(tmp_path / "key")
    text = f"hosts: [{{host: one, devices: 'cpu:1'}}, two]\nreached: 127.0.0.1\nlisten: 127.0.0.1\ndevices: cpu:1\nport: {port}"
    write(tmp_path, f"{text}\nkey: key\npython: {sys.executable}")
    return subprocess.Popen(
        [*COMMAND, "up", "cluster.yaml"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def started(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_cluster_lives_as_long_as_the_command(
    end: signal.Signals, tmp_path: Path, hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtorch.shutdown()
    monkeypatch.setattr(connection, "ANSWER_S", WAIT_S)
    port = free_port()
    running = begin(tmp_path, hosts, port)
    try:
        dtorch.init(f"tcp://127.0.0.1:{port}", workers=2, key=tmp_path / "key")
        assert dtorch.ones(4, device_mesh=init_device_mesh("cpu", 2)).sum().item() == 4
        dtorch.shutdown()
        all_of_it = started(running.pid)
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        secret = Keys.read(tmp_path / "key").member_secret
        assert len(calls) == 3 and not any(secret in word for call in calls for word in call)
        assert not any(secret in " ".join(process.cmdline()) for process in all_of_it)
        running.send_signal(end)
        said, _ = running.communicate(timeout=WAIT_S)
        eventually(lambda: not any(process.is_running() for process in all_of_it))
    finally:
        running.kill()
        running.wait()
    assert running.returncode == (0 if end == signal.SIGINT else -end), said
    if end == signal.SIGINT:
        for line in ("[one (controller)] ended with status 0", "[one] ended with status 0", "[two] ended with status 0"):
            assert line in said.splitlines()
        assert any(line.startswith("[two] ") and line.endswith("all 1 workers are there") for line in said.splitlines())


def test_a_cluster_ends_with_its_controller(tmp_path: Path, hosts: dict[str, str]) -> None:
    running = begin(tmp_path, hosts, port=free_port())
    try:
        eventually(lambda: any("controller" in p.cmdline() for p in started(running.pid) if p.status() != psutil.STATUS_ZOMBIE))
        (controller,) = [p for p in started(running.pid) if "controller" in p.cmdline()]
        all_of_it = started(running.pid)
        controller.kill()
        said, _ = running.communicate(timeout=WAIT_S)
        eventually(lambda: not any(process.is_running() for process in all_of_it))
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1 and "[one (controller)] ended with status -9" in said


def watched(monkeypatch: pytest.MonkeyPatch, controller: str, agent: str) -> list[str]:
    """What is printed of two commands of a shell, of which the second ends soon."""
    monkeypatch.setattr(watching, "END_S", 0.5)
    commands = ((True, controller), (False, agent))
    started = [Launch(host="a", is_controller=first, command=["sh", "-c", text]) for first, text in commands]
    out = io.StringIO()
    assert Watch(started, Keys.generate(), out).run() == 1
    return out.getvalue().splitlines()


def test_what_a_host_has_started_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    lines = watched(monkeypatch, "sleep 30 & echo $!; cat > /dev/null", "sleep 1")
    assert time.monotonic() - began < 20 and lines[-1] == "[a (controller)] ended with status 0"
    left = int(lines[0].removeprefix("[a (controller)] "))
    eventually(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)


def test_a_line_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = watched(monkeypatch, "cat > /dev/null", "head -c 1000000 /dev/zero | tr '\\0' x")
    parts = [line.removeprefix("[a] ") for line in lines if line.startswith("[a] x")]
    assert sum(map(len, parts)) == 1_000_000 and max(map(len, parts)) <= 3 * MOST_LINE_NBYTES


def test_without_ssh_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Keys.generate().write(tmp_path / "key")
    file = write(tmp_path, "hosts: [a]\nkey: key")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up", str(file)]) == 2
    assert "the command 'ssh': No such file" in capsys.readouterr().err
