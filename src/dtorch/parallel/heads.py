"""Attention heads: tensor parallelism never cuts through one, however many there are.

Query heads belong to key/value heads in groups of equal size. A device gets whole groups, so that its queries meet
their own keys: with 9 query and 3 key/value heads over 2 devices, key/value heads split (2, 1) and query heads (6, 3).
Where there are fewer key/value heads than devices, every device keeps all of those weights, and query heads split on their
own; attention takes from the heads it is given those that a device's queries need. Devices beyond the query heads hold none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.placements import balanced


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of an attention block."""

    query: int
    key_value: int

    def split(self, devices: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Heads on each device, of queries and of keys and values; None for the latter where all devices keep all."""
        if self.key_value < devices:
            return balanced(self.query, devices), None
        groups = balanced(self.key_value, devices)
        return tuple(n * (self.query // self.key_value) for n in groups), groups


def heads_at(path: str, modules: Mapping[str, nn.Module]) -> Heads | None:
    """The heads of the attention block that a module is part of; None outside attention, or where they do not group.

    Args:
        path: the module's qualified name.
        modules: every module of the model by qualified name.
    """
    for parent in _with_parents(path):
        module = modules[parent]
        if _is_attention(parent, module):
            block = next((part for part in module.modules() if _has_marks(part)), module)
            return _heads_of(block, _config_near(parent, modules))
    return None


def head_sizes(heads: Heads, path: str, length: int, devices: int) -> tuple[int, ...] | None:
    """How many of ``length`` features each device gets; None where every device keeps all.

    Args:
        path: qualified name of the parameter: it tells keys and values from queries.
        length: the parameter's size along the dim that is split.
        devices: size of the tensor-parallel axis.
    """
    if is_packed(path):
        count = heads.query + 2 * heads.key_value
        return balanced(length, devices) if length % count else tuple(n * (length // count) for n in balanced(count, devices))
    query, key_value = heads.split(devices)
    is_key_value = any(part in KEY_VALUE_NAMES for part in path.split("."))
    count, pieces = (heads.key_value, key_value) if is_key_value else (heads.query, query)
    if length % count:
        return balanced(length, devices)
    return None if pieces is None else tuple(n * (length // count) for n in pieces)


def is_packed(path: str) -> bool:
    """Whether a parameter holds queries, keys and values, one after the other."""
    return any(part in PACKED_NAMES for part in path.split("."))


def _heads_of(block: nn.Module, config: Any) -> Heads | None:
    query = _number(block, QUERY_COUNTS) or _number(config, QUERY_COUNTS)
    if query is None:
        return None
    key_value = _number(block, KEY_VALUE_COUNTS)
    if key_value is None:
        groups = _number(block, ("num_key_value_groups",))
        key_value = query // groups if groups else _number(config, KEY_VALUE_COUNTS) or query
    return None if key_value == 0 or query % key_value else Heads(query, key_value)


def _with_parents(path: str) -> Iterator[str]:
    """The name itself, then its parent's, up to the root's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_attention(path: str, module: nn.Module) -> bool:
    """Whether a module is attention, or wraps it: by the name of its class, or its own."""
    return any("att" in name.lower() for name in (path.rpartition(".")[2], type(module).__name__))


def _has_marks(module: nn.Module) -> bool:
    return _number(module, (*QUERY_COUNTS, *KEY_VALUE_COUNTS, "num_key_value_groups")) is not None


def _config_near(path: str, modules: Mapping[str, nn.Module]) -> Any:
    return next((modules[p].config for p in _with_parents(path) if hasattr(modules[p], "config")), None)


def _number(holder: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
KEY_VALUE_NAMES = frozenset(("k", "v", "k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv", "k_norm", "v_norm"))
PACKED_NAMES = frozenset(("c_attn", "qkv_proj", "qkv"))
