"""Random draws: the values of plain torch for the same seed, under every placement, without moving anything."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial
from tests.sharding.harness import check, not_replicated, place, values

_aten = torch.ops.aten

FILLS = {
    "uniform": lambda x: x.uniform_(-1, 2),
    "normal": lambda x: x.normal_(1, 2),
    "bernoulli": lambda x: x.bernoulli_(0.25),
    "bernoulli default": lambda x: x.bernoulli_(),
    "exponential": lambda x: x.exponential_(2),
    "log_normal": lambda x: x.log_normal_(),
    "cauchy": lambda x: x.cauchy_(),
    "geometric": lambda x: x.geometric_(0.25),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(7),
    "random from": lambda x: x.random_(3, 9),
}


@pytest.mark.parametrize("name", FILLS)
def test_in_place(name):
    def fn(x):
        torch.manual_seed(5)
        y = x.clone()
        return FILLS[name](y), y, torch.rand(3)

    check(fn, values(5, 6), limit=20)
    check(fn, values(3), limit=10)


def test_the_order_of_draws_is_that_of_memory():
    def fn(x):
        torch.manual_seed(5)
        y = x.clone().t()
        y.normal_()
        z = x.clone()
        z[:, ::2].uniform_()
        return y, z

    check(fn, values(5, 6), limit=20)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_dtypes(dtype):
    def fn(x):
        torch.manual_seed(5)
        return x.clone().bernoulli_(0.5), x.clone().random_()

    check(fn, values(5, 6).to(dtype), limit=15)


def test_like_another():
    def fn(x):
        torch.manual_seed(5)
        return torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9), torch.randint_like(x, 2, 9)

    check(fn, values(5, 6), limit=20)


def test_a_tensor_of_probabilities():
    def fn(x, p):
        torch.manual_seed(5)
        return x.clone().bernoulli_(p), torch.bernoulli(p)

    check(fn, values(5, 6), values(5, 6, seed=1).sigmoid(), limit=15, partial=(), rule=False)


def test_a_generator():
    def fn(x):
        generator = torch.Generator().manual_seed(7)
        return x.clone().normal_(generator=generator), generator.get_state()

    check(fn, values(5, 6), limit=10)


@pytest.mark.parametrize("fn", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout(fn):
    def seeded(x):
        torch.manual_seed(5)
        return fn(x, 0.5, True)

    check(seeded, values(3, 4, 5), grad=True, limit=10)


@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_native_dropout(train, p):
    def fn(x):
        torch.manual_seed(5)
        return _aten.native_dropout.default(x, p, train)

    check(fn, values(4, 6), grad=True, limit=10)


def test_nothing_moves():
    mesh = init_device_mesh("cpu", (2, 2))
    x = place(values(64, 8), mesh, (Shard(0), Shard(1)))

    def fn():
        x.normal_()
        return torch.rand_like(x), _aten.native_dropout.default(x, 0.5, True)

    out = not_replicated(fn, at_most_nbytes=0)
    assert out[0].placements == x.placements
    assert [t.placements for t in out[1]] == [x.placements] * 2


def test_a_partial_destination_holds_the_values_once():
    mesh = init_device_mesh("cpu", (3,))
    x = dtorch.from_local(lambda c: torch.ones(4), mesh, [Partial()])
    torch.manual_seed(5)
    x.uniform_()
    torch.manual_seed(5)
    torch.testing.assert_close(x.to_torch(), torch.empty(4).uniform_())


def test_initialisers_draw_alike_everywhere():
    for init in (torch.nn.init.xavier_uniform_, torch.nn.init.kaiming_normal_, torch.nn.init.trunc_normal_):
        torch.manual_seed(1)
        expected, state = init(torch.empty(6, 4)), torch.get_rng_state()
        for placement in (Shard(0), Shard(1), Replicate()):
            w = dtorch.zeros(6, 4, device_mesh=init_device_mesh("cpu", (3,)), placements=[placement])
            torch.manual_seed(1)
            torch.testing.assert_close(init(w).to_torch(), expected)
            assert torch.equal(torch.get_rng_state(), state)
            assert w.placements == (placement,)
