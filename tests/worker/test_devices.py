"""Which meshes a machine can hold, and where their values live."""

from __future__ import annotations

import pytest
import torch

from dtorch.core.errors import MeshError
from dtorch.worker.devices import SIMULATION_COUNT, SIMULATION_SWITCH, Devices, check_mesh, default_generator, simulated_counts


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_any_number_of_cpu_devices() -> None:
    check_mesh("cpu", [0, 511])
    assert Devices().device("cpu") == torch.device("cpu")
    assert default_generator("cpu") is torch.default_generator


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(MeshError, match="no CUDA device"):
        check_mesh("cuda", [0], simulate={"cuda": 8})


def test_as_many_cuda_devices_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    check_mesh("cuda", [0, 1], simulate={})
    with pytest.raises(MeshError, match="there are 2 'cuda' devices"):
        check_mesh("cuda", [0, 2], simulate={})


def test_simulated_devices_replace_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    devices = Devices({"cuda": 4, "cpu": 2})
    devices.check_mesh("cuda", range(4))
    assert devices.device("cuda") == torch.device("cuda", 0)
    for device_type, ids in (("cuda", [4]), ("cpu", [2])):
        with pytest.raises(MeshError, match="simulate="):
            devices.check_mesh(device_type, ids)


def test_simulation_by_environment() -> None:
    assert simulated_counts({}) == {} == simulated_counts({SIMULATION_SWITCH: "0", SIMULATION_COUNT: "4"})
    assert simulated_counts({SIMULATION_SWITCH: "1", SIMULATION_COUNT: "4"}) == {"cuda": 4}
    assert simulated_counts({SIMULATION_SWITCH: "1"}) == {"cuda": 8}
    with pytest.raises(MeshError, match="'many'"):
        simulated_counts({SIMULATION_SWITCH: "1", SIMULATION_COUNT: "many"})


def test_the_environment_is_read_when_devices_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMULATION_SWITCH, "1")
    monkeypatch.setenv(SIMULATION_COUNT, "3")
    assert Devices().simulated == {"cuda": 3} and Devices({}).simulated == {}
