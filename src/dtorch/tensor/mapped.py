"""``local_map``: a Python function run on local tensors, with placements declared for what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import PlacementError, UsageError, four_parts
from ..core.mesh import DeviceMesh, checked_mesh, coordinates
from ..core.placements import REPLICATE, Partial, Placement, Placements
from ..core.program import Call, Fetch, PutFunction
from ..core.spec import Spec
from ..sharding.mapping import plan_mapped, varying_axes
from . import moving
from .client import Client, current_client
from .construct import spec_of
from .dispatch import ready
from .foreign import pickled
from .hotpath import Value
from .sites import current_site
from .tensor import Tensor
from .wrapper import wrap

Function = Callable[..., Any]


def local_map(
    fn: Function,
    in_placements: Sequence[Sequence[Placement] | None],
    out_placements: Sequence[Any],
    device_mesh: DeviceMesh | None = None,
) -> Callable[..., Any]:
    """A function of global tensors that runs ``fn`` on the local tensors of each device; differentiable.

    ``fn`` is first called with meta tensors of the local shapes, which tells the shapes of what it gives; where it cannot run
    on those, the workers are asked, which waits. It must not write to its arguments or draw
    random numbers, and it is called once for devices that
    hold the same. For a backward it is called again, recording. Gradients are those of the declared meaning: what is
    declared replicated is taken to be the same on every device.

    Args:
        fn: takes local tensors and other arguments, by position, and gives a tensor or a tuple of tensors.
        in_placements: for each argument its placements, one per mesh axis; None for one that is no tensor. Tensors that lie
            otherwise are redistributed; plain tensors are taken as replicated.
        out_placements: placements of the tensor it gives, or one entry for each tensor of the tuple. ``Partial`` means that
            the local results are to be reduced.
        device_mesh: that of the first global tensor unless given.

    Raises:
        UsageError: another number of arguments than placements, or a function that cannot be pickled in a session of worker
            processes.
        PlacementError: placements that do not fit, or local results that do not fit together.
    """
    single = not out_placements or not isinstance(out_placements[0], Sequence)
    outs = tuple(tuple(p) for p in ([out_placements] if single else out_placements))
    ins = tuple(None if p is None else tuple(p) for p in in_placements)

    def mapped(*args: Any) -> Any:
        _check_arguments(fn, args, ins)
        mesh = checked_mesh(device_mesh or next(a.device_mesh for a in args if isinstance(a, Tensor)))
        tensors = [_placed(a, mesh, p) for a, p in zip(args, ins, strict=True) if p is not None]
        rest = tuple(None if p is not None else a for a, p in zip(args, ins, strict=True))
        call = _Mapping(fn, _closed(fn, rest, ins), tuple(t._spec.placements for t in tensors), outs, mesh)
        results = _Apply.apply(call, *tensors)
        return results[0] if single else results

    return mapped


def _check_arguments(fn: Function, args: tuple, ins: tuple) -> None:
    if (
        any(p is not None for p in ins)
        and len(args) == len(ins)
        and all(isinstance(a, torch.Tensor) for a, p in zip(args, ins, strict=True) if p is not None)
    ):
        return
    kinds = [type(a).__name__ for a in args]
    rule = "one entry for each argument, one of them a tensor: placements for a tensor, None for anything else"
    raise UsageError(
        four_parts(f"{len(ins)} in_placements for arguments {kinds}", rule, f"local_map({_name(fn)}, ...)", "give one for each")
    )


def _placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Any:
    """An argument as the function takes it."""
    if isinstance(tensor, Tensor):
        return tensor.redistribute(mesh, placements)
    return Tensor(tensor, device_mesh=mesh).redistribute(placements=placements)


def _closed(fn: Function, rest: tuple, ins: tuple) -> Function:
    """A function of the tensors alone, which gives a tuple."""

    def run(*tensors: torch.Tensor) -> tuple:
        given, before = iter(tensors), torch.get_rng_state()
        result = fn(*[next(given) if p is not None else a for a, p in zip(rest, ins, strict=True)])
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise _random_error(fn)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    return run


def _random_error(fn: Function) -> UsageError:
    rule = "a function on local tensors draws none: its values would depend on the mesh, and its backward draw others"
    remedy = "draw them on global tensors, and give them to the function"
    return UsageError(four_parts(f"random numbers drawn by {_name(fn)}", rule, "local_map(fn, ...)", remedy))


def _name(fn: Function) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


Row = dict[tuple[int, ...], torch.Tensor]
"""A result at each coordinate, as a meta tensor."""


class _Mapping:
    """One call of a mapped function: what runs on the pieces, and the placements of its tensors."""

    def __init__(
        self, fn: Function, run: Function, ins: Sequence[Placements], outs: Sequence[Placements], mesh: DeviceMesh
    ) -> None:
        self.fn, self.run, self.ins, self.outs, self.mesh = fn, run, ins, outs, mesh

    def __call__(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Run it, outside autograd."""
        specs, client, name = [t._spec for t in tensors], current_client(), _name(self.fn)
        sent = pickled(self.run, self.fn, name, "local_map(fn, ...)") if client.sink.travels else self.run
        foretold = self._foretold(specs)
        for tensor in tensors:
            ready(tensor._value, client)
        key = ("local_map", name, *specs, None, *self.outs)
        entry = client.cache.get(key)
        if entry is None:
            made = plan_mapped(name, specs, self.outs, self.mesh)
            entry = moving.PlannedMove(made, client.define(made))
            client.remember(key, entry)
        function = Value(client, client.new_handle())
        client.emit(PutFunction(function.handle, sent))
        outs = [Value(client, client.new_handle()) for _ in self.outs]
        inputs = [function.handle, *[t._value.handle for t in tensors]]
        client.call(Call(entry.number, inputs, [v.handle for v in outs], []), current_site())
        rows = foretold or self._asked(client, outs)
        return tuple(wrap(Tensor, self._spec(n, row), v) for n, (row, v) in enumerate(zip(rows, outs, strict=True)))

    def _foretold(self, specs: Sequence[Spec]) -> list[Row] | None:
        """What it gives at each coordinate, from a run on meta tensors; None where it cannot run on those."""
        known: dict[tuple, tuple] = {}
        rows: dict[tuple[int, ...], tuple] = {}
        for coord in coordinates(self.mesh.shape):
            shapes = tuple(spec.local_box(coord)[1] for spec in specs)
            if shapes not in known:
                metas = [torch.empty(n, dtype=s.dtype, device="meta") for n, s in zip(shapes, specs, strict=True)]
                try:
                    with torch.no_grad():
                        known[shapes] = self.run(*metas)
                except UsageError:
                    raise
                except Exception:  # a kernel that has no meta form, or a fault that the run on the workers will tell
                    return None
            rows[coord] = known[shapes]
        for row in known.values():
            self._check_count(len(row))
        return [{c: row[number] for c, row in rows.items()} for number in range(len(self.outs))]

    def _check_count(self, count: int) -> None:
        if count != len(self.outs):
            rule = "one entry of out_placements for each tensor that the function gives"
            given = f"{count} tensors of {_name(self.fn)}, {len(self.outs)} out_placements"
            raise UsageError(four_parts(given, rule, "local_map(fn, ..., out_placements=...)", "give one for each"))

    def _asked(self, client: Client, outs: Sequence[Value]) -> list[Row]:
        """The same, from the workers."""
        rows = []
        for value, placements in zip(outs, self.outs, strict=True):
            axes = sorted(varying_axes(self.mesh, placements))
            told = client.request(Fetch(value.handle, moving.mesh_info(self.mesh), axes, describe=True))
            pieces = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, _, dtype in told]
            number = {c: n for n, c in enumerate(coordinates([self.mesh.shape[a] for a in axes]))}
            rows.append({c: pieces[number[tuple(c[a] for a in axes)]] for c in coordinates(self.mesh.shape)})
        return rows

    def _spec(self, number: int, local: Row) -> Spec:
        """The spec of one result, whose local shapes must be what its placements make of the whole."""
        spec = spec_of(local, self.mesh, self.outs[number], next(iter(local.values())))
        for coord, tensor in local.items():
            if tuple(tensor.shape) != spec.local_box(coord)[1] or tensor.dtype != spec.dtype:
                given = f"result {number} of {_name(self.fn)}: {tuple(tensor.shape)} {tensor.dtype} at {coord}"
                rule = f"placements {spec.placements} make it {spec.local_box(coord)[1]} {spec.dtype}"
                remedy = "declare how the results really lie"
                raise PlacementError(four_parts(given, rule, "local_map(fn, ..., out_placements=...)", remedy))
        return spec


class _Apply(torch.autograd.Function):
    """A mapped function. Its backward maps the function's own backward."""

    @staticmethod
    def forward(ctx: Any, call: _Mapping, *tensors: Any) -> tuple[Any, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        results = call(tensors)
        ctx.shapes = [r._spec for r in results]
        ctx.mark_non_differentiable(*[r for r in results if not (r.is_floating_point() or r.is_complex())])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        given = [i for i, grad in enumerate(grads) if grad is not None]
        if not wanted or not given:
            return (None,) * (1 + len(tensors))
        spread = {a for p in (*call.ins, *call.outs) for a in varying_axes(call.mesh, p)}
        backward = _Mapping(
            call.fn,
            _vjp(call.run, len(tensors), wanted, given, [_copies(call, call.outs[i], spread) for i in given]),
            (*call.ins, *[_whole(call.outs[i]) for i in given]),
            [_summed(call.ins[i], spread) for i in wanted],
            call.mesh,
        )
        placed = [grads[i].redistribute(call.mesh, _whole(ctx.shapes[i].placements)) for i in given]
        made = dict(zip(wanted, _Apply.apply(backward, *tensors, *placed), strict=True))
        return (None, *[made.get(i) for i in range(len(tensors))])


def _vjp(run: Function, count: int, wanted: Sequence[int], given: Sequence[int], copies: Sequence[int]) -> Function:
    """A function of inputs and gradients of results that gives the gradients of some inputs, on local tensors."""

    def backward(*local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nested = torch.is_grad_enabled()  # in the backward of a backward
        with torch.enable_grad():
            inputs = [
                t if nested and t.requires_grad else t.detach().requires_grad_(i in wanted) for i, t in enumerate(local[:count])
            ]
            results = run(*inputs)
            outs = [results[i] for i in given]
            sources = [inputs[i] for i in wanted]
            grads = [g / n if n > 1 else g for g, n in zip(local[count:], copies, strict=True)]
            used = [n for n, out in enumerate(outs) if out.requires_grad]
            if not used:
                return tuple(torch.zeros_like(t) for t in sources)
            pair = [outs[n] for n in used], sources, [grads[n] for n in used]
            found = torch.autograd.grad(*pair, allow_unused=True, create_graph=nested)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, sources, strict=True))

    return backward


def _whole(placements: Placements) -> Placements:
    """Placements of the gradient of a result: whole where the result is partial."""
    return tuple(REPLICATE if isinstance(p, Partial) else p for p in placements)


def _copies(call: _Mapping, placements: Placements, spread: set[int]) -> int:
    """How many devices computed a result that counts once: a replicated one, or one that is averaged."""
    count = 1
    for axis in spread:
        p = placements[axis]
        if isinstance(p, Partial) and p.reduce_op not in ("sum", "avg"):
            raise UsageError(
                four_parts(
                    f"the gradient of a result of {_name(call.fn)} declared {p}",
                    "only sums and averages are differentiated through a mapped function",
                    "backward() through local_map",
                    "declare the result sharded, and reduce it outside",
                )
            )
        count *= call.mesh.shape[axis] if p == REPLICATE or p == Partial("avg") else 1
    return count


def _summed(placements: Placements, spread: set[int]) -> Placements:
    """Placements of the gradient of an argument: a sum over the devices that used it, an average where it was partial."""
    made: list[Placement] = []
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            made.append(Partial("avg"))
        else:
            made.append(Partial() if p == REPLICATE and axis in spread else p)
    return tuple(made)
