"""Tensors filled from files by workers, next to what a plain tensor would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dtorch import MeshError, RemoteError, Replicate, Shard, Tensor, init_device_mesh
from dtorch.core.program import Read
from dtorch.core.spec import Spec
from dtorch.tensor.filling import Filling, fill
from dtorch.testing.sessions import own_session
from dtorch.transport.inprocess import InlineTransport
from dtorch.transport.messages import EncodedTransport
from dtorch.worker.executor import Executor

DATA = torch.arange(35.0).reshape(7, 5)
MESHES = {"one": (1,), "three": (3,), "two axes": (2, 3)}


def encoded(worker: Executor) -> EncodedTransport:
    return EncodedTransport(InlineTransport(worker))


def filling(spec: Spec, source: int = 0) -> Filling:
    return Filling(spec, [[Read(source, list(o), list(n), [0, 1], [0, 0], list(n))] for o, n in spec.boxes])


@pytest.mark.parametrize("transport", [InlineTransport, encoded])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_pieces(tmp_path: Path, shape: tuple[int, ...], transport: type) -> None:
    save_file({"w": DATA}, tmp_path / "f")
    mesh = init_device_mesh("cpu", shape)
    with own_session(transport=transport):
        for last in (Shard(0), Shard(1), Shard(1, (0, *[5] * (shape[-1] > 1), *[0] * (shape[-1] - 2))), Replicate()):
            if isinstance(last, Shard) and last.sizes and shape[-1] == 1:
                continue
            for first in [[]] if len(shape) == 1 else [[Shard(0)], [Replicate()]]:
                spec = Spec.make(mesh, [*first, last], DATA.shape, torch.float64)
                (tensor,) = fill(Tensor, [(str(tmp_path / "f"), "w")], [filling(spec)])
                assert isinstance(tensor, Tensor) and tensor._spec is spec
                assert torch.equal(tensor.to_torch(), DATA.double()) and torch.equal((tensor + 1).to_torch(), DATA.double() + 1)


def test_what_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    spec = Spec.make(init_device_mesh("cpu", 2), [Shard(0)], DATA.shape, torch.float32)
    with pytest.raises(RemoteError, match="Load failed"):
        fill(Tensor, [(str(tmp_path / "none"), "w")], [filling(spec)])


@pytest.mark.embedded("a worker process has no CUDA device, whatever the machine has")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_devices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    spec = Spec.make(init_device_mesh("cuda", 2), [Shard(0)], DATA.shape, torch.float32)
    with pytest.raises(MeshError, match="no CUDA device"):
        fill(Tensor, [(str(tmp_path / "none"), "w")], [filling(spec)])
