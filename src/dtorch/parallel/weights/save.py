"""``save_pretrained``: ordinary Hugging Face files of a module that lies on a mesh."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...tensor.tensor import Tensor
from .files import INDEX, SINGLE
from .naming import is_pretrained
from .problem import SAVE, package, problem
from .progress import bar
from .regions import Region
from .symbolic import Laid
from .writing import Entry, divide, in_bytes, write, write_index


def save_pretrained(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    progress: bool | None = None,
) -> None:
    """Write a module's weights as ordinary safetensors files, and a Hugging Face model's configuration beside them.

    They are those that ``transformers`` would write of the model on one device, whatever the mesh: ``from_pretrained``
    loads them. Tied weights are written once. One weight at a time is brought here. Files are written aside and renamed
    when all is done, so a save that fails leaves what was there before.

    Args:
        module: any module, distributed or not.
        path: a folder, which is made.
        max_shard_size: weights go to several files with an index, each of at most so many bytes: an int, or ``"5GB"``.
        progress: show a progress bar on stderr; when omitted, if that is a terminal.

    Raises:
        UsageError: a path that is a file, a size that is not understood, or weights that such files cannot hold.
        RemoteError: an operator failed that a weight depends on.
    """
    limit = in_bytes(max_shard_size)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise problem(f"path {str(folder)!r}, which is a file", "a model is saved to a folder", "give a folder", SAVE)
    tensors = _to_save(module)
    laid = _laid(module, tensors)
    files = divide([Entry(name, tuple(t.shape), t.dtype) for name, t in laid.items()], limit)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
        _write_config(module, Path(aside))
        with bar("saving weights", sum(e.nbytes for file in files.values() for e in file), progress) as shown:
            for name, entries in files.items():
                write(Path(aside, name), entries, lambda n: _value(laid[n].region, tensors), shown.update)
        if len(files) > 1:
            write_index(Path(aside), files)
        _replace(Path(aside), folder)


def _to_save(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a state dict holds, each tied tensor under one name."""
    state = module.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        remedy = "save those by torch.save, and weights by a module without them"
        raise problem(f"{', '.join(odd)} of {type(module).__name__}", "safetensors files hold tensors only", remedy, SAVE)
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    twins = _further_names(module)
    return {name: t for name, t in state.items() if name not in twins and name not in ignored}


def _further_names(module: nn.Module) -> set[str]:
    """Names of tied tensors that are not written: all but one, which is that which the model ties the others to."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    followers = getattr(module, "all_tied_weights_keys", None) or ()
    kept = (next((n for n in every if n not in followers), every[0]) for every in names.values())
    return {n for every, keep in zip(names.values(), kept, strict=True) for n in every if n != keep}


def _laid(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Laid]:
    """What the files will hold: how each of their tensors lies in those of the module."""
    own = {name: Laid.of(Region.whole(name, t.shape), t.dtype) for name, t in tensors.items()}
    if not is_pretrained(module):
        return own
    return package("transformers.core_model_loading", SAVE).revert_weight_conversion(module, own)


def _value(region: Region, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor as it is written, brought here."""
    parts = []
    for part in region.parts:
        box = tensors[part.name].detach()[tuple(slice(o, o + n) for o, n in zip(part.offset, part.size, strict=True))]
        parts.append((part, _plain(box).permute(part.order).reshape(part.shape)))
    if len(parts) == 1:
        return parts[0][1]
    out = torch.empty(region.shape, dtype=parts[0][1].dtype)
    for part, value in parts:
        out[tuple(slice(o, o + n) for o, n in zip(part.at, part.shape, strict=True))] = value
    return out


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_torch().cpu() if isinstance(tensor, Tensor) else tensor.cpu()


def _write_config(module: Any, folder: Path) -> None:
    """The configuration of a Hugging Face model, with what is only known of the model itself."""
    if not is_pretrained(module):
        return
    config = copy.deepcopy(module.config)
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def _replace(aside: Path, folder: Path) -> None:
    """Let files that were written take their places, and those of an older save go."""
    fresh = sorted(file.name for file in aside.iterdir())
    for name in sorted(fresh, key=lambda name: name == INDEX):
        os.replace(aside / name, folder / name)
    for file in folder.iterdir():
        if file.name not in fresh and (file.name in (SINGLE, INDEX) or SHARD.fullmatch(file.name)):
            file.unlink()


SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
