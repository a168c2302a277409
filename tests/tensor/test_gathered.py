"""Whole copies whose memory comes and goes: every use finds it there, and no write is lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, explain, init_device_mesh
from dtorch.tensor.client import Client
from dtorch.tensor.gathered import Gathered
from dtorch.testing.sessions import own_session
from dtorch.worker.executor import Executor
from tests.sharding.harness import place, values

R = Replicate()
MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))


class Kept:
    """Two gathered tensors, what they are on plain PyTorch, and how often their memory came back by itself."""

    def __init__(self) -> None:
        self.plain = [values(7, 4), values(6)]
        self.split = [place(t, MESH, (Shard(0), R)).requires_grad_() for t in self.plain]
        self.memory = Gathered(self.split, [t._spec.replace((R, R)) for t in self.split], "test", lambda _: self.came())
        self.whole, self.memory.made = self.memory.made, []
        self.returns = 0

    def came(self) -> None:
        self.returns += 1


@pytest.fixture
def session() -> Iterator[tuple[Client, Executor]]:
    with own_session() as pair:
        yield pair


@pytest.fixture
def kept(session: tuple) -> Kept:
    return Kept()


def nbytes(session: tuple[Client, Executor]) -> int:
    gc.collect()
    session[0].flush()
    session[0].flush()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for v in session[1].store.values() for t in v}.values())


USES = {
    "operator": lambda t: t + 1,
    "view": lambda t: t.t()[1:],
    "read": lambda t: t.to_torch(),
    "redistribute": lambda t: t.redistribute(placements=[Shard(1), Shard(0)]),
    "shards": lambda t: t.shards[0],
    "clone": lambda t: dtorch.Tensor(t),
    "local_map": lambda t: dtorch.local_map(lambda x: x * 2, in_placements=[[R, R]], out_placements=[R, R])(t),
    "mixed": lambda t: torch.ones(4) * t,
    "list": lambda t: torch._foreach_add([t], 1.0)[0],
}


@pytest.mark.parametrize("use", USES)
def test_every_use_brings_the_memory_back(use: str, kept: Kept, session: tuple) -> None:
    expected = USES[use](kept.whole[0])
    kept.memory.drop()
    again = USES[use](kept.whole[0])
    assert kept.returns == 1 and kept.memory.present
    assert torch.equal(*[t.to_torch() if isinstance(t, dtorch.Tensor) else t for t in (expected, again)])
    USES[use](kept.whole[0])
    assert kept.returns == 1


def test_views_and_copies_of_views_are_right_too(kept: Kept, session: tuple) -> None:
    whole = kept.whole[0]
    views = [whole.t(), whole[2:5, 1], whole.view(2, 14), whole.unbind(1)[3]]
    expected = [v.to_torch() for v in views]
    for _ in range(2):
        kept.memory.drop()
        for view, value in zip(views, expected, strict=True):
            assert torch.equal(view.to_torch(), value)
    del whole
    kept.whole.clear()
    kept.memory.drop()
    assert torch.equal(views[0].to_torch(), expected[0]), "a view outlives what it is a view of"


def test_memory_is_given_back_and_comes_in_one_collective(kept: Kept, session: tuple) -> None:
    full = nbytes(session)
    kept.memory.drop()
    kept.memory.drop()
    assert full - nbytes(session) == 4 * (28 + 6)
    with explain() as report:
        _ = kept.whole[1] + 1
    assert [(e.comm.kind, e.comm.axis) for e in report.events] == [("all_gather", "a")]
    kept.memory.drop()
    kept.whole.pop(0)
    with explain() as report:
        _ = kept.whole[0] + 1
    assert report.nbytes == 3 * 6 * 4, "what nobody holds does not come back"


def test_nothing_is_left_when_the_tensors_die(kept: Kept, session: tuple) -> None:
    kept.memory.drop()
    view = kept.whole[0].t()
    kept.memory.drop()
    del view
    kept.whole.clear()
    kept.memory = None  # type: ignore[assignment]
    nbytes(session)
    assert len(session[1].store) == 2, "the split ones"


def test_a_write_is_carried_over(kept: Kept, session: tuple) -> None:
    with torch.no_grad():
        kept.whole[0].t()[1].zero_()
    kept.memory.drop()
    kept.plain[0].t()[1].zero_()
    assert torch.equal(kept.split[0].to_torch(), kept.plain[0])
    with torch.no_grad():
        kept.whole[0].mul_(2)
    kept.memory.write_back()
    assert torch.equal(kept.split[0].to_torch(), kept.plain[0] * 2)


def test_outside_of_backward_passes_the_tensors_as_they_are_now(kept: Kept, session: tuple) -> None:
    assert kept.memory.fresh(kept.split) and not kept.memory.fresh(kept.split[:1])
    kept.memory.drop()
    with torch.no_grad():
        kept.split[0].mul_(2)
    assert not kept.memory.fresh(kept.split)
    assert torch.equal(kept.whole[0].to_torch(), kept.plain[0] * 2)


def test_a_tensor_that_holds_another_ones_memory_is_not_that_one(kept: Kept, session: tuple) -> None:
    kept.memory.drop()
    kept.split[0].data = kept.split[0].data * 2
    assert not kept.memory.fresh(kept.split)
    assert torch.equal(kept.whole[0].to_torch(), kept.plain[0])


def test_a_failure_reaches_what_is_gathered_of_it(kept: Kept, session: tuple) -> None:
    view = kept.whole[0].t()
    kept.memory.drop()
    with torch.no_grad():
        failed = kept.split[0]._spec
        bad = dtorch.local_map(_fail, in_placements=[list(failed.placements)], out_placements=list(failed.placements))
        kept.split[0].copy_(bad(kept.split[0]))
    with pytest.raises(dtorch.RemoteError, match="no such luck"):
        view.to_torch()
    with pytest.raises(dtorch.RemoteError, match="no such luck"):
        (view + 1).to_torch()


def _fail(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "meta":
        raise ValueError("no such luck")
    return x + 1
