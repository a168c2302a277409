"""Results lie in memory as PyTorch's kernels lay them, or a view that plain PyTorch allows would fail on the pieces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.core.placements import Placements
from dtorch.core.spec import Spec
from dtorch.sharding.infer import infer_outputs
from dtorch.sharding.metakernels import LAID_OUT_BY_KERNELS, ROW_MAJOR

ONE = init_device_mesh("cpu", 1)
SHAPE = (4, 5, 3)
ORDERS = list(permutations(range(3)))
aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

FURTHER: dict[str, list[Any]] = {
    "_softmax_backward_data": [torch.Tensor, torch.Tensor, 1, torch.float32],
    "_log_softmax_backward_data": [torch.Tensor, torch.Tensor, 1, torch.float32],
    "native_layer_norm_backward": [
        *(torch.Tensor, torch.Tensor, [3], torch.rand(4, 5, 1), torch.rand(4, 5, 1), torch.rand(3), torch.rand(3)),
        [True, True, True],
    ],
    "_fft_r2c": [torch.Tensor, [1], 0, True],
    "nonzero_static": [torch.Tensor],
    "div.Tensor_mode": [torch.Tensor, torch.Tensor],
}
"""Arguments of operators that take more than tensors of one size and numbers; ``torch.Tensor`` stands for such a tensor."""

OTHERS = {*FURTHER, *LAID_OUT_BY_KERNELS}

KEYWORDS: dict[str, dict[str, Any]] = {"nonzero_static": {"size": 7}, "div.Tensor_mode": {"rounding_mode": "floor"}}
DEFAULTS: dict[str, Any] = {"number": 2.0, "float": 2.0, "int": 1, "bool": False, "Optional[Tensor]": None}


def laid(order: tuple[int, ...]) -> torch.Tensor:
    """Numbers with their dims in an order in memory."""
    return torch.rand([SHAPE[d] for d in order]).permute([order.index(d) for d in range(3)])


def order_of(tensor: Any) -> tuple[int, ...]:
    """Its dims of several elements, from the largest stride to the smallest."""
    stride = tensor.stride() if callable(tensor.stride) else tensor.stride
    return tuple(sorted((d for d, n in enumerate(tensor.shape) if n > 1), key=lambda d: -stride[d]))


def elementwise() -> Iterator[OpOverload]:
    """PyTorch's elementwise operators and gradients that make something new, and are not made of other operators."""
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            alike = torch.Tag.pointwise in func.tags or _name(func) in OTHERS or "_backward" in str(func)
            tensors = any("Tensor" in str(a.type) for a in func._schema.arguments)
            if alike and tensors and not writes and not func.has_kernel_for_dispatch_key(COMPOSITE):
                yield func


def _name(func: OpOverload) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _pattern(func: OpOverload) -> list[Any] | None:
    """Positional arguments, ``torch.Tensor`` for a tensor of the common size; None where they cannot be told."""
    if _name(func) in FURTHER:
        return FURTHER[_name(func)]
    made: list[Any] = []
    for argument in func._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind == "Tensor":
            made.append(torch.Tensor)
        elif argument.has_default_value():
            made.append(argument.default_value)
        elif kind in DEFAULTS:
            made.append(DEFAULTS[kind])
        else:
            return None
    return made if torch.Tensor in made else None


def calls(func: OpOverload) -> Iterator[list[Any]]:
    """Positional arguments with the first two tensors in all orders."""
    pattern = _pattern(func)
    count = min((pattern or []).count(torch.Tensor), 2)
    for orders in product(ORDERS, repeat=count) if pattern else ():
        given = iter((*orders, *[ORDERS[0]] * len(pattern or ())))
        yield [laid(next(given)) if a is torch.Tensor else a for a in pattern or ()]


def ran(func: OpOverload, arguments: list[Any]) -> list[torch.Tensor] | None:
    """The results of a call, or None where PyTorch refuses it."""
    try:
        return [t for t in tree_leaves(func(*arguments, **KEYWORDS.get(_name(func), {}))) if isinstance(t, torch.Tensor)]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def test_every_elementwise_result_is_laid_out_as_by_its_kernel() -> None:
    wrong, asked = set(), set()
    for func in elementwise():
        for arguments in calls(func):
            results = ran(func, arguments)
            if results is None or func.is_view:
                break
            specs = tree_map(lambda a: spec_of(a) if isinstance(a, torch.Tensor) else a, arguments)
            inferred = infer_outputs(func, tuple(specs), KEYWORDS.get(_name(func), {}))
            if inferred is not None:
                asked.add(func._schema.name.removeprefix("aten::"))
                wrong |= {_name(func) for m, t in zip(inferred[0], results, strict=True) if order_of(m) != order_of(t)}
    assert not wrong
    assert len(asked) > 100 and asked >= {*LAID_OUT_BY_KERNELS, *ROW_MAJOR} - {"glu_backward"}


def spec_of(tensor: torch.Tensor) -> Spec:
    return Spec.make(ONE, (Replicate(),), tensor.shape, tensor.dtype, tensor.stride())


PLACED = [
    ((1,), (Replicate(),)),
    ((3,), (Shard(0),)),
    ((3,), (Shard(2),)),
    ((2, 2), (Shard(1), Shard(0))),
]


@pytest.mark.parametrize(("shape", "placements"), PLACED)
@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("name", ["softplus", "hardswish", "elu", "hardtanh", "logsigmoid", "layer_norm", "log_softmax"])
def test_a_gradient_can_be_viewed_as_in_plain_pytorch(
    name: str, order: tuple[int, ...], shape: tuple[int, ...], placements: Placements
) -> None:
    mesh = init_device_mesh("cpu", shape)
    function = getattr(torch.nn.functional, name)
    further = {"layer_norm": [(3,)], "log_softmax": [1]}.get(name, [])

    def gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return torch.autograd.grad(function(x, *further), x, grad)[0]

    back = [order.index(d) for d in range(3)]
    x, there = laid(ORDERS[0]), laid(order).permute(order)
    plain = gradient(x.clone(), there.permute(back))
    dims = order_of(plain)
    moved = [Shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements]
    grad = dtorch.Tensor(there, device_mesh=mesh, placements=moved).permute(back)
    found = gradient(dtorch.Tensor(x, device_mesh=mesh, placements=placements), grad)
    assert order_of(found) == dims
    torch.testing.assert_close(found.permute(dims).view(-1).to_torch(), plain.permute(dims).view(-1))
