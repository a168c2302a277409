"""``load_pretrained``: a module on a mesh, each of its pieces read from files by the worker that keeps it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Partial
from ...core.program import Read
from ...core.spec import Spec
from ...tensor.filling import Filling, fill
from ...tensor.tensor import Tensor
from ..apply import lay_out, settle
from ..axes import check_axes
from ..fsdp import check_zero
from ..layout import Layout
from ..sources import PlanArgument
from . import naming
from .building import Source, bare_tensors, built, initial
from .files import Stored, stored_in
from .problem import problem
from .progress import bar
from .regions import Region

BUNCH_NBYTES = 64 << 20
"""Bytes of weights per instruction, after which the progress bar moves."""


def load_pretrained(
    module_or_class: Source,
    path: str | PathLike[str],
    mesh: DeviceMesh,
    plan: PlanArgument = None,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool | None = None,
    sp: bool = False,
    zero: int = 3,
    virtual_stages: int = 1,
) -> nn.Module:
    """Distribute a module over a mesh, as ``parallelize`` does, with weights from safetensors files.

    Workers read from the files themselves, each piece once and nothing but what is kept; the process that calls never
    holds a weight. Nothing of the module changes unless all of it was read.

    Args:
        module_or_class: a Hugging Face class (``LlamaForCausalLM``, ``AutoModelForCausalLM``), built after the folder's
            ``config.json``; or a module, made under ``torch.device("meta")`` or not, whose weights are replaced.
        path: a folder with ``model.safetensors``, or with several files and their index; or one such file. Workers open
            it under the same path.
        mesh, plan, sp, zero, virtual_stages: as for ``parallelize``.
        dtype: of floating-point weights; that of the configuration, or of the module given, when omitted.
        strict: refuse files that hold more or less than the module's weights. Otherwise what is more is passed over, and
            what is missing stays as the module given has it; what it has no data for is refused still.
        progress: show a progress bar on stderr; when omitted, if that is a terminal.

    Returns:
        The module, distributed; one built of a class is in evaluation mode.

    Raises:
        UsageError: files that are not there or damaged, or weights that are missing, unexpected or of another shape, all
            named at once; and as for ``parallelize``.
        PlacementError: see ``parallelize``.
        RemoteError: a worker could not read a file.
    """
    check_axes(mesh)
    check_zero(zero)
    place = Path(path)
    stored = stored_in(place)
    module = built(module_or_class, place, dtype, stored)
    named = naming.match(module, stored)
    layout, rows = lay_out(module, mesh, plan, sp, zero, virtual_stages)
    names = _by_main(layout)
    held = {main: next((n for n in every if n in named.regions), None) for main, every in names.items()}
    own = _kept(module, [main for main, name in held.items() if name is None and not named.unfit.keys() & names[main]], strict)
    _check(module, layout, named, own.missing, strict)
    specs = _specs(module, layout, dtype if module is module_or_class else None)
    jobs = {main: _Job(specs[main], named.regions[name]) for main, name in held.items() if name is not None}
    twice = {n: jobs[main] for main, every in names.items() for n in every if n != held[main] and n in named.regions}
    made = _read(stored, {**jobs, **{n: replace(j, region=named.regions[n]) for n, j in twice.items()}}, progress)
    _check_twice({n: (made[n], made[layout.tied.get(n, n)]) for n in twice}, names)
    made |= {n: _placed(t.detach(), specs[n]) for n, t in own.values.items()}
    settle(module, replace(layout, specs=specs), rows, lambda name, old, spec: made[layout.tied.get(name, name)], zero)
    if named.conversions is not None:
        module._weight_conversions = named.conversions  # type: ignore[assignment]
    return module


@dataclass(frozen=True)
class _Job:
    """A tensor to be read: how it will lie, and where it is in the files."""

    spec: Spec
    region: Region


@dataclass(frozen=True)
class _Own:
    """Tensors that the files lack: what the module has or computes by itself, and the names of the rest."""

    values: Mapping[str, torch.Tensor]
    missing: Sequence[str]


def _by_main(layout: Layout) -> dict[str, list[str]]:
    """All names of each tensor, by the one it is placed under."""
    names: dict[str, list[str]] = {name: [name] for name in layout.specs if name not in layout.tied}
    for name, main in layout.tied.items():
        names[main].append(name)
    return names


def _kept(module: nn.Module, absent: Sequence[str], strict: bool) -> _Own:
    tensors = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    free = naming.non_persistent(module) | naming.not_needed(module, absent) if strict else set(absent)
    allowed = [name for name in absent if name in free]
    values = {name: tensors[name] for name in allowed if not tensors[name].is_meta}
    values |= initial(module, [name for name in allowed if name not in values])
    return _Own(values, [name for name in absent if name not in values])


def _specs(module: nn.Module, layout: Layout, dtype: torch.dtype | None) -> dict[str, Spec]:
    """The specs of a layout with the dtypes that the weights are to have: ``dtype`` where one is asked for."""
    computed = naming.non_persistent(module)
    plan = module._get_dtype_plan(dtype or module.dtype) if naming.is_pretrained(module) else {}  # type: ignore[operator]
    out = {}
    for name, spec in layout.specs.items():
        wanted = next((d for pattern, d in plan.items() if re.search(pattern.replace("*", ".*"), name)), dtype or spec.dtype)
        cast = spec.dtype.is_floating_point and name not in computed
        out[name] = Spec.make(spec.mesh, spec.placements, spec.shape, wanted) if cast else spec
    return out


def _check(module: nn.Module, layout: Layout, named: naming.Named, missing: Sequence[str], strict: bool) -> None:
    """Refuse files that do not fit, naming everything at once."""
    shapes = [
        f"{name} {r.shape}, {tuple(layout.specs[name].shape)} in the module"
        for name, r in named.regions.items()
        if name in layout.specs and r.shape != tuple(layout.specs[name].shape)
    ]
    surplus = set(named.unexpected) - naming.passed_over(module, named.unexpected) if strict else set()
    faults = {
        "missing": missing,
        "unexpected": [name for name in named.unexpected if name in surplus],
        "of another shape": [*shapes, *(f"{name}, of {what}" for name, what in named.unfit.items())],
        "tensors without data that are no buffers": bare_tensors(module),
    }
    if any(faults.values()):
        lines = [f"  {kind}: {'; '.join(items)}" for kind, items in faults.items() if items]
        raise problem(
            "\n".join([f"weights that do not fit {type(module).__name__}", *lines]),
            "files hold every weight of the module in its shape, and nothing else",
            "load the class and configuration that were saved; strict=False passes over what is unexpected",
        )


def _read(stored: Mapping[str, Stored], jobs: Mapping[str, _Job], progress: bool | None) -> dict[str, Tensor]:
    """Every tensor on its mesh, filled from the files."""
    made: dict[str, Tensor] = {}
    ordered = sorted(jobs, key=lambda name: stored[jobs[name].region.names[0]].file if jobs[name].region.parts else "")
    with bar("loading weights", sum(job.spec.nbytes for job in jobs.values()), progress) as shown:
        for bunch in _bunches(ordered, jobs):
            specs = [jobs[name].spec for name in bunch]
            sources = {name: number for number, name in enumerate(dict.fromkeys(_sources(jobs[n] for n in bunch)))}
            landings = [s.replace([REPLICATE if isinstance(p, Partial) else p for p in s.placements]) for s in specs]
            wanted = [Filling(s, _reads(jobs[n].region, s, sources)) for n, s in zip(bunch, landings, strict=True)]
            filled = fill(Tensor, [(stored[name].file, stored[name].name) for name in sources], wanted)
            made.update({n: t.redistribute(placements=s.placements) for n, t, s in zip(bunch, filled, specs, strict=True)})
            shown.update(sum(spec.nbytes for spec in specs))
    return made


def _bunches(names: Iterable[str], jobs: Mapping[str, _Job]) -> Iterator[list[str]]:
    bunch: list[str] = []
    nbytes = 0
    for name in names:
        bunch.append(name)
        nbytes += jobs[name].spec.nbytes
        if nbytes >= BUNCH_NBYTES:
            yield bunch
            bunch, nbytes = [], 0
    if bunch:
        yield bunch


def _sources(jobs: Iterable[_Job]) -> Iterator[str]:
    for job in jobs:
        yield from job.region.names


def _reads(region: Region, spec: Spec, sources: Mapping[str, int]) -> list[list[Read]]:
    """What fills each piece."""
    return [
        [
            Read(sources[p.name], list(p.offset), list(p.size), list(p.order), list(p.at), list(p.shape))
            for p in region.box(box).parts
        ]
        for box in spec.boxes
    ]


def _placed(value: torch.Tensor, spec: Spec) -> Tensor:
    return Tensor(value, device_mesh=spec.mesh, placements=spec.placements, dtype=spec.dtype)


def _check_twice(pairs: Mapping[str, tuple[Tensor, Tensor]], names: Mapping[str, Sequence[str]]) -> None:
    """Tied weights are one tensor; files that hold it twice hold the same."""
    differing = [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    if differing:
        tied = "; ".join(" and ".join(every) for every in names.values() if set(every) & set(differing))
        raise problem(
            f"tied weights that differ in the files: {tied}",
            "weights that are tied in the module are one tensor",
            "untie them, e.g. config.tie_word_embeddings = False, or save the model anew",
        )
