"""Every case of ``cases.py``, on its own mesh and placements and on others, and the stories too long for a table."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Placement
from dtorch.testing.sessions import own_session
from tests.cases import CASES
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
IDS = [name for name, *_ in CASES]


def named(placement: str) -> Placement:
    return {"R": R, "P": Partial()}.get(placement) or Shard(int(placement[1:]))


def plain_inputs(inputs: dict) -> dict[str, torch.Tensor]:
    made = {}
    for number, (name, (given, _)) in enumerate(inputs.items()):
        made[name] = values(*given, seed=number) if isinstance(given, tuple) else given
    return made


@pytest.mark.parametrize(("name", "kind", "mesh_shape", "inputs", "fn"), CASES, ids=IDS)
def test_case(name: str, kind: str, mesh_shape: tuple[int, ...], inputs: dict, fn: Callable) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    plain = plain_inputs(inputs)
    placed = {k: place(t, mesh, tuple(map(named, inputs[k][1]))) for k, t in plain.items()}
    for _ in range(2):  # the second time from cached plans
        same(fn(**placed), fn(**plain), f"{name} ({kind})")
    for k, t in placed.items():
        assert torch.equal(t.to_torch(), plain[k]), f"{name} changed its input {k}"


@pytest.mark.parametrize(("name", "kind", "mesh_shape", "inputs", "fn"), CASES, ids=IDS)
def test_case_under_other_placements(name: str, kind: str, mesh_shape: tuple[int, ...], inputs: dict, fn: Callable) -> None:
    plain = plain_inputs(inputs)

    def program(*tensors: torch.Tensor) -> object:
        with torch.enable_grad():
            return fn(**dict(zip(plain, tensors, strict=True)))

    check(program, *plain.values(), rule=False, limit=12)


@pytest.mark.parametrize("outer", [True, False], ids=["outer", "inner"])
@pytest.mark.parametrize(("name", "kind", "mesh_shape", "inputs", "fn"), CASES, ids=IDS)
def test_case_split_over_one_device_too(
    name: str, kind: str, mesh_shape: tuple[int, ...], inputs: dict, fn: Callable, outer: bool
) -> None:
    """A split over an axis of one device says nothing, and must not outlive the dim that it names."""
    mesh = init_device_mesh("cpu", (1, *mesh_shape) if outer else (*mesh_shape, 1))
    plain = plain_inputs(inputs)
    for dim in (0, -1):
        placed = {}
        for k, t in plain.items():
            own, one = tuple(map(named, inputs[k][1])), Shard(dim) if t.ndim else R
            placed[k] = place(t, mesh, (one, *own) if outer else (*own, one))
        same(fn(**placed), fn(**plain), f"{name} ({kind})")


HOMES = [
    *[(init_device_mesh("cpu", n), [p]) for n in (1, 2, 3, 4) for p in (Shard(0), Shard(1), R)],
    (init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]),
    (init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)]),
]


@pytest.mark.parametrize(("mesh", "placements"), HOMES, ids=str)
def test_story_random_same_everywhere(mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Initialisation and dropout: one and the same global values, and the same generator state afterwards."""

    def draw(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        out = []
        for init in (nn.init.normal_, nn.init.uniform_, lambda t: nn.init.trunc_normal_(t, std=0.1, a=-0.1, b=0.1)):
            out.append(init(weight).clone())
        return (*out, F.dropout(weight, 0.5), F.dropout(weight + 1, 0.1))

    expected, state = draw(torch.empty(5, 7)), torch.get_rng_state()
    got = draw(dtorch.empty(5, 7, device_mesh=mesh, placements=placements))
    assert torch.equal(torch.get_rng_state(), state)
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g.to_torch(), e)


@pytest.mark.parametrize("ways", [2, 3])
def test_story_clip_grad_norm(ways: int) -> None:
    """A two-layer model whose parameters carry different placements and lie on two meshes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    placed = copy.deepcopy(plain)
    first, second = init_device_mesh("cpu", ways), DeviceMesh("cpu", range(ways, 2 * ways))
    homes = {"0.weight": (first, Shard(0)), "0.bias": (first, Shard(0)), "2.weight": (second, Shard(1)), "2.bias": (second, R)}
    for name, (mesh, placement) in homes.items():
        layer, _, last = name.partition(".")
        weight = dtorch.Tensor(getattr(placed[int(layer)], last).data, device_mesh=mesh, placements=[placement])
        setattr(placed[int(layer)], last, nn.Parameter(weight))
    x = values(5, 6)
    plain(x).pow(2).sum().backward()
    hidden = placed[1](placed[0](place(x, first, (R,))))
    placed[2](hidden.redistribute(second, [R])).pow(2).sum().backward()
    for norm_type in (2.0, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        total = nn.utils.clip_grad_norm_(placed.parameters(), 0.5, norm_type)
        torch.testing.assert_close(total.to_torch(), expected)
        for p, q in zip(plain.parameters(), placed.parameters(), strict=True):
            torch.testing.assert_close(q.grad.to_torch(), p.grad)


class Tied(nn.Module):
    """An embedding whose weight is also that of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).tanh())


@pytest.mark.parametrize("ways", [2, 3])
def test_story_tied_weights(ways: int) -> None:
    """The gradient of a shared parameter counts each use once, and it stays one parameter."""
    torch.manual_seed(0)
    plain = Tied()
    placed = dtorch.parallelize(copy.deepcopy(plain), init_device_mesh("cpu", ways, mesh_dim_names=("tp",)))
    assert placed.head.weight is placed.embed.weight
    assert len(list(placed.parameters())) == 1
    ids = torch.tensor([[1, 9, 3], [3, 0, 7]])
    outs = [model(ids) for model in (plain, placed)]
    for out in outs:
        F.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
    torch.testing.assert_close(whole(outs[1]), outs[0].detach())
    torch.testing.assert_close(whole(placed.head.weight.grad), plain.head.weight.grad)
    for model in (plain, placed):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert placed.head.weight is placed.embed.weight
    torch.testing.assert_close(whole(placed.embed.weight), plain.embed.weight.detach())


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to_torch() if isinstance(t, dtorch.Tensor) else t.detach()


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("placement", [R, Shard(1)], ids=str)
def test_story_kv_heads_fewer_than_devices(ways: int, placement: Placement) -> None:
    """Eight query heads, two key and value heads, repeated to meet them, over more devices than there are key heads."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t[:, :, None].expand(2, 2, 4, 5, 4).reshape(2, 8, 5, 4) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    mesh = init_device_mesh("cpu", ways)
    q, k, v = values(2, 8, 5, 4), values(2, 2, 5, 4, seed=1), values(2, 2, 5, 4, seed=2)
    out = attention(place(q, mesh, (Shard(1),)), place(k, mesh, (placement,)), place(v, mesh, (placement,)))
    torch.testing.assert_close(out.to_torch(), attention(q, k, v))
    grouped = F.scaled_dot_product_attention(
        place(q, mesh, (Shard(1),)), place(k, mesh, (placement,)), place(v, mesh, (placement,)), enable_gqa=True
    )
    torch.testing.assert_close(grouped.to_torch(), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1)], ids=str)
def test_story_checkpointed_block(reentrant: bool, ways: int, placement: Placement) -> None:
    """Both modes of checkpointing around a block with dropout: the gradients are those without."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6))
    mesh = init_device_mesh("cpu", ways)
    placed = copy.deepcopy(plain)
    for layer in (placed[0], placed[3]):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(dtorch.Tensor(p.data, device_mesh=mesh, placements=[Shard(0)])))

    def gradients(model: nn.Module, x: torch.Tensor, checkpointed: bool) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        torch.manual_seed(7)
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.pow(2).sum().backward()
        grads = [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
        return [whole(g) for g in grads]

    expected = gradients(plain, values(5, 6), False)
    for checkpointed in (False, True):
        for g, e in zip(gradients(placed, place(values(5, 6), mesh, (placement,)), checkpointed), expected, strict=True):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize("ways", [2, 3])
def test_story_scalar_schedules(ways: int) -> None:
    """A Python scalar that changes every step makes no new plan every step."""
    with own_session() as (client, _):
        mesh = init_device_mesh("cpu", ways)
        p, plain = nn.Parameter(place(values(7, 4), mesh, (Shard(0),))), nn.Parameter(values(7, 4))
        counts = []
        for step in range(12):
            rate, scale, decay = 0.1 / (step + 1), 1.0 + step * 0.3, 1 - 0.01 * step
            before = client.planned
            for q in (p, plain):
                q.grad = None
                (q * scale).pow(2).mean().backward()
                with torch.no_grad():
                    q.mul_(decay).add_(q.grad, alpha=-rate).clamp_(-scale, scale)
                    q.lerp_(q * rate, rate)
            counts.append(client.planned - before)
        assert counts[2:] == [0] * 10
        torch.testing.assert_close(whole(p), plain.detach())
