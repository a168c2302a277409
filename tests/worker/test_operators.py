"""The fastest callable of an operator is exactly that operator."""

from __future__ import annotations

import pytest
import torch

from dtorch.core.errors import InternalError
from dtorch.worker.operators import Chooser, _Watch, boxed, fastest, resolve, schema

A, B = torch.randn(4, 4), torch.randn(4, 4)

WITH_BINDING = [
    ("aten::add.Tensor", (A, B), {}, torch.add),
    ("aten::add.Tensor", (A, 2.5), {"alpha": 2}, torch.add),
    ("aten::mm.default", (A, B), {}, torch.mm),
    ("aten::view.default", (A, [16]), {}, torch.Tensor.view),
    ("aten::cat.default", ([A, B], 1), {}, torch.cat),
    ("aten::gelu.default", (A,), {"approximate": "tanh"}, torch.nn.functional.gelu),
    ("aten::_to_copy.default", (A,), {"dtype": torch.float64}, None),
    ("aten::mul_.Tensor", (A.clone(), B), {}, torch.Tensor.mul_),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "binding"), WITH_BINDING)
def test_the_binding_is_taken_and_gives_the_same_bits(name: str, args: tuple, kwargs: dict, binding: object) -> None:
    operator = resolve(name)
    chosen = fastest(operator, args, kwargs)
    assert binding is None or chosen is binding
    clones = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    assert torch.equal(chosen(*args, **kwargs), operator(*clones, **kwargs))


def test_a_binding_that_would_run_another_overload_is_refused() -> None:
    # torch.Tensor.mul_(tensor, number) runs mul_.Tensor
    operator = resolve("aten::mul_.Scalar")
    assert fastest(operator, (A, 2.0), {}) is boxed(operator)


def test_an_operator_that_decomposes_gives_the_same_bits() -> None:
    operator = resolve("aten::matmul.default")
    assert torch.equal(fastest(operator, (A, B), {})(A, B), operator(A, B))


def test_choosing_runs_nothing() -> None:
    written = torch.zeros(3)
    fastest(resolve("aten::add_.Tensor"), (written, 1.0), {})
    assert written.tolist() == [0, 0, 0] and written._version == 0


def test_the_chooser_settles_at_its_first_call() -> None:
    settled: list = []
    result = Chooser(resolve("aten::add.Tensor"), settled.append)(A, B)
    assert settled == [torch.add] and torch.equal(result, A + B)


def test_the_choice_waits_where_nothing_can_be_watched() -> None:
    settled: list = []
    chooser = Chooser(resolve("aten::add_.Tensor"), settled.append)
    written = torch.zeros(2)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
        chooser(written, 1.0)
    assert settled == [] and written.tolist() == [1, 1]
    chooser(written, 1.0)
    assert settled == [torch.Tensor.add_] and written.tolist() == [2, 2]


def test_watching_does_not_import_the_compiler() -> None:
    assert not hasattr(_Watch.__torch_dispatch__, "__wrapped__"), "PyTorch wrapped it, and will import torch._dynamo"


def test_arguments_that_do_not_fit_raise_what_pytorch_raises() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Chooser(resolve("aten::mm.default"), lambda _: None)(A, torch.randn(3, 3))


def test_custom_operators_are_called_as_they_are() -> None:
    with torch.library._scoped_library("dtorch_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        operator = resolve("dtorch_test::twice.default")
        assert torch.equal(Chooser(operator, lambda _: None)(A), A * 2)
        resolve.cache_clear()


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(InternalError, match=r"aten::nonesuch\.default"):
        resolve("aten::nonesuch.default")


def test_private_attributes_are_still_what_they_were() -> None:
    operator = torch.ops.aten.add.Tensor
    assert torch.equal(boxed(operator)(A, B), A + B)
    assert [a.name for a in schema(operator).arguments] == ["self", "other", "alpha"]
