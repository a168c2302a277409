"""``register_rule``: sharding rules for operators of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ..core.errors import UsageError, four_parts
from ..sharding.call import schema_of
from ..sharding.rule import Rule
from ..sharding.table import register
from . import dispatch

RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])


def register_rule(op: Any, program: Callable[..., Any] | None = None) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator that makes a function the sharding rule of an operator, whose plans are made anew from then on.

    The function takes an ``OpCall`` (the call, with a ``Spec`` for each tensor) and gives ``Labels``, or None to decline
    that call; see "Extending" in the documentation for both. A rule claims that the operator computes, on pieces, the
    pieces of its result.

    Args:
        op: what ``torch.library.custom_op`` returned, an operator such as ``torch.ops.mylib.op``, or a name like
            ``"mylib::op"``.
        program: how to compute the operator in steps where its rule would have to move inputs.

    Raises:
        UsageError: no operator, or one of PyTorch's own, which have their rules.
    """
    name = _name_of(op)
    if name is None or name.startswith("aten::"):
        rule = "a rule belongs to an operator of your own, with a namespace of its own"
        remedy = "give what torch.library.custom_op returned, torch.ops.mylib.op, or 'mylib::op'"
        raise UsageError(four_parts(f"operator {op!r}", rule, "register_rule(op)", remedy))

    def decorate(function: RuleFunction) -> RuleFunction:
        register(name, Rule(function, program))
        dispatch.forget_operators(name)
        return function

    return decorate


def _name_of(op: Any) -> str | None:
    """The qualified name without overload, or None."""
    if isinstance(op, CustomOpDef):
        return op._qualname
    if isinstance(op, OpOverload):
        return schema_of(op).name
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    return op if isinstance(op, str) and op.count("::") == 1 else None
