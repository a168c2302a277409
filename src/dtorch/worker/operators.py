"""Operators by name, and the fastest Python callable that is exactly that operator.

Calling ``torch.ops.aten.add.Tensor`` costs 0.8 us more than ``torch.add``: the one goes through a boxed call, the other
through a generated binding. But a binding chooses an overload by its arguments, and may do more than one operator. So
a binding is taken only after it has been seen to dispatch to the very overload, with the very arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import InternalError
from ..core.operators import own
from . import attention


@cache
def resolve(name: str) -> torch._ops.OpOverload:
    """The overload of a name like ``aten::add.Tensor``.

    Raises:
        InternalError: this worker's PyTorch has no such operator.
    """
    qualified, _, overload = name.rpartition(".")
    namespace, _, base = qualified.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except (AttributeError, RuntimeError) as error:
        raise InternalError(f"PyTorch {torch.__version__} of this worker has no operator {name!r}") from error


def boxed(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The overload's own callable, without the ``OpOverload`` wrapper around it."""
    return STAND_INS.get(operator, operator._op)


@cache
def schema(operator: torch._ops.OpOverload) -> torch.FunctionSchema:
    """The operator's schema. ``_schema`` is the only place PyTorch keeps it."""
    return operator._schema


def fastest(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The fastest callable that with arguments like these runs exactly this overload. Nothing is executed."""
    plain = boxed(operator)
    if schema(operator).is_mutable:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
            # Its C++ goes on with the blanks of the operators in it, and may fall into them.
            return plain
        args, kwargs = tuple(map(_stand_in, args)), {k: _stand_in(v) for k, v in kwargs.items()}
    wanted = _dispatched(plain, args, kwargs) if operator not in STAND_INS else None
    if wanted is None:
        return plain
    for binding in _bindings(operator):
        if _same(_dispatched(binding, args, kwargs), wanted):
            return binding
    return plain


class Chooser:
    """Stands for an operator until its first call, then hands the fastest callable to ``settle``."""

    def __init__(self, operator: torch._ops.OpOverload, settle: Callable[[Callable[..., Any]], None]) -> None:
        self.operator = operator
        self.settle = settle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            # Nothing could be watched here, so the choice waits.
            return boxed(self.operator)(*args, **kwargs)
        pattern = (self.operator, _pattern(args), tuple(kwargs), _pattern(kwargs.values()))
        chosen = _chosen.get(pattern)
        if chosen is None:
            chosen = _chosen[pattern] = fastest(self.operator, args, kwargs)
        self.settle(chosen)
        return chosen(*args, **kwargs)


_chosen: dict[tuple, Callable[..., Any]] = {}
"""The choice for each operator and pattern of argument types: a binding picks its overload by types alone."""


def _pattern(args: Iterable[Any]) -> tuple:
    """Types of arguments; of a list its length and the types of its items; of a tensor whether it is 0-d."""
    return tuple([_kind(a) for a in args])


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Tensor, argument.ndim == 0
    return (list, _pattern(argument)) if isinstance(argument, list | tuple) else type(argument)


class _Watch(TorchDispatchMode):
    """Notes the operators that would run, and answers blanks instead of running them.

    Ending the call by an exception would do too, but the first one that crosses PyTorch's C++ reads megabytes of tables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo, which takes more than a second, at the first operator.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        blanks = [_blank(str(r.type)) for r in schema(func).returns]
        return blanks[0] if len(blanks) == 1 else tuple(blanks)


def _blank(kind: str) -> Any:
    """A value of a schema's type."""
    if kind.startswith("Tensor"):
        return torch.empty(0) if kind == "Tensor" else []
    return {"bool": False, "float": 0.0}.get(kind, 0)


def _stand_in(argument: Any) -> Any:
    """Tensors of the same kind in an argument's place: even an operator that is only watched counts its writes."""
    if isinstance(argument, Tensor):
        return argument.new_empty([0] * argument.ndim)
    return [_stand_in(a) for a in argument] if isinstance(argument, list | tuple) else argument


def _dispatched(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """The one operator that a call dispatches to, with its arguments; None where it is refused, or does more."""
    watch = _Watch()
    try:
        with watch:
            call(*args, **kwargs)
    except Exception:  # whatever a binding raises for arguments that it does not take
        return None
    return watch.seen[0] if len(watch.seen) == 1 else None


def _bindings(operator: torch._ops.OpOverload) -> Iterator[Callable[..., Any]]:
    """Generated bindings of an ATen operator's name."""
    namespace, _, base = schema(operator).name.partition("::")
    if namespace != "aten":
        return
    for home in (torch, torch.nn.functional, Tensor):
        binding = getattr(home, base, None)
        if isinstance(binding, types.BuiltinFunctionType | types.MethodDescriptorType):
            yield binding


def _same(a: Any, b: Any) -> bool:
    """Whether two dispatched calls, or parts of them, are the same in value and type; tensors by identity."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    return a == b or (a != a and b != b)


def _recurrent_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The CPU's recurrent layer; its kernel keeps what the gradient needs only where gradients are enabled."""
    with torch.enable_grad():
        *out, workspace = torch.ops.aten.mkldnn_rnn_layer.default._op(*args, **kwargs)
    return *out, out[0].new_empty(0, dtype=torch.uint8) if workspace is None else workspace


def _index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    """The CPU kernel fails on half precision products where a slice has one element, as a piece may: it is given two."""
    plain = torch.ops.aten.index_reduce.default._op
    single = x.ndim > 1 and reduce == "prod" and x.dtype.itemsize == 2 and x.numel() == x.shape[dim]
    if not single:
        return plain(x, dim, index, source, reduce, include_self=include_self)
    at = dim % x.ndim
    doubled = [t.unsqueeze(-1).expand(*t.shape, 2).contiguous() for t in (x, source)]
    return plain(doubled[0], at, index, doubled[1], reduce, include_self=include_self)[..., 0].contiguous()


def _index_reduce_(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As ``_index_reduce``, in place."""
    return x.copy_(_index_reduce(x, *args, **kwargs))


ALIGNED_NBYTES = 16
"""What the kernels of grouped products want rows and addresses to be multiples of."""


def _grouped_product(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """The kernels refuse matrices whose rows are not aligned, as those of pieces may not be: they are given wider ones.

    What is added to the summed dim is zero, or beyond the last group.
    """
    plain = torch.ops.aten._grouped_mm.default._op
    if _is_aligned(a) and _is_aligned(b):
        return plain(a, b, offs, bias, out_dtype).contiguous()
    unit = ALIGNED_NBYTES // a.element_size()
    inner, columns = (-n % unit if n else unit for n in b.shape[-2:])
    padded = torch.nn.functional.pad(a, (0, inner)), torch.nn.functional.pad(b, (0, columns, 0, inner))
    wider = [t.clone(memory_format=torch.contiguous_format) for t in padded]
    return plain(*wider, offs, bias, out_dtype)[..., : b.shape[-1]].contiguous()


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows or columns lie one after the other, each at an aligned place."""
    rows, columns, size = *matrix.stride()[-2:], matrix.element_size()
    step = rows if columns == 1 else columns if rows == 1 else 1
    beyond = max(1, matrix.shape[-1] if columns == 1 else matrix.shape[-2])
    fits = step >= beyond and step * size % ALIGNED_NBYTES == 0
    return matrix.numel() > 0 and fits and matrix.data_ptr() % ALIGNED_NBYTES == 0


def _weight_gradient(grad: Tensor, input: Tensor) -> Tensor:
    """The gradient of a linear layer's weight: (..., n) and (..., k) give (n, k)."""
    return grad.flatten(0, -2).t() @ input.flatten(0, -2)


STAND_INS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_layer,
    torch.ops.aten.index_reduce.default: _index_reduce,
    torch.ops.aten.index_reduce_.default: _index_reduce_,
    torch.ops.aten._grouped_mm.default: _grouped_product,
    own("weight_gradient"): _weight_gradient,
    **attention.STAND_INS,
}
"""Operators whose kernel reads more of its surroundings than its arguments or fails on pieces, and what is called instead.

Operators of our own have no kernel but this.
"""
