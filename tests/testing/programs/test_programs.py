"""Random programs give what plain PyTorch gives; those that once did not are kept."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.testing.programs import check
from dtorch.testing.programs.batch import Settings, run_batch
from dtorch.testing.programs.draw import program
from dtorch.testing.programs.rows import ROWS
from dtorch.testing.programs.run import run


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_random_programs(random: Random) -> None:
    failure = run(program(random, ROWS, 2, 10)).failure
    assert failure is None, failure


def test_the_fixed_part_agrees() -> None:
    report = run_batch(range(250), Settings())
    assert [f.script for f in report.failures] == []
    assert report.programs == 250 and report.ran > 10 * report.programs and len(report.operators) > 200


KEPT = {
    "an expanded tensor of nothing is written": """
        a = given((1, 0), torch.float32, 74, [Replicate()])
        b = a.expand([2, -1])
        b.neg_()""",
    "an expanded tensor is copied to itself": """
        a = given((4,), torch.float32, 74, [Shard(0)])
        b = a.expand([3, -1])
        b.copy_(b)""",
    "the diagonal of a view is filled": """
        a = given((8,), torch.float32, 40, [Shard(0)])
        b = a.unfold(0, 6, 3)
        b.fill_diagonal_(0)
        c = given((5, 4), torch.float32, 26, [Shard(1)])
        d = c[1:].mT
        d.fill_diagonal_(1)""",
    "overlapping memory moves, and is viewed": """
        a = given((4, 2), torch.float32, 79, [Shard(1)])
        b = a.unfold(0, 2, 1)
        c = given((2,), torch.float32, 2, [Replicate()])
        d = torch.matmul(b, c)""",
    "an empty tensor that autograd keeps grows": """
        a = given((2, 6), torch.float32, 9, [Shard(1)], grad=True)
        b = given((0,), torch.float32, 68, [Replicate()])
        c = torch.einsum('ij,k->kij', a, b)
        d = given((2, 6), torch.float32, 9, [Replicate()])
        torch.eq(d, -3, out=b)""",
    "a base of an expanded copy is written": """
        a = given((1, 7), torch.bfloat16, 84, [Shard(0)])
        b = a.expand([3, 3, -1])
        a.add_(1)
        look()
        a[:, 2:4] = 3""",
    "an expanded partial is written through a slice": """
        a = given((2, 1), torch.int64, 88, [Partial('avg')])
        b = a.expand([3, 2, 4])
        b[0, :, 1] += -3""",
    "an expanded view of nothing is written": """
        a = given((2, 1), torch.float32, 88, [Partial()])
        b = a.expand([2, 0])
        b[0:1] = 3""",
    "a view of an expanded copy, whose base is written": """
        a = given((4,), torch.complex64, 53, [Shard(0)])
        b = a.expand([3, -1])
        c = b.select(1, -4)
        d = b[1]
        a.mul_(2)
        look()
        c[1:].add_(1)""",
    "autograd does not notice writes to data": """
        a = given((1, 4), torch.float32, 9, [Shard(1)], grad=True)
        b, c, d, e = a.unbind(1)
        d.data.mul_(2)
        f = e * e
        a.data.add_(1)
        g, h = grads([f], [a, e])""",
    "windows that do not overlap are written": """
        a = given((5,), torch.int64, 63, [Partial('avg')])
        b = a.unfold(0, 4, 2)
        b.cumsum_(-1)""",
    "a partial is divided by zeros": """
        a = given((7, 6), torch.bfloat16, 61, [Partial()])
        b = given((7, 6), torch.bfloat16, 25, [Replicate()])
        c = torch.div(a, b)
        d = a / 2""",
    "logical operators keep strides": """
        a = given((8, 2), torch.float32, 51, [Replicate()])
        b = given((1, 8), torch.float32, 46, [Replicate()])
        c = torch.logical_xor(b, a.mT)
        d = torch.copysign(b, a.mT)
        e = torch.logaddexp(b, a.mT)""",
    "variances of integers are refused": """
        a = given((3,), torch.int64, 1, [Shard(0)])
        b = a.var()
        c = a.std(0, correction=0)""",
    "extremes of nothing are refused": """
        a = given((3, 0), torch.float32, 25, [Shard(1)])
        b = a.max()
        c = a.argmin()
        d = a.bool().trace()""",
    "logsumexp of nothing": """
        a = given((4, 0, 7), torch.float32, 83, [Shard(2)])
        b = a.logsumexp((0, 1, 2))
        c = a.logsumexp((1, 2), keepdim=True)""",
    "an extreme of no complex numbers": """
        a = given((5, 0, 6), torch.complex64, 24, [Shard(2)])
        b = a.amax(-1)""",
    "an out= that shares memory with what it was cut from": """
        a = given((5,), torch.float32, 86, [Shard(0)])
        b = a[1:4]
        c = given((2,), torch.float32, 17, [Replicate()])
        torch.remainder(c, -1, out=a)
        b.add_(1)
        d = given((4,), torch.float32, 3, [Partial()])
        torch.sum(d, 0, out=a)""",
    "an out= that is a view of what nobody has": """
        a = given((0, 0, 2), torch.complex64, 20, [Replicate()])
        b = given((3, 2), torch.complex64, 94, [Replicate()])
        c = given((3,), torch.complex64, 70, [Replicate()])
        d = torch.nn.functional.linear(a, b, c)
        torch.sum(b, 0, out=d)""",
    "sums and products in the dtype of out=": """
        a = given((5, 3), torch.float32, 20, [Partial()])
        b = given((3,), torch.bool, 1, [Shard(0)])
        torch.sum(a, 0, out=b)
        c = given((0,), torch.int64, 1, [Shard(0)])
        torch.prod(a, 1, out=c)
        d = given((4, 4), torch.complex64, 1, [Shard(1)])
        torch.cumsum(a, 1, out=d)""",
    "an out= of another dtype is refused": """
        a = given((5, 3), torch.float32, 20, [Shard(0)])
        b = given((3,), torch.float64, 1, [Shard(0)])
        torch.amax(a, 0, out=b)
        c = given((5, 3), torch.float64, 1, [Shard(0)])
        torch.neg(a, out=c)""",
    "an empty piece of an expanded gradient": """
        a = given((1,), torch.complex64, 82, [Shard(0)], grad=True)
        b = torch.view_as_real(a)
        c = move(b, [Replicate()])
        c.sum().backward()
        d = a.grad""",
}


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("name", KEPT)
def test_what_once_failed(name: str, mesh: int) -> None:
    check((mesh,), KEPT[name])
