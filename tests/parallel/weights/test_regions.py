"""Regions say where elements come from: reading by them equals doing the same to data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtorch import UsageError
from dtorch.core.mesh import init_device_mesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.core.spec import Spec
from dtorch.parallel.weights.regions import Region, cat
from dtorch.parallel.weights.symbolic import Laid, Unfit


def read(region: Region, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a region describes; NaN where no part lies."""
    out = torch.full(region.shape, float("nan"))
    for part in region.parts:
        box = data[part.name][tuple(slice(o, o + n) for o, n in zip(part.offset, part.size, strict=True))]
        at = tuple(slice(o, o + n) for o, n in zip(part.at, part.shape, strict=True))
        assert out[at].isnan().all(), "parts do not overlap"
        out[at] = box.permute(part.order).reshape(part.shape)
    return out


def sources(count: int, *shape: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randn(*shape) for i in range(count)}


def laid(data: Mapping[str, torch.Tensor]) -> dict[str, Laid]:
    return {name: Laid.of(Region.whole(name, t.shape), t.dtype) for name, t in data.items()}


def experts(d: Mapping[str, Any]) -> Sequence[Any]:
    """What transformers does to experts on the way in, and back out."""
    gate, up = (torch.stack([d[f"t{i}"] for i in range(k, 6, 2)]) for k in (0, 1))
    both = torch.cat([gate, up], dim=1)
    halves = torch.chunk(both, 2, dim=1)
    return [both, *(c.squeeze(0).contiguous() for half in halves for c in torch.chunk(half, 3, dim=0))]


MOVES = {
    "experts": experts,
    "transpose": lambda d: [d["t0"].transpose(0, 1).contiguous(), d["t1"].t()],
    "slices": lambda d: [d["t0"][1:, :-1], d["t0"][1], d["t0"][:, 2], d["t0"][..., 1:3], d["t0"][3:], d["t0"][-2]],
    "stack at the end": lambda d: [torch.stack([d["t0"], d["t1"]], -1), torch.stack([d["t0"], d["t1"]], 1).permute(2, 0, 1)],
    "unbind": lambda d: [*torch.stack([d["t0"], d["t1"]]).transpose(1, 2).unbind(1), *d["t2"].unbind(-1)],
    "split": lambda d: [*torch.split(d["t0"], 3, dim=1), *torch.split(d["t0"], [1, 3], dim=1)],
    "unsqueeze and squeeze": lambda d: [d["t0"].unsqueeze(-1).squeeze(-1), d["t0"].unsqueeze(0)[0], d["t0"].squeeze(0)],
    "copies": lambda d: [d["t0"].detach().clone().to(torch.float32)],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_what_moves_elements_is_followed(move: Any) -> None:
    data = sources(6, 3, 4)
    for actual, expected in zip(move(laid(data)), move(data), strict=True):
        assert torch.equal(read(actual.region, data), expected)
        assert actual.shape == expected.shape


@given(st.permutations(range(3)), st.integers(0, 2), st.data())
def test_boxes_of_stacked_and_permuted_tensors(order: list[int], dim: int, draw: st.DataObject) -> None:
    data = sources(3, 4, 5)
    expected = torch.stack(list(data.values()), dim=dim).permute(order)
    region = cat([Region.whole(n, t.shape).unsqueeze(dim) for n, t in data.items()], dim).permute(order)
    offset = [draw.draw(st.integers(0, n)) for n in expected.shape]
    size = [draw.draw(st.integers(0, n - o)) for n, o in zip(expected.shape, offset, strict=True)]
    part = expected[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    assert torch.equal(read(region.box((tuple(offset), tuple(size))), data), part)


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1, (1, 5)), Shard(1)], [Shard(0), Replicate()]], ids=str)
def test_pieces_are_the_boxes_of_a_spec_and_read_what_they_keep(placements: list[Placement]) -> None:
    data = sources(2, 5, 3)
    spec = Spec.make(init_device_mesh("cpu", (2, 3)), placements, (5, 6), torch.float32)
    whole, region = torch.cat(list(data.values()), 1), cat([Region.whole(n, t.shape) for n, t in data.items()], 1)
    read_elements = 0
    for box in spec.boxes:
        piece = region.box(box)
        at = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
        assert torch.equal(read(piece, data), whole[at])
        read_elements += sum(torch.Size(p.size).numel() for p in piece.parts)
    assert read_elements == whole.numel(), "each element is read once, by the piece that keeps it"


def test_a_scalar() -> None:
    assert read(Region.whole("t", ()).box(((), ())), {"t": torch.tensor(3.0)}) == 3


def test_what_computes_is_refused() -> None:
    tensors = laid(sources(2, 3, 4))
    for compute in (lambda a, b: a + b, lambda a, b: a.reshape(2, 6), lambda a, b: a[::2], lambda a, b: torch.ones(3, 4) * a):
        with pytest.raises(UsageError, match=r"a conversion of t0.*by aten"):
            compute(tensors["t0"], tensors["t1"])


def test_what_does_not_fit_is_not_joined() -> None:
    data = laid({"a": torch.ones(2, 3), "b": torch.ones(2, 4), "c": torch.ones(3)})
    for join in (torch.stack, torch.cat):
        with pytest.raises(Unfit, match=r"a .*beside b"):
            join([data["a"], data["b"]])
    with pytest.raises(Unfit, match="beside c"):
        torch.stack([data["a"], data["c"]])
    assert torch.cat([data["a"], data["b"]], 1).shape == (2, 7)
