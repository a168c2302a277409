"""The hot path: from an operator call to one ``Call`` instruction and the wrappers of its results.

A plan is found by (operator, class, specs, static arguments). Everything that is not a plain planned call, such as reading a
value, list operators or a mixed-in plain tensor, is handled by functions registered by operator (see ``special.py``).
"""

from __future__ import annotations

import cmath
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..core.placements import REPLICATE
from ..core.program import Call, Calls, Fetch
from ..core.spec import Spec
from ..sharding.call import has_out, is_view, leaves, replace_leaves, returned_args, returns_written, schema_of, written_args
from ..sharding.plan import Plan
from ..sharding.planner import Changing, plan_call
from ..sharding.probe import check_dtypes, check_overlap
from ..sharding.table import rule_for
from . import aliasing, moving, watch
from .client import Client, closed_error, current_client, running
from .decompose import decomposed
from .hotpath import Known, Ready, Value, fastpath
from .settling import settled_args
from .sites import LIBRARY, current_site, is_library
from .value import Group
from .wrapper import make_wrapper as _make
from .wrapper import wrap

Handler = Callable[[type, Any, tuple, dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
HANDLER_FAMILIES: list[tuple[Callable[[Any], bool], Handler]] = []

_mixed: Handler


def bind_mixed(handler: Handler) -> None:
    """Install what handles a call with plain tensors among its arguments."""
    global _mixed
    _mixed = handler


def operator_of(func: Any) -> Operator:
    """What dispatch knows of an operator."""
    operator = _operators.get(id(func))
    if operator is None:
        operator = _operators[id(func)] = Operator(func)
    return operator


def forget_operators(name: str) -> None:
    """Let plans of an operator be made anew: it has another rule."""
    known = [key for key, operator in _operators.items() if schema_of(operator.func).name == name]
    for key in known:
        del _operators[key]
    client = running()
    if client is not None:
        client.drop(known)


_frame = sys._getframe
_operators: dict[int, Operator] = {}
_WHOLE = frozenset((int, bool))
_SCALARS = frozenset((float, complex)) | _WHOLE


class Operator(Known):
    """What dispatch knows of an operator beforehand.

    Attributes:
        special: the result needs more than a fresh wrapper.
    """

    __slots__ = ("func", "returned", "special", "view", "written")

    def __init__(self, func: Any) -> None:
        rule = rule_for(func)
        self.func = func
        self.key = id(func)
        self.handler = HANDLERS.get(func) or next((h for matches, h in HANDLER_FAMILIES if matches(func)), None)
        self.changing = rule is not None and rule.changing
        self.written = written_args(func)
        self.view = is_view(func) and not self.written
        self.returned = returned_args(func) if returns_written(func) else ()
        # A random operator may draw nothing: attention without dropout, say.
        self.quick = torch.Tag.nondeterministic_seeded in func.tags and not has_out(func)
        self.special = bool(self.written or self.view)


class Entry(Ready):
    """A cached plan, ready to call."""

    __slots__ = ("plan",)

    def __init__(self, cls: Any, plan: Plan, number: int, operator: Operator) -> None:
        self.plan, self.number = plan, number
        self.bare = len(plan.outs) == 1 and plan.tree is ...
        self.aliases = operator.view and plan.aliases and self.bare
        self.nbytes = 0 if self.aliases else sum(out.nbytes for out in plan.outs)
        plain = self.bare or (type(plan.tree) is tuple and all(part is ... for part in plan.tree))
        plain = plain and not plan.comms and plan.how == "rule" and not plan.define.random
        self.simple = plain and (self.aliases or not operator.special)
        self.outs = tuple((s, (cls, s.shape, s.stride), {"dtype": s.dtype, "device": s.device}) for s in plan.outs)


def dispatch(cls: Any, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``Tensor.__torch_dispatch__``: issue one operator call and wrap its results."""
    operator = _operators.get(id(func)) or operator_of(func)
    if operator.handler is not None:
        return operator.handler(cls, func, args, kwargs or {})
    client = current_client()
    flat = flatten_call(cls, client, operator, args, kwargs or {})
    if flat is None:
        return _mixed(cls, func, args, kwargs or {})
    key, handles, scalars = flat
    entry: Entry = client.cache.get(key) or plan(client, operator, key, args, kwargs or {})
    # A thread of the autograd engine has no caller in Python.
    frame = _frame().f_back
    site = current_site() if frame is None or is_library(frame.f_code.co_filename) else (frame.f_code, frame.f_lasti)
    if not (entry.simple and entry.bare):
        return finish(cls, client, operator, entry, Call(entry.number, handles, [], scalars), site, args, kwargs or {})
    # The value comes first, for handing over may raise, and what was made must be freed then.
    (spec, sizes, options), value = entry.outs[0], Value(client, client.new_handle())
    client.call(Call(entry.number, handles, [value.handle], scalars), site, entry.nbytes)
    if entry.aliases:
        value.group = args[0]._value.shared_group()
        return wrap(cls, spec, value, args[0])
    out: Any = _make(*sizes, **options)
    out._spec, out._value = spec, value
    return out


def ready(value: Value, client: Client) -> None:
    """See that a value belongs to this session and, where it is a linked view, that it is up to date.

    Raises:
        SessionClosedError: its session is over.
    """
    if value.client is not client:
        raise closed_error()
    if value.group is not None and value.group.link is not None:
        aliasing.refresh(value.group)


def ordinary(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A planned call, past the operator's handler."""
    client, operator = current_client(), operator_of(func)
    flat = flatten_call(cls, client, operator, args, kwargs)
    if flat is None:
        return _mixed(cls, func, args, kwargs)
    key, handles, scalars = flat
    entry = client.cache.get(key) or plan(client, operator, key, args, kwargs)
    return finish(cls, client, operator, entry, Call(entry.number, handles, [], scalars), current_site(), args, kwargs)


def plan(client: Client, operator: Operator, key: tuple, args: tuple, kwargs: dict[str, Any]) -> Entry:
    """Make, define and cache the plan of a call."""
    cls = _tensor_class(args, kwargs)
    specs = replace_leaves((args, kwargs), cls, lambda t: t._spec) if cls is not None else (args, kwargs)
    if operator.changing:
        counter = iter(range(len(args) + len(kwargs)))
        specs = (tuple(_changing(a, counter) for a in specs[0]), {k: _changing(v, counter) for k, v in specs[1].items()})
    check_overlap(operator.func, *specs)
    made = plan_call(operator.func, *specs)
    check_dtypes(operator.func, *specs)
    entry = Entry(cls, made, client.define(made), operator)
    client.remember(key, entry)
    return entry


def _changing(value: Any, counter: Any) -> Any:
    return Changing(value, next(counter)) if changes(value) else value


def changes(value: Any) -> bool:
    """Whether an argument is a number that comes with each call.

    Zero and what is not finite have plans of their own: parts of a sum that are divided or multiplied by them do not add up.
    """
    kind = type(value)
    return kind in _SCALARS and bool(value) and (kind in _WHOLE or cmath.isfinite(value))


def _tensor_class(args: tuple, kwargs: dict[str, Any]) -> type | None:
    return next((type(t) for t in leaves((args, kwargs), torch.Tensor)), None)


def finish(
    cls: type,
    client: Client,
    operator: Operator,
    entry: Entry,
    call: Call,
    site: Any,
    args: tuple,
    kwargs: dict[str, Any],
    source: Any = None,
) -> Any:
    """Issue a call whose result is more than one fresh wrapper: several outputs, views, writes, unknown shapes.

    ``source`` draws a random call's numbers.
    """
    made = entry.plan
    written = aliasing.written_tensors(operator, args, kwargs)
    if source is None:
        otherwise = instead(operator, made, written, args, kwargs)
        if otherwise is not None:
            return otherwise
    watch.observe(made, site)
    outs = [Value(client, client.new_handle()) for _ in made.define.outputs]
    call = Call(call.plan, call.inputs, [v.handle for v in outs], call.scalars)
    if source is None:
        client.call(call, site, entry.nbytes)
    else:
        source.draw(client, call, site)
    for tensor in written:
        aliasing.wrote(tensor)
    if made.tree is None:
        return described(cls, client, operator, made, outs)
    base = args[0] if operator.view else None
    results = [wrap(cls, spec, value, base) for spec, value in zip(made.outs, outs, strict=True)]
    if operator.view:
        aliasing.connect(operator, made, results, args, moving.alias)
    if operator.returned:
        back = aliasing.named_tensors(operator, operator.returned, args, kwargs)
        return back[0] if len(back) == 1 else tuple(back)
    fresh = iter(results)
    return replace_leaves(made.tree, type(...), lambda _: next(fresh))


def instead(operator: Operator, made: Plan, written: list[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """A better way than the plan, taken: by parts that have rules, or on partial inputs already reduced; None without."""
    if len(made.define.meshes) > 1 and torch.is_grad_enabled():
        moving.send_gradients_home(leaves((args, kwargs), torch.Tensor))
    if made.how == "replicated":
        parts = decomposed(made, operator.func, args, kwargs)
        if parts is not None:
            watch.note(made.define.operator, "decomposition")
            return parts
    if made.settles and not operator.view:
        settled = settled_args(made.settles, written, args, kwargs, made.define.operator)
        if settled is not None:
            return operator.func(*settled[0], **settled[1])
    return None


def flatten_call(
    cls: type, client: Client, operator: Operator, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, list[int], list[Any]] | None:
    """Key, input handles and changing numbers of a call; None when a plain tensor is among its arguments."""
    key: list[Any] = [operator.key, cls]
    handles: list[int] = []
    scalars: list[Any] = []
    for a in args if not kwargs else (*args, *kwargs, *kwargs.values()):
        if operator.changing and changes(a):
            key.append(type(a))
            scalars.append(a)
        elif not _flatten(cls, client, a, key, handles):
            return None
    return tuple(key), handles, scalars


def described(cls: type, client: Client, operator: Operator, made: Plan, outs: list[Value]) -> Any:
    """Wrap outputs whose shapes depend on data: ask the worker for them."""
    mesh = made.mesh
    results = []
    for value in outs:
        (shape, stride, dtype), *_ = client.request(Fetch(value.handle, moving.mesh_info(mesh), [], describe=True))
        spec = Spec.make(mesh, (REPLICATE,) * mesh.ndim, shape, getattr(torch, dtype), stride)
        results.append(wrap(cls, spec, value))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _flatten(cls: Any, client: Client, a: Any, key: list[Any], handles: list[int]) -> bool:
    """Key and handles of an argument; False when it is or holds a plain tensor."""
    kind = type(a)
    if kind is cls:
        value = a._value
        if value.group is not None or value.client is not client:
            ready(value, client)
        key.append(a._spec)
        handles.append(value.handle)
        return True
    if isinstance(a, list | tuple):
        key.append(len(a))
        return all(_flatten(cls, client, item, key, handles) for item in a)
    if isinstance(a, torch.Tensor):
        return False
    if kind is complex or (kind is float and (a == 0 or a != a)):
        # Zeros of either sign are equal, and no NaN is: their text is what tells them.
        key += (repr(a), kind)
    else:
        key += (a, kind)
    return True


def entrance(cls: type) -> Any:
    """``Tensor.__torch_dispatch__``: the C path where it was built, which comes back here for all that it does not take."""
    if fastpath is None:
        return dispatch
    fastpath.bind(
        cls,
        slow=dispatch,
        calls=Calls,
        group=Group,
        make=_make,
        tensor=torch.Tensor,
        inference=torch.is_inference_mode_enabled,
        dtype=torch.get_default_dtype,
        wrap=wrap,
        library=LIBRARY,
        is_library=is_library,
        operators=_operators,
    )
    return fastpath.dispatch
