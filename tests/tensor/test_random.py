"""Random numbers: for one seed the same global values as plain PyTorch, on every mesh and placement, and the same state after."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh, use_mesh
from dtorch.core.placements import Placements
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
HOMES: list[tuple[DeviceMesh, Placements]] = [
    (DeviceMesh("cpu"), (R,)),
    (init_device_mesh("cpu", 2), (Shard(0),)),
    (init_device_mesh("cpu", 2), (Shard(1),)),
    (init_device_mesh("cpu", 2), (R,)),
    (init_device_mesh("cpu", 3), (Shard(0, (0, 5, 2)),)),
    (init_device_mesh("cpu", 4), (Shard(0),)),
    (init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(1))),
    (init_device_mesh("cpu", (2, 2)), (R, Shard(0))),
]
HOME_IDS = [f"{m.shape}{list(p)}" for m, p in HOMES]

FILLS = {
    "uniform_": lambda t: t.uniform_(-2, 3),
    "normal_": lambda t: t.normal_(1, 2),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda t: t.bernoulli_(torch.full((7, 6), 0.4)),
    "random_": lambda t: t.random_(0, 9),
    "exponential_": lambda t: t.exponential_(0.5),
    "geometric_": lambda t: t.geometric_(0.4),
    "log_normal_": lambda t: t.log_normal_(),
    "cauchy_": lambda t: t.cauchy_(),
    "nn.init.normal_": lambda t: nn.init.normal_(t, 0, 0.02),
    "nn.init.uniform_": lambda t: nn.init.uniform_(t),
    "nn.init.trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "nn.init.xavier_uniform_": lambda t: nn.init.xavier_uniform_(t),
    "nn.init.xavier_normal_": lambda t: nn.init.xavier_normal_(t),
    "nn.init.kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "nn.init.kaiming_normal_": lambda t: nn.init.kaiming_normal_(t),
    "nn.init.orthogonal_": lambda t: nn.init.orthogonal_(t),
    "nn.init.sparse_": lambda t: nn.init.sparse_(t, 0.3),
    "nn.init.constant_": lambda t: nn.init.constant_(t, 2.0),
    "nn.init.eye_": lambda t: nn.init.eye_(t),
}

DRAWS = {
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float64),
    "randint_like": lambda t: torch.randint_like(t, 3, 9),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
    "multinomial": lambda t: torch.multinomial(t.abs() + 0.1, 3),
    "multinomial with replacement": lambda t: torch.multinomial(t.abs() + 0.1, 8, replacement=True),
    "normal of tensors": lambda t: torch.normal(t, t.abs() + 1),
    "normal of a number": lambda t: torch.normal(t, 2.0),
    "poisson": lambda t: torch.poisson(t.abs()),
    "dropout": lambda t: F.dropout(t, 0.3),
    "dropout in place": lambda t: F.dropout(t.clone(), 0.3, inplace=True),
    "feature dropout": lambda t: F.dropout1d(t[None], 0.5),
    "alpha dropout": lambda t: F.alpha_dropout(t, 0.3),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "gumbel softmax": lambda t: F.gumbel_softmax(t, hard=True),
    "several in turn": lambda t: torch.rand_like(t) + F.dropout(t) + torch.randn_like(t),
    "two calls of different size": lambda t: torch.rand_like(t[0]).sum() + torch.rand_like(t),
    "nothing drawn": lambda t: F.dropout(t, 0.3, training=False),
    "empty": lambda t: torch.rand_like(t[:0]),
    "attention dropout": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.2),
}


def drawn(program: object, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a program draws after a seed, the generator's state afterwards, and the next plain number."""
    torch.manual_seed(123)
    with torch.no_grad():
        result = program(tensor)
    result = result.to_torch() if isinstance(result, dtorch.Tensor) else result
    return result, torch.get_rng_state(), torch.rand(3)


def assert_as_plain(program: object, placed: torch.Tensor, plain: torch.Tensor) -> None:
    got, expected = drawn(program, placed), drawn(program, plain)
    torch.testing.assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2])


@pytest.mark.parametrize("home", HOMES, ids=HOME_IDS)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_filling(fill: object, home: tuple) -> None:
    placed = place(torch.zeros(7, 6), *home)
    assert_as_plain(fill, placed, torch.zeros(7, 6))
    assert placed.placements == place(torch.zeros(7, 6), *home).placements


@pytest.mark.parametrize("home", HOMES, ids=HOME_IDS)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_drawing(draw: object, home: tuple) -> None:
    assert_as_plain(draw, place(values(7, 6), *home), values(7, 6))


@pytest.mark.parametrize("home", HOMES, ids=HOME_IDS)
def test_factories(home: tuple) -> None:
    mesh, placements = home
    options = {"device_mesh": mesh, "placements": placements}
    for ours, plain in (
        (lambda: dtorch.rand(7, 6, **options), lambda: torch.rand(7, 6)),
        (lambda: dtorch.randn(7, 6, dtype=torch.float64, **options), lambda: torch.randn(7, 6, dtype=torch.float64)),
        (lambda: dtorch.randint(0, 100, (7, 6), **options), lambda: torch.randint(0, 100, (7, 6))),
    ):
        torch.manual_seed(9)
        expected, after = plain(), torch.get_rng_state()
        torch.manual_seed(9)
        assert torch.equal(ours().to_torch(), expected) and torch.equal(torch.get_rng_state(), after)


def test_partial_destinations() -> None:
    placed = place(values(7, 6), init_device_mesh("cpu", 2), (Partial(),))
    assert_as_plain(lambda t: F.dropout(t, 0.5) + torch.rand_like(t), placed, values(7, 6))
    assert_as_plain(lambda t: t.uniform_(), placed, torch.zeros(7, 6))


@pytest.mark.parametrize("home", HOMES, ids=HOME_IDS)
def test_generators_of_one_s_own(home: tuple) -> None:
    def program(t: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        t.normal_(generator=generator)
        t.add_(torch.empty(7, 6).uniform_(generator=generator))
        first = torch.bernoulli(t.sigmoid(), generator=generator)
        nn.init.uniform_(t, generator=generator)
        return first + t + torch.multinomial(t.abs() + 0.1, 1, generator=generator) + torch.rand(1, generator=generator)

    assert_as_plain(program, place(torch.zeros(7, 6), *home), torch.zeros(7, 6))
    mesh, placements = home
    own, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    made = dtorch.randn(7, 6, device_mesh=mesh, placements=placements, generator=own)
    assert torch.equal(made.to_torch(), torch.randn(7, 6, generator=other)) and torch.equal(own.get_state(), other.get_state())


def test_seeds_and_states_in_the_middle() -> None:
    def program(t: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(t)
        state = torch.get_rng_state()
        second = torch.rand_like(t)
        torch.set_rng_state(state)
        third = torch.rand_like(t)
        with torch.random.fork_rng():
            torch.rand_like(t)
        torch.seed()
        torch.manual_seed(3)
        return torch.stack([first, second, third, torch.rand_like(t)])

    assert_as_plain(program, place(values(7, 6), init_device_mesh("cpu", 2), (Shard(0),)), values(7, 6))


def test_modules_built_inside_use_mesh_start_as_plain_ones() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Embedding(5, 3), nn.LSTM(3, 2))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with use_mesh(init_device_mesh("cpu", (2, 2))):
        placed = nn.Sequential(nn.Linear(6, 4), nn.Embedding(5, 3), nn.LSTM(3, 2))
    assert torch.equal(torch.get_rng_state(), after)
    for (name, p), q in zip(plain.named_parameters(), placed.parameters(), strict=True):
        assert isinstance(q, dtorch.Tensor) and torch.equal(p, q.detach().to_torch()), name


def test_dropout_in_training_has_the_plain_gradient() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        x = x.detach().requires_grad_()
        F.dropout(F.dropout(x, 0.5) * x, 0.2).sum().backward()
        return x.grad

    for home in HOMES:
        torch.testing.assert_close(gradient(place(values(7, 6), *home)).to_torch(), gradient(values(7, 6)))


def test_an_operator_that_fails_leaves_the_generator_as_it_was() -> None:
    placed = place(torch.full((4,), -1.0), init_device_mesh("cpu", 2), (Shard(0),))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises((dtorch.RemoteError, RuntimeError)):
        torch.multinomial(placed, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert_as_plain(torch.rand_like, place(values(4), init_device_mesh("cpu", 2), (Shard(0),)), values(4))


def test_the_python_draw_order_is_the_program_s() -> None:
    def program(t: torch.Tensor) -> torch.Tensor:
        a = torch.rand_like(t)
        b = torch.rand(7, 6)
        c = torch.rand_like(t)
        return a + 10 * b + 100 * c

    assert_as_plain(program, place(values(7, 6), init_device_mesh("cpu", 2), (Shard(0),)), values(7, 6))
