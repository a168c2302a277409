"""Fourier transforms under every placement: dims that are not transformed stay split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtorch import Partial, Shard, init_device_mesh
from tests.sharding.harness import check, place, stays, values

X = values(5, 6, 4)
HALF = torch.fft.rfft(X)
PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "fft": (torch.fft.fft, X),
    "fft of the first dim": (lambda x: torch.fft.fft(x, dim=0), X),
    "ifft": (torch.fft.ifft, X),
    "rfft": (lambda x: torch.fft.rfft(x, n=7, norm="ortho"), X),
    "irfft": (torch.fft.irfft, HALF),
    "irfft longer": (lambda x: torch.fft.irfft(x, n=9), HALF),
    "hfft": (torch.fft.hfft, HALF),
    "ihfft": (torch.fft.ihfft, X),
    "fft2": (torch.fft.fft2, X),
    "rfft2": (lambda x: torch.fft.rfft2(x, dim=(0, 1)), X),
    "irfft2": (torch.fft.irfft2, HALF),
    "fftn": (torch.fft.fftn, X),
    "irfftn": (torch.fft.irfftn, HALF),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_transforms(name: str) -> None:
    transform, x = PROGRAMS[name]

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = transform(x)
        return torch.view_as_real(out.resolve_conj()) if out.is_complex() else out

    check(fn, x, grad=not x.is_complex(), limit=25, rtol=1e-4, atol=1e-4)


def test_other_dims_stay_split() -> None:
    stays(torch.fft.rfft, X, mesh=(3,), placements=[[Shard(0)]])
    stays(torch.fft.fft2, X, mesh=(2,), placements=[[Shard(0, (1, 4))]])
    stays(torch.fft.fft, X, mesh=(2, 2), placements=[[Shard(0), Shard(1)]])
    stays(torch.fft.irfft, HALF, mesh=(2,), placements=[[Shard(1)]])


def test_a_sum_stays_a_sum() -> None:
    out = torch.fft.irfft(place(HALF, init_device_mesh("cpu", (2,)), (Partial(),)), n=2)
    assert out.placements == (Partial(),)
    torch.testing.assert_close(out.to_torch(), torch.fft.irfft(HALF, n=2), rtol=1e-4, atol=1e-4)
