"""Weights and state going out of and into global tensors: plain into global and back, uneven, on one and two axes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
HOMES = [(LINE, (Shard(0),)), (LINE, (R,)), (GRID, (Shard(0), Shard(0))), (GRID, (Shard(0), R))]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(17, 17), nn.BatchNorm1d(17), nn.Linear(17, 5))


def placed_copy(module: nn.Module, home: tuple) -> nn.Module:
    module = copy.deepcopy(module)
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(place(p.data, *home)))
        for name, b in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(name, place(b, *home) if b.ndim else place(b, home[0], (R,) * home[0].ndim))
    return module


def is_global(module: nn.Module) -> bool:
    return all(isinstance(t, dtorch.Tensor) for t in module.state_dict().values())


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_plain_weights_go_into_a_global_module_and_back(home: tuple, assign: bool) -> None:
    """Sizes that do not divide the mesh; as in PyTorch, ``assign`` puts the given tensors in place of the old ones."""
    source = model()
    target = placed_copy(model().apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None), home)
    before = {k: t.placements for k, t in target.state_dict().items()}
    assert not target.load_state_dict(source.state_dict(), assign=assign).missing_keys
    same(dict(target.state_dict()), dict(source.state_dict()), str(home))
    assert assign or ({k: t.placements for k, t in target.state_dict().items()} == before and is_global(target))
    back = model()
    with torch.no_grad():
        back[0].weight.zero_()
    back.load_state_dict(target.state_dict())
    same(dict(back.state_dict()), dict(source.state_dict()), "back")
    assert not any(isinstance(t, dtorch.Tensor) for t in back.state_dict().values())


@pytest.mark.parametrize("source", HOMES, ids=str)
@pytest.mark.parametrize("target", HOMES, ids=str)
def test_weights_go_from_placement_to_placement(source: tuple, target: tuple) -> None:
    first, second = placed_copy(model(), source), placed_copy(model(), target)
    with torch.no_grad():
        for p in first.parameters():
            p.mul_(2)
    given = {k: t.redistribute(target[0], [R] * target[0].ndim) for k, t in first.state_dict().items()}
    second.load_state_dict(given)
    same(dict(second.state_dict()), {k: t.to_torch() for k, t in first.state_dict().items()}, f"{source} {target}")
    assert second[0].weight.placements == target[1]


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_weights_that_do_not_fit_are_refused_as_in_torch(home: tuple) -> None:
    target = placed_copy(model(), home)
    before = {k: t.to_torch() for k, t in target.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        target.load_state_dict({**model().state_dict(), "0.weight": torch.zeros(16, 17)})
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict({"0.weight": torch.zeros(17, 17)})
    assert target[0].weight.placements == home[1] and before.keys() == target.state_dict().keys()


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_file_of_what_was_read_is_loaded_again(home: tuple) -> None:
    file = io.BytesIO()
    placed = placed_copy(model(), home)
    with pytest.raises(UsageError, match="to_torch"):
        torch.save(placed.state_dict(), io.BytesIO())
    torch.save({k: t.to_torch() for k, t in placed.state_dict().items()}, file)
    file.seek(0)
    again = placed_copy(model(), home)
    with torch.no_grad():
        again[2].weight.zero_()
    again.load_state_dict(torch.load(file))
    same(dict(again.state_dict()), dict(model().state_dict()), str(home))


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_running_statistics_follow_the_whole_batch(home: tuple) -> None:
    plain, placed = model(), placed_copy(model(), home)
    for step in range(3):
        x = values(7, 17, seed=step)
        got, wanted = placed(place(x, home[0], home[1])), plain(x)
        same(got, wanted, str(home), rtol=1e-4, atol=1e-5)
    same(dict(placed.state_dict()), dict(plain.state_dict()), str(home), rtol=1e-4, atol=1e-5)


def test_each_element_is_owned_once_where_two_axes_split_one_dim() -> None:
    for n in (2, 5, 9):
        t = place(torch.arange(float(n)), init_device_mesh("cpu", (2, 4)), (Shard(0), Shard(0)))
        assert sorted(torch.cat(t.shards).tolist()) == list(range(n))
        assert [len(s) for s in t.shards] == [t.local_shape((i, j))[0] for i in range(2) for j in range(4)]


@pytest.mark.parametrize("cuts", [(0, 5, 2), (7, 0, 0), (1, 1, 5)])
def test_local_tensors_of_unequal_sizes_make_the_whole(cuts: tuple) -> None:
    locals_ = [values(n, 2, seed=i) for i, n in enumerate(cuts)]
    t = dtorch.from_local(locals_, LINE, [Shard(0)])
    same(t, torch.cat(locals_), "uneven")
    other = place(values(7, 2, seed=9), LINE, (Shard(0),))
    same(t + other, torch.cat(locals_) + values(7, 2, seed=9), "two cuts of one length")
    assert t._spec is not other._spec
