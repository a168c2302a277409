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


EXACT = {"rtol": 0, "atol": 0}
FROM_VALUES = {
    "bernoulli": lambda p: torch.bernoulli(p),
    "bernoulli in place": lambda p: torch.zeros_like(p).bernoulli_(p),
    "bernoulli, transposed": lambda p: torch.bernoulli(p.t()),
    "bernoulli, expanded": lambda p: torch.bernoulli(p[:, :1].expand(-1, 7)),
    "normal of means": lambda p: torch.normal(p, 2.0),
    "normal of deviations": lambda p: torch.normal(1.5, p),
    "normal of both": lambda p: torch.normal(-p, p),
    "normal of both, broadcast": lambda p: torch.normal(p, p[:1]),
    "normal, transposed": lambda p: torch.normal(p.t(), p.t()),
    "one of a row": lambda p: torch.multinomial(p, 1),
    "several of a row": lambda p: torch.multinomial(p, 3),
    "all of a row": lambda p: torch.multinomial(p, p.shape[-1]),
    "with replacement": lambda p: torch.multinomial(p, 9, replacement=True),
    "of columns": lambda p: torch.multinomial(p.t(), 2),
    "of one row": lambda p: torch.multinomial(p[2], 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FROM_VALUES)
def test_parameters_of_each_element(name, dtype):
    def fn(p):
        torch.manual_seed(5)
        return FROM_VALUES[name](p), torch.rand(3)

    check(fn, values(5, 6, seed=1).sigmoid().to(dtype), limit=12, partial=(), **EXACT)


def test_partial_parameters():
    def fn(p):
        torch.manual_seed(5)
        return torch.normal(p, 1.0), torch.multinomial(p.abs() + 1, 2)

    check(fn, values(5, 6), limit=20, **EXACT)


def test_large_draws():
    # From 16 elements on kernels draw in another order.
    def fn(p):
        torch.manual_seed(5)
        return torch.bernoulli(p), torch.normal(p, p), torch.multinomial(p, 40), torch.multinomial(p, 300, replacement=True)

    check(fn, torch.rand(37, 130), limit=6, partial=(), **EXACT)


def test_two_tensors_of_parameters_placed_apart():
    def fn(mean, deviation):
        torch.manual_seed(5)
        return torch.normal(mean, deviation), torch.rand(3)

    check(fn, values(5, 6), values(5, 6, seed=1).abs(), limit=15, **EXACT)


def test_wrong_probabilities_are_refused_wherever_they_are():
    mesh = init_device_mesh("cpu", (2,))
    for bad in (-1.0, float("nan"), float("inf")):
        p = torch.ones(4, 3)
        p[3, 1] = bad
        with pytest.raises((dtorch.RemoteError, RuntimeError)):
            torch.multinomial(place(p, mesh, (Shard(0),)), 1).to_torch()


def test_rows_of_probabilities_stay_where_they_are():
    mesh = init_device_mesh("cpu", (2, 2))
    p = place(values(64, 8).sigmoid(), mesh, (Shard(0), Replicate()))
    out = not_replicated(lambda: (torch.multinomial(p, 2), torch.bernoulli(p), torch.normal(p, p)), at_most_nbytes=0)
    assert all(t.placements == p.placements for t in out)


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
