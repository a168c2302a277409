"""Where logical devices are: device types and ids to ``torch.device``, and which meshes this machine can hold.

Replicated pieces are kept once, which is only right while all devices of a mesh share one physical device. So one worker
places everything of a type on one device: all ``"cuda"`` ids live on ``cuda:0``, however many GPUs the machine has.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence

import torch

from ..core.errors import MeshError, four_parts

SIMULATION_SWITCH = "DTORCH_DTENSOR_IN_SAME_DEVICE"
SIMULATION_COUNT = "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"


def default_generator(device_type: str) -> torch.Generator:
    """The default random generator of the physical device of a type."""
    if device_type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[0]


class Devices:
    """The logical devices of one worker.

    Args:
        simulate: number of logical devices by type, e.g. ``{"cuda": 8}``, all of them on one physical device. A type that
            is not named has one logical device per GPU, or any number for ``"cpu"``.
    """

    def __init__(self, simulate: Mapping[str, int] | None = None) -> None:
        self.simulated = simulated_counts() if simulate is None else dict(simulate)

    def device(self, device_type: str) -> torch.device:
        """The physical device that holds every value of a type."""
        return torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)

    def check_mesh(self, device_type: str, ids: Sequence[int]) -> None:
        """Check that logical devices exist.

        Raises:
            MeshError: a CUDA mesh on a machine without CUDA, or ids beyond the devices there are.
        """
        where = "the device mesh of your tensor"
        if device_type == "cuda" and not torch.cuda.is_available():
            given = f"a mesh of {len(ids)} 'cuda' devices"
            raise MeshError(four_parts(given, "this machine has no CUDA device", where, 'use init_device_mesh("cpu", ...)'))
        limit = self.simulated.get(device_type, torch.cuda.device_count() if device_type == "cuda" else None)
        if limit is not None and max(ids) >= limit:
            given = f"a mesh with {device_type!r} device id {max(ids)}"
            remedy = f"use ids below {limit}, or simulate more with dtorch.init(simulate={{{device_type!r}: {max(ids) + 1}}})"
            raise MeshError(four_parts(given, f"there are {limit} {device_type!r} devices, with ids from 0", where, remedy))


def check_mesh(device_type: str, ids: Sequence[int], simulate: Mapping[str, int] | None = None) -> None:
    """Check that logical devices exist on this machine; see ``Devices``.

    Raises:
        MeshError: they do not.
    """
    Devices(simulate).check_mesh(device_type, ids)


def simulated_counts(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """What the environment asks to simulate: ``{"cuda": N}`` when the switch is on, else nothing."""
    if environ.get(SIMULATION_SWITCH, "0") in ("", "0"):
        return {}
    count = environ.get(SIMULATION_COUNT, "8")
    if not count.isdigit() or int(count) < 1:
        given = f"{SIMULATION_COUNT}={count!r}"
        raise MeshError(four_parts(given, "the number of simulated devices is a positive int", "your environment", "set e.g. 8"))
    return {"cuda": int(count)}


def release_memory() -> None:
    """Give freed pages of the C heap back to the system where the C library can (glibc's ``malloc_trim``).

    Blocks freed in between others stay resident otherwise, on top of whatever is allocated next.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
