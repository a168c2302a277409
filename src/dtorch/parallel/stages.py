"""Pipeline stages: layers to stages in order, earlier stages take the extra ones.

What stands before the layers in a model belongs to the first stage, what stands after them to the last. Modules that
share a parameter share a stage, the first of theirs, so that the parameter stays one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.placements import balanced

Stage = TypeVar("Stage")


@dataclass(frozen=True)
class Stages:
    """An assignment of modules to pipeline stages.

    Attributes:
        count: number of stages.
        layers: qualified names of the layers, in order; empty where there is one stage.
        of: stage of every module by qualified name. A module that holds others of several stages is given the first.
    """

    count: int
    layers: tuple[str, ...]
    of: Mapping[str, int]

    def layers_of(self, stage: int) -> list[str]:
        """Names of the layers on a stage."""
        return [name for name in self.layers if self.of[name] == stage]


def assign_stages(module: nn.Module, devices: int, each: int = 1) -> Stages:
    """Divide a module over the stages of a pipeline, ``each`` of them on every device.

    Raises:
        UsageError: more stages than layers.
    """
    _check_each(each)
    count = devices * each
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    if count == 1:
        return Stages(1, (), dict.fromkeys(names, 0))
    layers = find_layers(module)
    if len(layers) < count:
        raise UsageError(
            four_parts(
                f"{count} pipeline stages{_product(devices, each)} for {len(layers)} layers of {type(module).__name__}",
                "every stage has a layer at least",
                "parallelize(module, mesh), axis 'pp'",
                _fitting(devices, each, max(len(layers), 1)),
            )
        )
    stage_of_layer = assign_layers_to_stages(len(layers), range(count))
    of = _by_position(module, dict(zip(layers, stage_of_layer, strict=True)), count - 1)
    _join_tied(module, of)
    return Stages(count, tuple(layers), of)


def assign_layers_to_stages(num_layers: int, stages: Sequence[Stage]) -> list[Stage]:
    """The stage of each layer, in order: as even as can be, the earlier stages taking the extra ones.

    Args:
        num_layers: how many layers there are.
        stages: the stages in order, whatever stands for them: meshes, as ``mesh.unbind("pp")`` gives them, or numbers. With
            ``mesh.unbind("pp") * 2`` each mesh has two stages, and so two runs of layers.

    Returns:
        A member of ``stages`` for each layer.

    Raises:
        UsageError: more stages than layers, or what is no sequence of stages.
    """
    where = "assign_layers_to_stages(num_layers, stages)"
    if not isinstance(stages, Sequence):
        remedy = 'give mesh.unbind("pp"), or range(n) for numbers'
        raise UsageError(four_parts(f"stages={stages!r}", "stages are a sequence with a member for each", where, remedy))
    if not 1 <= len(stages) <= num_layers:
        remedy = f"make pp at most {num_layers}" if num_layers and stages else "give a layer and a stage at least"
        given = f"{len(stages)} pipeline stages for {num_layers} layers"
        raise UsageError(four_parts(given, "every stage has a layer at least", where, remedy))
    return [stage for stage, n in zip(stages, balanced(num_layers, len(stages)), strict=True) for _ in range(n)]


def _check_each(each: int) -> None:
    if not isinstance(each, int) or each < 1:
        raise UsageError(
            four_parts(
                f"virtual_stages={each!r}",
                "every device has a stage at least",
                "parallelize(module, mesh, virtual_stages=...)",
                "give a positive int",
            )
        )


def _product(devices: int, each: int) -> str:
    return f" ({devices} devices x {each} virtual stages)" if each > 1 else ""


def _fitting(devices: int, each: int, layers: int) -> str:
    """What would work."""
    if each == 1:
        return f"make pp at most {layers}"
    if devices <= layers:
        smaller = f", or pp at most {layers // each}" if layers >= each else ""
        return f"make virtual_stages at most {layers // devices}{smaller}"
    return f"make pp at most {layers}, and virtual_stages at most {layers} divided by pp"


def find_layers(module: nn.Module) -> list[str]:
    """Qualified names of the layers: what the model's own pipeline plan calls so, else its main list of modules.

    That is the longest of the lists that hold half of the parameters or more; without one, the module's own children.
    """
    modules = dict(module.named_modules())
    own = getattr(module, "_pp_plan", None) or {}
    lists = [name for name in own if isinstance(modules.get(name), nn.ModuleList)]
    if not lists:
        half = _weight(module) / 2
        lists = [
            n for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1 and _weight(m) >= half
        ]
    home = max(lists, key=lambda name: len(modules[name]), default="")
    prefix = f"{home}." if home else ""
    return [prefix + name for name, child in modules[home].named_children() if lists or _weight(child)]


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, by name, without those of its children."""
    return {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _weight(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _by_position(module: nn.Module, layer_stage: Mapping[str, int], last: int) -> dict[str, int]:
    """Stage of each module by where it stands: in a layer, before them, or after them.

    A module without parameters (a rotary embedding) goes first wherever it stands: its input is there already.
    """
    of: dict[str, int] = {}
    passed = False
    for name, owner in module.named_modules(remove_duplicate=False):
        layer = next((p for p in prefixes(name) if p in layer_stage), None)
        if layer is not None:
            of[name], passed = layer_stage[layer], True
        else:
            of[name] = last if passed and _weight(owner) else 0
    return of


def prefixes(name: str) -> list[str]:
    """A qualified name, then those of the modules that hold it, innermost first; the root's is left out."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _join_tied(module: nn.Module, of: dict[str, int]) -> None:
    """Bring modules that share a tensor onto the first of their stages, until nothing moves."""
    owners = list(module.named_modules(remove_duplicate=False))
    moved = True
    while moved:
        earliest: dict[int, int] = {}
        for name, owner in owners:
            for tensor in own_tensors(owner).values():
                earliest[id(tensor)] = min(of[name], earliest.get(id(tensor), of[name]))
        moved = False
        for name, owner in owners:
            first = min((earliest[id(t)] for t in own_tensors(owner).values()), default=of[name])
            if first < of[name]:
                of[name], moved = first, True
