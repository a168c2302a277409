"""What the hooks do: inputs over dp, tensors over stages, gradients to their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.parallel.hooks import Moves, _replaced, settle_gradient

BATCHED = init_device_mesh("cpu", 2, mesh_dim_names=("dp",))
STAGED = init_device_mesh("cpu", 2, mesh_dim_names=("pp",))


class Catcher(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return args[0] if args else None


def caught(*args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    model = dtorch.parallelize(Catcher(), BATCHED)
    model(*args, **kwargs)
    return model.seen


def test_the_batch_is_split() -> None:
    (x, (y, note)), named = caught(
        torch.zeros(4, 3), (torch.zeros(4), "text"), scale=torch.tensor(2.0), table=torch.zeros(5, 2), flag=True
    )
    assert x.placements == y.placements == (Shard(0),)
    assert named["table"].placements == (Replicate(),)
    assert type(named["scale"]) is torch.Tensor and named["flag"] is True and note == "text"


def test_an_uneven_batch_is_split_and_a_small_one_is_not() -> None:
    (x,), _ = caught(torch.zeros(3, 3))
    assert [tuple(s.shape) for s in x.shards] == [(2, 3), (1, 3)]
    (x,), _ = caught(torch.zeros(1, 3))
    assert type(x) is torch.Tensor


def test_an_input_that_wants_its_gradient_gets_it() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    model = dtorch.parallelize(nn.Linear(2, 2), BATCHED)
    model(x).sum().backward()
    expected = model.weight.detach().to_torch().sum(0).expand(4, 2)
    grad = x.grad.to_torch() if isinstance(x.grad, dtorch.Tensor) else x.grad
    assert torch.allclose(grad, expected)


def test_global_inputs_are_left_alone_on_the_right_mesh() -> None:
    x = dtorch.zeros(4, 2, device_mesh=BATCHED)
    (seen,), _ = caught(x)
    assert seen is x


def test_global_inputs_of_another_mesh_are_brought_over() -> None:
    (seen,), _ = caught(dtorch.zeros(4, 2))
    assert seen.device_mesh is BATCHED


def test_labels_go_to_the_end_of_the_model() -> None:
    class Model(Catcher):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    first, second = STAGED.unbind("pp")
    model = dtorch.parallelize(Model(), STAGED)
    model(x=dtorch.zeros(2, 2), labels=dtorch.zeros(2))
    _, named = model.seen
    assert (named["x"].device_mesh, named["labels"].device_mesh) == (first, second)


def test_a_tensor_is_brought_over_once_in_a_pass() -> None:
    first, second = STAGED.unbind("pp")
    moves, x = Moves(), dtorch.ones(3, device_mesh=first)
    moves.enter()
    with dtorch.explain() as report:
        y = moves.bring(x, second)
        assert moves.bring(x, second) is y
        assert moves.bring(x, first) is x
    assert len(report.events) == 1 and y.device_mesh is second
    x.add_(1)
    assert moves.bring(x, second).tolist() == [2.0, 2.0, 2.0], "a write in between is seen"
    moves.leave()
    assert moves.made == {}


def test_a_move_without_gradient_is_not_used_with_one() -> None:
    first, second = STAGED.unbind("pp")
    moves, x = Moves(), dtorch.ones(3, device_mesh=first).requires_grad_()
    moves.enter()
    with torch.no_grad():
        assert not moves.bring(x, second).requires_grad
    assert moves.bring(x, second).requires_grad
    moves.leave()


def test_a_pass_that_fails_lets_go_too() -> None:
    class Failing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("stop")

    model = dtorch.parallelize(Failing(nn.Linear(2, 2), nn.Linear(2, 2)), STAGED)
    with pytest.raises(ValueError, match="stop"):
        model(torch.ones(1, 2))
    entrance = next(iter(model[1]._forward_pre_hooks.values()))
    assert entrance.moves.depth == 0 and entrance.moves.made == {}


def test_partial_sums_are_added_up_on_the_way() -> None:
    a, b = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))).unbind("pp")
    x = dtorch.Tensor(torch.arange(4.0), device_mesh=a, placements=[Partial()])
    moved = Moves().bring(x, b)
    assert moved.placements == (Replicate(),) and moved.tolist() == [0, 1, 2, 3]


def test_uneven_shards_cross_as_they_are() -> None:
    a, b = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))).unbind("pp")
    x = dtorch.Tensor(torch.arange(4.0), device_mesh=a, placements=[Shard(0, (3, 1))])
    assert Moves().bring(x, b).placements == (Shard(0, (3, 1)),)


def test_a_partial_gradient_settles_where_its_parameter_lies() -> None:
    mesh = init_device_mesh("cpu", 2, mesh_dim_names=("tp",))
    p = nn.Parameter(dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)]))
    p.grad = dtorch.Tensor(torch.arange(4.0), device_mesh=mesh, placements=[Partial()])
    settle_gradient(p)
    assert p.grad.placements == (Shard(0),) and p.grad.tolist() == [0, 1, 2, 3]


def test_nested_arguments_keep_their_identity_where_nothing_moves() -> None:
    tree = {"a": [torch.zeros(1), (1, None)], "b": "text"}
    assert _replaced(tree, lambda t: t) is tree
    changed = _replaced(tree, lambda t: t + 1)
    assert changed["a"][0].item() == 1 and changed["a"][1] is tree["a"][1]
