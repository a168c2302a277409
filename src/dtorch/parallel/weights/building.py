"""Models without data, and the few values of theirs that no file holds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..decide import join
from .files import Stored
from .naming import is_pretrained
from .problem import package, problem

Source = nn.Module | type
"""A module, or a class that makes one of a folder's configuration."""


def built(source: Source, path: Path, dtype: torch.dtype | None, stored: Mapping[str, Stored]) -> nn.Module:
    """The module itself, or one of the class given, on the meta device and in evaluation mode.

    Args:
        path: the folder whose ``config.json`` says what the model is like.
        dtype: of its weights; the configuration's when None, else that of the first weight stored.

    Raises:
        UsageError: a class that cannot be built of a configuration, no configuration, or another dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise problem(f"dtype={dtype!r}", "weights have a floating-point torch.dtype", "give e.g. dtype=torch.bfloat16, or none")
    if isinstance(source, nn.Module):
        return source
    if not isinstance(source, type):
        rule = "what is loaded is a module, or a class of Hugging Face models"
        raise problem(f"{source!r} for a module", rule, "give e.g. AutoModelForCausalLM")
    folder = path if path.is_dir() else path.parent
    maker: Any = source
    config_class = _config_class(maker)
    if not (folder / "config.json").is_file():
        remedy = f'give a module: with torch.device("meta"): module = {source.__name__}(...)'
        raise problem(f"folder {str(folder)!r} without config.json", "it says what the model is like", remedy)
    try:
        config = config_class.from_pretrained(folder)
        first = next((s.dtype for s in stored.values() if s.dtype.is_floating_point), torch.float32)
        make = maker._from_config if hasattr(maker, "_from_config") else maker.from_config
        with torch.device("meta"):
            module = make(config, dtype=dtype or config.dtype or first).eval()
    except (OSError, ValueError, KeyError) as error:
        given = f"{str(folder / 'config.json')!r} for {source.__name__} ({type(error).__name__}: {error})"
        raise problem(given, "the configuration is of that kind of model", "use the class it was saved from") from error
    _follow_generation(module, folder)
    return module


def _config_class(source: Any) -> Any:
    """What reads a configuration for a class: its own kind, or any for a class that picks models by configuration."""
    if hasattr(source, "_from_config"):
        return source.config_class
    if hasattr(source, "from_config") and source.__module__.startswith("transformers"):
        return package("transformers").AutoConfig
    remedy = f'with torch.device("meta"): module = {source.__name__}(...), and give the module'
    raise problem(f"class {source.__name__}", "a class is one of Hugging Face models, e.g. AutoModelForCausalLM", remedy)


def _follow_generation(module: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and module.can_generate():
        module.generation_config = package("transformers").GenerationConfig.from_pretrained(folder)


def initial(module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Real values of buffers that a module computes by itself, such as rotary frequencies; those it can be asked for.

    A twin of each owner, with buffers on the CPU and nothing else, is initialised as the owner would be: by the model's
    ``_init_weights`` or its own ``reset_parameters``. A buffer that nobody writes then is left out.
    """
    wanted = set(names)
    values: dict[str, torch.Tensor] = {}
    initialisers: dict[str, Any] = {}
    for owner, part in module.named_modules(remove_duplicate=False):
        above = initialisers.get(owner.rpartition(".")[0])
        initialisers[owner] = part if is_pretrained(part) else above
        mine = {n: b for n, b in part._buffers.items() if b is not None and join(owner, n) in wanted}
        if mine:
            blank = {n: torch.empty_like(b, device="cpu") for n, b in mine.items()}
            _initialise(_twin(part, blank), initialisers[owner])
            values.update({join(owner, n): t for n, t in blank.items() if t._version})
    return values


def _twin(part: nn.Module, buffers: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module as another is, but with these buffers, and parameters that cannot be spoilt."""
    twin = copy.copy(part)
    twin._buffers = {**part._buffers, **buffers}
    twin._parameters = {n: p if p is None else nn.Parameter(p.to("meta"), p.requires_grad) for n, p in part._parameters.items()}
    return twin


@torch.no_grad()
def _initialise(twin: Any, model: Any) -> None:
    if model is not None:
        model._init_weights(twin)
    elif hasattr(twin, "reset_parameters"):
        twin.reset_parameters()


def bare_tensors(module: nn.Module) -> list[str]:
    """Names of tensors without data that a module keeps as plain attributes, where nothing can fill them."""
    return [
        join(owner, name)
        for owner, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
