"""What people write for controllers and devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtorch import UsageError
from dtorch.cli import main
from dtorch.cluster.addresses import devices, ports, reached_by
from dtorch.cluster.keys import Keys


def test_a_controller_and_its_health_service() -> None:
    assert ports("host:7000") == ports("tcp://host:7000/") == ("tcp://host:7000", "host:7001")
    assert ports("10.0.0.1") == ("tcp://10.0.0.1:7717", "10.0.0.1:7718")


@pytest.mark.parametrize(
    "text", ["", ":7000", "a:b:7000", "host:65535", "host:0", "host:x", "http://host:7000", "a b:7000", "[::1]:7000", "::1"]
)
def test_what_names_no_controller_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        ports(text)


def test_devices_of_a_host() -> None:
    assert devices("cpu:2") == [{"cpu": 1}, {"cpu": 1}]
    for text in ("cpu:0", "cpu", "gpu:1", "cpu:-1", "cpu:99999"):
        with pytest.raises(UsageError, match="cpu:8"):
            devices(text)


def test_an_agent_whose_controller_is_at_no_known_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reached_by("127.0.0.1:1") == "127.0.0.1"
    key = Keys.generate().write(tmp_path / "key")
    assert main(["agent", "--controller", "host.invalid", "--devices", "cpu:1", "--key", str(key)]) == 2
    said = capsys.readouterr().err
    assert "the controller 'host.invalid'" in said and "to do: give a name or an address that this host knows" in said
