"""Random numbers are those of one device: same seed, same values, same state afterwards, under every mesh and placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
HOMES = [
    (init_device_mesh("cpu", 4), (Shard(0),)),
    (init_device_mesh("cpu", 3), (Shard(1),)),
    (init_device_mesh("cpu", 2), (R,)),
    (init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(0))),
    (init_device_mesh("cpu", (2, 3)), (Shard(1), Shard(0))),
]

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, -3, 9),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone() + 1, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(1, 5, 7), 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 5, 7, 1), 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.5),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "random_": lambda x: x.clone().random_(1, 50),
    "poisson": lambda x: torch.poisson(x.abs() + 1),
    "binomial": lambda x: torch.binomial(x.abs() * 0 + 9, x.sigmoid()),
    "normal of means": lambda x: torch.normal(x, x.abs() + 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 3),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.5, hard=True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.5, training=True),
    "randperm beside": lambda x: x[torch.randperm(5)],
    "new and filled": lambda x: x.new_empty(3, 4).normal_(),
    "a transposed one": lambda x: x.clone().t().normal_(),
    "a part": lambda x: _part(x.clone()),
    "numbers beside": lambda x: x * torch.rand(()) + torch.randn(7),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 5, 7)] * 3, dropout_p=0.4),
}


def _part(z: torch.Tensor) -> torch.Tensor:
    z[1:4].uniform_()
    z[:, 2].normal_()
    return z


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("fn", DRAWS.values(), ids=DRAWS)
def test_draws_are_bit_for_bit_those_of_one_device(fn: Callable, home: tuple) -> None:
    torch.manual_seed(3)
    wanted, state = fn(values(5, 7)), torch.get_rng_state()
    torch.manual_seed(3)
    got = fn(place(values(5, 7), *home))
    exact = got.to_torch()
    assert torch.equal(torch.get_rng_state(), state)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    # Attention computes with what it draws; the rest is what was drawn.
    torch.testing.assert_close(exact, wanted, rtol=1e-6, atol=1e-6)
    if fn is not DRAWS["attention with dropout"]:
        assert torch.equal(exact, wanted)


INITS: dict[str, Callable] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "constant_": lambda w: nn.init.constant_(w, 0.3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "dirac_": lambda w: nn.init.dirac_(w.view(5, 7, 1)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.4),
    "with a generator": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(5)),
}


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_initial_weights_are_those_of_one_device(init: Callable, home: tuple) -> None:
    torch.manual_seed(3)
    plain = torch.empty(5, 7)
    init(plain)
    torch.manual_seed(3)
    weight = nn.Parameter(place(torch.empty(5, 7), *home))
    init(weight)
    assert weight.placements == home[1]
    if init in (nn.init.orthogonal_,):
        torch.testing.assert_close(weight.detach().to_torch(), plain)
    else:
        assert torch.equal(weight.detach().to_torch(), plain)


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_generators_and_states(home: tuple) -> None:
    """A generator of one's own goes on where it was; a state that was kept brings back what was drawn; forks do not leak."""

    def story(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own = torch.Generator().manual_seed(7)
        out = [torch.rand(5, 7, generator=own), x.clone().normal_(generator=own), torch.bernoulli(x.sigmoid(), generator=own)]
        state, kept = torch.get_rng_state(), own.get_state()
        out += [torch.rand_like(x), x.clone().uniform_(generator=own)]
        torch.set_rng_state(state)
        own.set_state(kept)
        out += [torch.rand_like(x), x.clone().uniform_(generator=own)]
        with torch.random.fork_rng():
            torch.manual_seed(9)
            out.append(F.dropout(x, 0.5))
        out += [torch.rand_like(x), torch.randn(3), torch.tensor(torch.initial_seed()), torch.get_rng_state(), own.get_state()]
        return out

    wanted = story(values(5, 7))
    for got, want in zip(story(place(values(5, 7), *home)), wanted, strict=True):
        assert torch.equal(got.to_torch() if isinstance(got, dtorch.Tensor) else got, want)


def test_partial_sums_drop_elements_and_not_parts() -> None:
    torch.manual_seed(2)
    wanted = F.dropout(values(5, 7), 0.5)
    torch.manual_seed(2)
    assert torch.equal(F.dropout(place(values(5, 7), HOMES[0][0], (Partial(),)), 0.5).to_torch(), wanted)


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_the_gradient_of_dropout_meets_its_mask(home: tuple) -> None:
    grads = []
    for x in (values(5, 7), place(values(5, 7), *home)):
        x = x.detach().requires_grad_()
        torch.manual_seed(4)
        F.dropout(x, 0.5).pow(2).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[1].to_torch(), grads[0])
