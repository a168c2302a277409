"""Views alias their base: a write through either is seen by the other, whatever the placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import check, place, placements_of, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESHES = ((2,), (3,), (2, 2))

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda z: z.view(-1),
    "reshape": lambda z: z.reshape(2, 12),
    "transpose": lambda z: z.transpose(0, 1),
    "t": lambda z: z.t(),
    "permute": lambda z: z.permute(1, 0),
    "slice": lambda z: z[1:5:2],
    "negative slice": lambda z: z[-2:, 1:],
    "select": lambda z: z[3],
    "select of a column": lambda z: z.select(1, -1),
    "unbind": lambda z: z.unbind(0)[2],
    "split": lambda z: z.split(4)[1],
    "chunk": lambda z: z.chunk(3, 1)[1],
    "split with sizes": lambda z: z.split([1, 5])[1],
    "diagonal": lambda z: z.diagonal(1),
    "unsqueeze and squeeze": lambda z: z.unsqueeze(1).squeeze(1),
    "narrow": lambda z: z.narrow(0, 2, 3),
    "expand of a slice": lambda z: z[:, :1].squeeze(1),
    "unfold": lambda z: z.unfold(0, 2, 3),
    "as_strided": lambda z: z.as_strided((2, 3), (8, 1), 2),
    "view of view": lambda z: z.view(3, 8)[1:].t()[2],
    "flatten": lambda z: z.flatten(),
    "unflatten": lambda z: z.unflatten(0, (2, 3))[1],
    "bits": lambda z: z.view(torch.int32).view(torch.float32),
    "detach": lambda z: z.detach(),
    "swapdims": lambda z: z.swapaxes(0, 1)[0],
    "movedim": lambda z: z.movedim(0, 1),
    "tensor_split": lambda z: z.tensor_split(4)[1],
    "hsplit": lambda z: z.hsplit(2)[1],
    "view_as": lambda z: z.view_as(torch.empty(4, 6)),
    "real of complex": lambda z: torch.view_as_real(torch.view_as_complex(z.view(6, 2, 2)))[..., 0],
}

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda v: v.fill_(7),
    "mul_": lambda v: v.mul_(3),
    "zero_": lambda v: v.zero_(),
}


def through_view(view: Callable, write: Callable) -> Callable:
    def program(x: torch.Tensor) -> tuple:
        z = x.clone()
        v = view(z)
        write(v)
        return z, v

    return program


def through_base(view: Callable, write: Callable) -> Callable:
    def program(x: torch.Tensor) -> tuple:
        z = x.clone()
        v = view(z)
        write(z)
        first = v.clone()
        z[2:4] += 1
        return z, v, first

    return program


def back_and_forth(view: Callable, write: Callable) -> Callable:
    def program(x: torch.Tensor) -> tuple:
        z = x.clone()
        v, w = view(z), view(z)
        write(v)
        z.add_(1)
        write(w)
        v.sub_(2)
        return z, v, w

    return program


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("program", [through_view, through_base, back_and_forth])
def test_a_write_is_seen_by_all(view: Callable, program: Callable) -> None:
    check(program(view, WRITES["mul_"]), values(6, 4), rule=False, limit=30)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_kinds_of_writes(write: Callable) -> None:
    for view in (VIEWS["slice"], VIEWS["diagonal"], VIEWS["view"], VIEWS["select"]):
        check(back_and_forth(view, write), values(6, 4), rule=False, limit=12)


PATTERNS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda z: z.__setitem__((0, 0), 5.0),
    "row": lambda z: z.__setitem__(1, torch.arange(4.0)),
    "column": lambda z: z.__setitem__((slice(None), 2), 1.5),
    "block": lambda z: z.__setitem__((slice(1, 3), slice(0, 2)), z[3:5, 2:].clone()),
    "step": lambda z: z.view(-1).__setitem__(slice(None, None, 5), 9.0),
    "ellipsis": lambda z: z.__setitem__((..., -1), 0.0),
    "mask": lambda z: z.__setitem__(z > 0, -1.0),
    "index list": lambda z: z.__setitem__([0, 5], 2.0),
    "row times": lambda z: z[1].mul_(3),
    "diagonal fill": lambda z: z.diagonal().fill_(2),
    "transposed row": lambda z: z.t()[3].zero_(),
    "flat add": lambda z: z.view(-1)[::5].add_(1),
    "augmented": lambda z: z[2:].__iadd__(10),
    "halves": lambda z: [h.mul_(i + 2) for i, h in enumerate(z.chunk(2))],
    "rows in a loop": lambda z: [row.add_(i) for i, row in enumerate(z)],
    "column of a block": lambda z: z[1:4].t()[1].copy_(torch.ones(3)),
    "swap": lambda z: z[0].copy_(z[5].clone()),
    "view then base then view": lambda z: (z[0].fill_(1), z.mul_(2), z[0].add_(1)),
    "masked fill of a view": lambda z: z[:, 1:3].masked_fill_(z[:, 1:3] > 0, 4.0),
    "scatter into a view": lambda z: z[1:4].scatter_(0, torch.tensor([[0, 2, 1, 0]]), 8.0),
    "index_put into a view": lambda z: z.t().index_put_((torch.tensor([0, 3]),), torch.tensor(6.0)),
    "sort into place": lambda z: z[:, 0].copy_(z[:, 0].sort().values),
}


def _applied(pattern: Callable) -> Callable:
    def program(x: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        pattern(z)
        return z

    return program


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_view_write_patterns(pattern: Callable) -> None:
    check(_applied(pattern), values(6, 4), rule=False, limit=40)


def test_in_place_keeps_the_destination_s_placement() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for p in placements_of(mesh, values(6, 4)):
        z = place(values(6, 4), mesh, p)
        before = z._spec
        for write in (
            lambda t: t.add_(1),
            lambda t: t.copy_(torch.ones(4)),
            lambda t: t.mul_(dtorch.ones(6, 1, device_mesh=mesh)),
            lambda t: t.clamp_(-1, 1),
            lambda t: t.cumsum_(0),
            lambda t: t.masked_fill_(torch.eye(6, 4).bool(), 0),
            lambda t: t[0].zero_(),
            lambda t: torch.sum(t[None].clone(), 0, out=t),
        ):
            write(z)
            assert z._spec is before


def test_views_and_bases_die_in_any_order() -> None:
    mesh = init_device_mesh("cpu", 2)
    z = place(values(6, 4), mesh, (Shard(0),))
    v = z.view(-1)[::5]
    del z
    v.mul_(2)
    assert torch.equal(v.to_torch(), values(6, 4).view(-1)[::5] * 2)
    z = place(values(6, 4), mesh, (Shard(0),))
    z.t()[0].zero_()
    assert z[:, 0].abs().sum().item() == 0


def test_a_view_of_a_linked_view_reaches_the_base() -> None:
    for mesh_shape in MESHES:
        mesh = init_device_mesh("cpu", mesh_shape)
        z, expected = place(values(6, 4), mesh, (Shard(1), *[R] * (mesh.ndim - 1))), values(6, 4)
        for t in (z, expected):
            deep = t.view(-1).view(3, 8)[1:].t()[2]
            deep.fill_(9)
            t.mul_(2)
            deep.add_(1)
        assert torch.equal(z.to_torch(), expected) and torch.equal(deep, expected.view(3, 8)[1:].t()[2])


def test_in_place_metadata_operators() -> None:
    def program(x: torch.Tensor) -> tuple:
        a, b, c, d, e = x.clone(), x.clone()[:, :1], x.clone(), x.clone(), x.clone()
        shared = a.view(-1)
        a.t_().mul_(2)
        b.squeeze_(1).add_(1)
        c.unsqueeze_(0).squeeze_()
        d.transpose_(0, 1)
        d.swapaxes_(0, 1)
        e.as_strided_((4, 6), (1, 4))
        e.zero_()
        return a, shared, b, c, d, e, a.shape, b.stride(), c.ndim

    check(program, values(6, 4), rule=False, limit=40)


def test_in_place_metadata_operators_keep_identity_and_autograd() -> None:
    x = place(values(6, 1), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    z = x * 2
    assert z.squeeze_(1) is z and z.shape == (6,)
    (z * torch.arange(6.0)).sum().backward()
    assert torch.equal(x.grad.to_torch(), 2 * torch.arange(6.0).view(6, 1))
    y = place(values(2, 3), init_device_mesh("cpu", 2), (Shard(0),))
    y.t_()
    assert y.shape == (3, 2) and y.stride() == (1, 3) and y.placements == (Shard(1),)
    y.resize_(6)
    assert y.shape == (6,)


def test_resize_and_set() -> None:
    x = place(values(6), init_device_mesh("cpu", 2), (Shard(0),))
    x.resize_(2, 3)
    assert x.shape == (2, 3) and torch.equal(x.to_torch(), values(6).view(2, 3))


def test_a_write_that_cannot_be_carried_back_is_an_error_not_a_loss() -> None:
    mesh = init_device_mesh("cpu", 2)
    z = place(values(6), mesh, (Shard(0),))
    windows = z.unfold(0, 3, 1)
    before = z.to_torch()
    try:
        windows.zero_()
    except (UsageError, RuntimeError):
        assert torch.equal(z.to_torch(), before)
    else:
        assert z.abs().sum().item() == 0


def test_expanded_memory_cannot_be_written_as_in_torch() -> None:
    z = place(values(1, 4), init_device_mesh("cpu", 2), (Shard(1),))
    with pytest.raises((RuntimeError, UsageError)):
        z.expand(3, 4).add_(1)
        z.to_torch()


def test_a_clone_is_no_view() -> None:
    def program(x: torch.Tensor) -> tuple:
        z = x.clone()
        copies = [z.clone(), z[1:].clone(), z.t().contiguous(), z.reshape(4, 6).contiguous().clone(), z.t().reshape(-1)]
        z.zero_()
        return (z, *copies)

    check(program, values(6, 4), rule=False, limit=20)


def test_writes_through_autograd_views() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        z = x * 1
        z[1:3].mul_(2)
        z.t()[0].add_(x[:, 1])
        z.view(-1)[::5].zero_()
        return z

    check(program, values(6, 4), grad=True, rule=False, limit=40)


def test_in_place_random_and_partial_destinations() -> None:
    mesh = init_device_mesh("cpu", 2)
    z = place(values(6), mesh, (Partial(),))
    z.add_(1).mul_(2)
    assert torch.equal(z.to_torch(), (values(6) + 1) * 2) and z.placements == (Partial(),)
    z[2:4].fill_(5)
    assert z.tolist()[2:4] == [5.0, 5.0]
    z.exp_()
    assert torch.allclose(z[:2].to_torch(), ((values(6)[:2] + 1) * 2).exp())


@pytest.mark.parametrize("placement", [R, Shard(0)], ids=str)
def test_out_is_resized_and_cast_as_in_torch(placement: object) -> None:
    mesh = init_device_mesh("cpu", 2)
    x = place(values(6, 4), mesh, (Shard(0),))
    out = dtorch.empty(0, device_mesh=mesh, placements=[placement])
    assert torch.add(x, 1, out=out) is out
    assert torch.equal(out.to_torch(), values(6, 4) + 1)
    assert dtorch.ones(0, device_mesh=mesh, placements=[placement]).add(1).shape == (0,)
    wide = dtorch.empty(6, 4, dtype=torch.float64, device_mesh=mesh, placements=[placement])
    assert torch.equal(torch.mul(x, 2, out=wide).to_torch(), values(6, 4).double() * 2) and wide.placements == (placement,)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.mul(x, 2, out=dtorch.empty(6, 4, dtype=torch.int64, device_mesh=mesh))
    top, where = torch.max(x, 1, out=(dtorch.empty(6, device_mesh=mesh), dtorch.empty(0, dtype=torch.int64, device_mesh=mesh)))
    assert torch.equal(top.to_torch(), values(6, 4).max(1).values) and torch.equal(where.to_torch(), values(6, 4).max(1).indices)


def test_set_shares_memory() -> None:
    mesh = init_device_mesh("cpu", 2)
    x, y = place(values(6), mesh, (Shard(0),)), dtorch.zeros(2, device_mesh=mesh)
    y.set_(x)
    x.mul_(2)
    assert torch.equal(y.to_torch(), values(6) * 2) and y.shape == (6,)


def test_memory_of_this_process_is_refused_not_crashed() -> None:
    x = place(values(6), init_device_mesh("cpu", 2), (Shard(0),))
    uses = [
        lambda: x.share_memory_(),
        lambda: torch.from_dlpack(x),
        lambda: x.untyped_storage(),
        lambda: x.storage(),
        lambda: torch.multiprocessing.reductions.reduce_tensor(x),
        lambda: x.apply_(abs),
        lambda: x.map_(x, max),
        lambda: x.map2_(x, x, max),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"to_torch\(\)"):
            use()
    assert not hasattr(x, "__cuda_array_interface__") and not x.is_shared()


def test_there_is_no_pointer_here() -> None:
    # Not an error: libraries compare pointers to know whether memory is shared or aligned, torch.nn.LSTM among them.
    assert place(values(6), init_device_mesh("cpu", 2), (Shard(0),)).data_ptr() == 0
