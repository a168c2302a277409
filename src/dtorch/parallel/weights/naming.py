"""Which tensors of the files make which tensor of a model.

A plain module's weights go by their own names. For a Hugging Face model, `transformers` tells how names and layouts in
files differ from those in the model: prefixes of a base model, renamed parts, experts that are one stack in the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .files import Stored
from .problem import package
from .regions import Region
from .symbolic import Laid, Unfit


@dataclass(frozen=True)
class Named:
    """Files brought together with a model.

    Attributes:
        regions: of each of the model's tensors that the files hold: where it lies there.
        unexpected: what the files hold beside that.
        unfit: the model's tensors that the files hold parts of which do not fit together, and what these are.
        conversions: those of `transformers` that were used; a model that is saved again goes by them.
    """

    regions: Mapping[str, Region]
    unexpected: tuple[str, ...]
    unfit: Mapping[str, str] = field(default_factory=dict)
    conversions: list[Any] | None = None


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a Hugging Face model."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(module).__mro__)


def match(module: nn.Module, stored: Mapping[str, Stored]) -> Named:
    """Bring the tensors of files together with those of a module.

    Raises:
        UsageError: the files have to be converted in a way that is not understood.
    """
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    if not is_pretrained(module):
        regions = {name: Region.whole(name, s.shape) for name, s in stored.items() if name in state}
        return Named(regions, tuple(name for name in stored if name not in state))
    return _converted(module, state, stored)


def _converted(module: nn.Module, state: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> Named:
    """As `transformers` does: names by its renamings, then each conversion run on tensors without data."""
    loading = package("transformers.core_model_loading")
    mapping = package("transformers.conversion_mapping").get_model_conversion_mapping(module)
    converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    jobs: dict[str, Any] = {}
    unexpected = []
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = _target(module, loading, mapping, converters, state, name)
        if target not in state:
            unexpected.append(name)
            continue
        if target not in jobs:
            jobs[target] = copy.deepcopy(by_pattern[pattern]) if pattern else loading.WeightRenaming(name, target)
        laid = Laid.of(Region.whole(name, stored[name].shape), stored[name].dtype)
        jobs[target].add_tensor(target, name, pattern or name, laid)
    regions: dict[str, Region] = {}
    unfit: dict[str, str] = {}
    for target, job in jobs.items():
        try:
            made = job.convert(target, model=module, config=module.config)
        except Unfit as error:
            unfit[target] = str(error)
            continue
        for full, laid in made.items():
            regions[full] = (laid[0] if isinstance(laid, list) else laid).region
    used = [m for m in mapping if m.was_used()]
    return Named(regions, (*unexpected, *(n for n in regions if n not in state)), unfit, used)


def _target(module: Any, loading: Any, mapping: Any, converters: Any, state: Any, name: str) -> tuple[str, str | None]:
    """The name in the model that a name in a file comes to, and the pattern of the conversion on the way."""
    renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
    target, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, state)
    if target not in state and name in state:
        return loading.rename_source_key(name, [], [], module.base_model_prefix, state)
    return target, pattern


def passed_over(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Names in files that a model knows of and does not want: old buffers that it computes by itself."""
    computed = {name.rpartition(".")[2] for name in non_persistent(module)} & OLD_BUFFERS
    patterns = [*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()), *(rf"(^|\.){n}$" for n in computed)]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def not_needed(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of a model that files may lack, as the model says."""
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def non_persistent(module: nn.Module) -> set[str]:
    """Names of the buffers that are no part of a state dict."""
    return {
        f"{owner}.{name}" if owner else name
        for owner, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
        if part._buffers.get(name) is not None
    }


# Buffers that files of older versions hold, and that models compute by themselves today.
OLD_BUFFERS = {"inv_freq", "position_ids"}
