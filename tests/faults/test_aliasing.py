"""Who shares memory with whom: versions that autograd counts, ``data``, ``set_``, views that communicate, and overlaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
HOMES = [(LINE, (R,)), (LINE, (Shard(0),)), (LINE, (Shard(1),)), (GRID, (Shard(0), Shard(1))), (GRID, (Shard(1), Shard(1)))]

CHANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda y: y.add_(1),
    "a row": lambda y: y[1].mul_(2),
    "a row of the transposed": lambda y: y.t()[1].zero_(),
    "a flat part": lambda y: y.view(-1)[3:7].fill_(2),
    "the diagonal": lambda y: y.diagonal().add_(1),
    "an element": lambda y: y.__setitem__((4, 2), 1.0),
    "what detach gives": lambda y: y.detach().mul_(2),
    "a row of what detach gives": lambda y: y.detach()[3].mul_(2),
    "a redistributed one": lambda y: y.redistribute(placements=y.placements).mul_(2) if hasattr(y, "placements") else y.mul_(2),
    "by out": lambda y: torch.add(torch.ones(5, 3), 1, out=y.detach()),
    "by a list": lambda y: torch._foreach_add_([y.detach()], 1.0),
}


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_saved_value_that_was_written_is_noticed(change: Callable, home: tuple) -> None:
    """PyTorch refuses the gradient of what was overwritten; so it must be here, whichever view was written."""
    for x in (values(5, 3), place(values(5, 3), *home)):
        x = x.detach().requires_grad_()
        y = x.exp()
        z = y * 2
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_what_may_not_be_written_is_refused_as_in_torch(home: tuple) -> None:
    for x in (values(5, 3), place(values(5, 3), *home)):
        leaf = x.detach().requires_grad_()
        for write in (lambda t: t.add_(1), lambda t: t[0].zero_(), lambda t: t.__setitem__(1, 2.0)):
            with pytest.raises(RuntimeError, match="leaf Variable"):
                write(leaf)
        with pytest.raises(RuntimeError, match=r"unbind|multiple views"):
            (leaf * 1).unbind(0)[0].add_(1)
        with pytest.raises(RuntimeError, match=r"single memory location|overlap"):
            x[:1].expand(4, 3).add_(1)


DATA: dict[str, Callable[[torch.Tensor], object]] = {
    "data is written": lambda z: (z.data.add_(1), z.data[1].mul_(2), z.data.t()[0].fill_(3), z)[-1],
    "data is assigned": lambda z: (setattr(z, "data", z * 2), z.mul_(3), z)[-1],
    "data of a view is written": lambda z: (z[1:3].data.fill_(7), z)[-1],
    "set_": lambda z: _set(z),
    "detached view": lambda z: (z.t().detach()[1].fill_(4), z)[-1],
    "copy of itself": lambda z: (z.copy_(z.clone().flip(0)), z)[-1],
    "rows swapped": lambda z: (z.__setitem__(slice(0, 2), z[[1, 0]]), z)[-1],
    "shifted copy": lambda z: (z[1:].copy_(z[:-1].clone()), z)[-1],
    "added to its part": lambda z: (z[1:].add_(z[:-1].clone()), z)[-1],
    "added to itself transposed": lambda z: (z[:3].add_(z[:3].t().clone()), z)[-1],
    "a chain": lambda z: (z.view(3, 5).t()[1:4].t()[::2].mul_(5), z)[-1],
    "two views in turn": lambda z: _turns(z),
    "a view after a write to another": lambda z: (z[0].fill_(1), z.t()[0].mul_(4), z[:, :1].add_(z[0, 0].clone()), z)[-1],
    "clone keeps": lambda z: (lambda c: (z.zero_(), c))(z[1:].clone())[-1],
    "contiguous of a view": lambda z: (lambda c: (z.zero_(), c))(z.t().contiguous())[-1],
    "masked write of a view": lambda z: (z[:, 1:].masked_fill_(z[:, 1:] > 0, 0.5), z)[-1],
    "index of a view written": lambda z: (z.t().index_copy_(0, torch.tensor([2, 0]), torch.ones(2, 5)), z)[-1],
    "loop over rows": lambda z: ([row.add_(i) for i, row in enumerate(z)], z)[-1],
    "unfold without overlap": lambda z: (z.unfold(0, 2, 2)[0].fill_(6), z)[-1],
    "swapped halves": lambda z: (lambda a, b: (a.copy_(b.clone()), z))(z[:2], z[3:])[-1],
    "squeezed and written": lambda z: (z.unsqueeze(0).squeeze(0)[2].fill_(8), z)[-1],
    "imaginary part": lambda z: (torch.view_as_complex(z.view(-1)[:14].view(7, 2)).imag.fill_(2), z)[-1],
}


def _set(z: torch.Tensor) -> tuple:
    other = z * 3
    z.set_(other)
    other.add_(1)
    z[1].zero_()
    return z, other


def _turns(z: torch.Tensor) -> tuple:
    rows, columns = z[1:4], z.t()[:2]
    for _ in range(3):
        rows.add_(1)
        columns.mul_(2)
        z.sub_(0.5)
    return z, rows, columns


@pytest.mark.parametrize("fn", DATA.values(), ids=DATA)
def test_shared_memory_is_shared(fn: Callable) -> None:
    check(lambda x: fn(x.clone()), values(5, 3), rule=False, limit=10)


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_gradients_through_written_views(home: tuple) -> None:
    grads = []
    for x in (values(5, 3), place(values(5, 3), *home)):
        x = x.detach().requires_grad_()
        z = x * 2
        z.t()[1].mul_(x[:, 0])
        z[1:3] = z[3:].clone() * 2
        z.view(-1)[::4].add_(1)
        z.diagonal().copy_(x[0])
        z.pow(2).sum().backward()
        grads.append((z, x.grad))
    same(grads[1], grads[0], str(home))


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_overlapping_windows_are_never_written_half(home: tuple) -> None:
    z = place(values(5, 3), *home)
    try:
        z.unfold(0, 3, 1).fill_(2)
    except (UsageError, RuntimeError):
        same(z, values(5, 3), "unchanged")
    else:
        same(z, torch.full((5, 3), 2.0), "all written")


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "rows": lambda z: list(z),
    "unpacked": lambda z: (lambda a, b, *rest: (b, rest))(*z),
    "tolist": lambda z: z.tolist(),
    "numbers": lambda z: (float(z.sum()), int(z.abs().sum()), bool(z.sum() > -99), z.sum().item(), len(z)),
    "numpy": lambda z: torch.from_numpy(z.numpy().copy()),
    "array of a dtype": lambda z: torch.from_numpy(np.asarray(z, dtype=np.float64)),
    "array protocol": lambda z: torch.from_numpy(z.__array__().copy()),
    "contains": lambda z: (z[0, 0].item() in z, 99.0 in z),
    "enumerated": lambda z: [row * i for i, row in enumerate(z)],
    "sum": lambda z: sum(z),
    "largest": lambda z: max(z[:, 0]).item(),
    "index": lambda z: "abcdefgh"[z.abs().long()[0, 0]],
    "text": lambda z: (f"{z[0, 0]:.3f}", str(z.sum().item())),
    "reversed": lambda z: list(reversed(z)),
    "plain": lambda z: torch.tensor(z[0].tolist()),
    "zipped": lambda z: [a @ b for a, b in zip(z, z.flip(0), strict=True)],
}


@pytest.mark.parametrize("fn", READS.values(), ids=READS)
def test_reading_gives_the_whole(fn: Callable) -> None:
    check(fn, values(5, 3), rule=False, limit=6)


@pytest.mark.parametrize("home", [*HOMES, (LINE, (Partial(),))], ids=str)
def test_what_a_hook_sees_is_whole(home: tuple) -> None:
    """Hooks of tensors and of saved values, also those that keep what is saved elsewhere."""
    results = []
    for x in (values(5, 3), place(values(5, 3), *home)):
        seen = []
        x = x.detach().requires_grad_()
        x.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        x.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = x.exp() * x
        with torch.autograd.graph.save_on_cpu():
            z = (y * y).sin()
        z.retain_grad()
        z.sum().backward()
        results.append((seen, x.grad, z.grad))
    same(results[1], results[0], str(home), rtol=1e-4, atol=1e-5)


def test_parameters_that_share_one_value_stay_one() -> None:
    for home in HOMES:
        first, second = nn.Linear(3, 5), nn.Linear(3, 5)
        first.weight = second.weight = nn.Parameter(place(values(5, 3), *home))
        with torch.no_grad():
            first.weight[1].zero_()
            second.weight.data.t()[0].fill_(1)
        assert torch.equal(first.weight.detach().to_torch(), second.weight.detach().to_torch())
        assert first.weight.tolist()[1] == [1.0, 0.0, 0.0]
        assert isinstance(first.weight, dtorch.Tensor)
