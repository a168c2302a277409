"""Random programs of views, writes, moves and arithmetic: global tensors and plain ones stay equal at every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import DeviceMesh, Replicate, init_device_mesh
from tests.sharding.harness import place, placements_of, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESHES = [init_device_mesh("cpu", s) for s in ((2,), (3,), (2, 2), (2, 1))] + [DeviceMesh("cpu", [3, 1])]

Step = Callable[[list[torch.Tensor], st.DataObject], None]


def _pick(pool: list[torch.Tensor], data: st.DataObject) -> torch.Tensor:
    return pool[data.draw(st.integers(0, len(pool) - 1), label="tensor")]


def _dim(t: torch.Tensor, data: st.DataObject) -> int:
    return data.draw(st.integers(-t.ndim, t.ndim - 1), label="dim")


def view_of(t: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    kind = data.draw(
        st.sampled_from(
            ["transpose", "slice", "select", "view", "unsqueeze", "split", "diagonal", "narrow", "detach", "flatten"]
        ),
        label="view",
    )
    if t.ndim == 0 or t.numel() == 0:
        return t.unsqueeze(0)
    d = _dim(t, data)
    n = t.shape[d]
    if kind == "transpose":
        return t.transpose(d, _dim(t, data))
    if kind == "slice":
        index = [slice(None)] * t.ndim
        index[d] = slice(data.draw(st.integers(-n, n)), None, data.draw(st.integers(1, 3)))
        return t[tuple(index)]
    if kind == "select":
        return t.select(d, data.draw(st.integers(-n, n - 1)))
    if kind == "view" and t.is_contiguous():
        return t.view(data.draw(st.sampled_from([(-1,), (t.shape[0], -1), (1, -1), (-1, 1)])))
    if kind == "split":
        parts = t.split(data.draw(st.integers(1, n)), d)
        return parts[data.draw(st.integers(0, len(parts) - 1))]
    if kind == "diagonal" and t.ndim > 1:
        return t.diagonal(data.draw(st.integers(-1, 1)))
    if kind == "narrow":
        start = data.draw(st.integers(0, n - 1))
        return t.narrow(d, start, data.draw(st.integers(0, n - start)))
    return t.detach() if kind == "detach" else t.flatten() if kind == "flatten" and t.is_contiguous() else t.unsqueeze(d)


def write_to(t: torch.Tensor, data: st.DataObject) -> None:
    kinds = ["mul_", "add_", "fill_", "copy_", "clamp_", "masked", "setitem", "cumsum_", "neg_"]
    # Autograd itself loses track of views of a tensor that transposes itself.
    kind = data.draw(st.sampled_from(kinds if t.requires_grad else [*kinds, "t_"]), label="write")
    number = data.draw(st.sampled_from([-2.0, 0.5, 1.0, 2.0]))
    if kind in ("mul_", "add_", "fill_"):
        getattr(t, kind)(number)
    elif kind == "copy_":
        t.copy_(values(*t.shape, seed=5))
    elif kind == "clamp_":
        t.clamp_(-2, 2)
    elif kind == "masked":
        t[t > 0] = number
    elif kind == "setitem" and t.ndim and t.shape[0]:
        t[-1] = number
    elif kind == "cumsum_" and t.ndim:
        t.cumsum_(_dim(t, data)).clamp_(-64, 64)
    elif kind == "t_" and t.ndim == 2:
        t.t_()
    else:
        t.neg_()


def fresh_from(t: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    kind = data.draw(st.sampled_from(["clone", "plus", "sum", "relu", "cat", "where", "matmul", "sort", "index"]), label="fresh")
    if kind == "plus":
        return t + 1
    if kind == "sum" and t.ndim:
        return (t / 8).sum(_dim(t, data), keepdim=True)
    if kind == "cat" and t.ndim:
        return torch.cat([t, t], _dim(t, data))
    if kind == "where":
        return torch.where(t > 0, t, torch.tensor(0.5))
    if kind == "matmul" and t.ndim == 2:
        return (t / 16) @ t.t()
    if kind == "sort" and t.ndim:
        return t.sort(_dim(t, data)).values
    if kind == "index" and t.ndim and t.shape[0]:
        return t[torch.tensor([0, -1])]
    return t.relu() if kind == "relu" else t.clone()


class Pair:
    """The same tensor, plain and placed; both see the same draws."""

    def __init__(self, plain: torch.Tensor, placed: dtorch.Tensor) -> None:
        self.plain, self.placed = plain, placed


class Replay:
    """Draws once and gives the same again, so that one program runs on both tensors of a pair."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.drawn, self.at = data, [], None

    def draw(self, strategy: st.SearchStrategy, label: str | None = None) -> object:
        if self.at is None:
            self.drawn.append(self.data.draw(strategy, label=label))
            return self.drawn[-1]
        self.at += 1
        return self.drawn[self.at - 1]

    def again(self) -> Replay:
        self.at = 0
        return self


def both(pair: Pair, data: st.DataObject, fn: Callable) -> tuple[object, object] | None:
    """What ``fn`` gives for both; None where PyTorch refuses it, and then it must be refused for both."""
    replay = Replay(data)
    try:
        plain = fn(pair.plain, replay)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fn(pair.placed, replay.again())
        return None
    return plain, fn(pair.placed, replay.again())


def steps(t: torch.Tensor) -> list[int]:
    """Strides that matter."""
    return [step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()]


def agree(pairs: list[Pair]) -> None:
    for number, pair in enumerate(pairs):
        assert pair.placed.shape == pair.plain.shape and steps(pair.placed) == steps(pair.plain), number
        got = pair.placed.to_torch()
        torch.testing.assert_close(
            got, pair.plain, rtol=1e-5, atol=1e-5, msg=lambda text, number=number: f"tensor {number}: {text}"
        )


def run(data: st.DataObject, mesh: DeviceMesh, pairs: list[Pair], look: bool) -> None:
    """Grow and change the pairs by random steps."""
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        pair = pairs[data.draw(st.integers(0, len(pairs) - 1), label="which")]
        kind = data.draw(st.sampled_from(["view", "view", "write", "write", "fresh", "move", "forget"]), label="kind")
        if kind == "write" and both(pair, data, write_to) is None:
            return
        if kind == "move":
            target = data.draw(st.sampled_from(placements_of(mesh, pair.plain, ())), label="target")
            moved = pair.placed.redistribute(placements=target)
            if moved._value is not pair.placed._value:
                pairs.append(Pair(pair.plain.clone(memory_format=torch.preserve_format), moved))
        elif kind == "forget" and len(pairs) > 1:
            pairs.remove(pair)
        elif kind in ("view", "fresh"):
            made = both(pair, data, view_of if kind == "view" else fresh_from)
            if made is None:
                return
            pairs.append(Pair(*made))
        if look and data.draw(st.booleans(), label="look"):
            agree(pairs)


def begin(data: st.DataObject) -> tuple[DeviceMesh, Pair]:
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    start = values(*data.draw(st.sampled_from([(4, 3), (6,), (2, 3, 2), (5, 1), (0, 2)]), label="shape"))
    placements = data.draw(st.sampled_from(placements_of(mesh, start)), label="placements")
    return mesh, Pair(start.clone(), place(start, mesh, placements))


@settings(max_examples=120)
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    mesh, pair = begin(data)
    pairs = [pair]
    run(data, mesh, pairs, look=True)
    agree(pairs)


@settings(max_examples=80)
@given(st.data())
def test_gradients_of_random_programs(data: st.DataObject) -> None:
    mesh, leaf = begin(data)
    leaf.plain.requires_grad_()
    leaf.placed.requires_grad_()
    pairs = [Pair(leaf.plain * 1, leaf.placed * 1)]
    run(data, mesh, pairs, look=False)
    grads = []
    for start, made in ((leaf.plain, [p.plain for p in pairs]), (leaf.placed, [p.placed for p in pairs])):
        try:
            loss = sum((t.double() * (number + 1)).pow(2).sum() for number, t in enumerate(made))
            grads.append(torch.autograd.grad(loss, start)[0])
        except RuntimeError as error:
            grads.append(type(error))
    expected, got = grads
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got.to_torch(), expected, rtol=1e-4, atol=1e-4)
    else:
        assert got is expected
