"""Global tensors whose pieces workers read from files by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.program import Barrier, Filled, Load, Read
from ..core.spec import Spec
from .client import current_client
from .hotpath import Value
from .moving import mesh_info
from .wrapper import wrap


@dataclass(frozen=True, slots=True)
class Filling:
    """A tensor to be made: its spec, and for each piece what fills it. ``Read.source`` numbers the stored tensors."""

    spec: Spec
    reads: Sequence[Sequence[Read]]


def fill(cls: type, stored: Sequence[tuple[str, str]], wanted: Sequence[Filling]) -> list[Any]:
    """Tensors filled from files; waits until that is done.

    Args:
        stored: file and name of each tensor that is read of.
        wanted: what to make of them.

    Raises:
        RemoteError: a worker could not read.
    """
    client = current_client()
    files = list(dict.fromkeys(file for file, _ in stored))
    values = [Value(client, client.new_handle()) for _ in wanted]
    for filling in wanted:
        client.check_mesh(filling.spec.mesh)
    pairs = zip(wanted, values, strict=True)
    client.emit(Load(files, [(files.index(f), name) for f, name in stored], [_filled(w, v.handle) for w, v in pairs]))
    client.request(Barrier())
    return [wrap(cls, w.spec, v) for w, v in zip(wanted, values, strict=True)]


def _filled(filling: Filling, handle: int) -> Filled:
    spec = filling.spec
    shapes = [list(size) for _, size in spec.boxes]
    dtype = str(spec.dtype).removeprefix("torch.")
    return Filled(handle, mesh_info(spec.mesh), list(spec.axes), dtype, shapes, [list(r) for r in filling.reads])
