"""``Gathered``: whole copies of split tensors whose memory can be given back between uses.

While the memory is away, the copies and all views of them remain valid tensors: whoever uses one, be it the backward pass
that kept it, has the memory brought back by gathering the split tensors again, all of them at one stroke.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from ..core.program import Drop
from ..core.spec import Spec
from ..sharding.builder import Builder
from ..sharding.plan import Plan
from ..sharding.planner import plan_into
from ..sharding.together import refill_together
from . import moving
from .together import move_together


class Gathered:
    """The memory of some tensors' whole copies.

    Args:
        tensors: split over one mesh axis each, among others, all on one mesh.
        targets: the same, replicated over that axis.
        reason: what reports call the gather.
        returned: called with this object when the memory was brought back by a use.

    Attributes:
        made: the copies; whoever takes them out holds them alone.
        present: whether the memory is there.
    """

    def __init__(
        self, tensors: Sequence[Any], targets: Sequence[Spec], reason: str, returned: Callable[[Gathered], None]
    ) -> None:
        # Values of their own, for a tensor may come to hold another one's.
        self._tensors = list(tensors)
        self._sources = [moving.held_anew(t) for t in tensors]
        self._reason, self._returned = reason, returned
        outs = move_together(self._sources, targets, reason, holds=2)
        # A second hold on the memory, that is in no group, so that a group which knows this object is not held by it.
        self._holds, self.made = outs[: len(tensors)], outs[len(tensors) :]
        self._groups = [ref(t._value.shared_group()) for t in self.made]
        self._written = [0] * len(tensors)
        self._stamps = [_stamp(t) for t in tensors]
        self.present = True

    def fresh(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the tensors that were gathered, unchanged since."""
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        return same and self._stamps == [_stamp(t) for t in tensors]

    def drop(self) -> None:
        """Give the memory back."""
        if not self.present:
            return
        self.write_back()
        self.present = False
        for group in self._alive():
            group.link = self
        client = moving.client_of(self._holds[0])
        client.emit(Drop([t._value.handle for t in self._holds]))

    def bring(self) -> None:
        """Gather again what somebody still holds.

        Raises:
            RuntimeError: in a backward pass, a tensor was written since it was gathered.
        """
        self._check_unwritten()
        self.present = True
        for group in self._alive():
            group.link = None
        needed = [i for i, group in enumerate(self._groups) if group() is not None]
        _refill([self._sources[i] for i in needed], [self._holds[i] for i in needed], self._reason)
        self._returned(self)

    def write_back(self) -> None:
        """Carry what was written into the copies on to the tensors."""
        for i, group in enumerate(g() for g in self._groups):
            if group is not None and group.version != self._written[i]:
                self._written[i] = group.version
                with torch.no_grad():
                    self._tensors[i].copy_(self._holds[i])
                self._stamps[i] = _stamp(self._tensors[i])

    def _alive(self) -> list[Any]:
        return [group for group in (g() for g in self._groups) if group is not None]

    def _check_unwritten(self) -> None:
        """What autograd would notice, had it saved the tensors themselves."""
        if torch._C._current_graph_task_id() == -1:
            return
        for tensor, (_, _, version) in zip(self._tensors, self._stamps, strict=True):
            if _version(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{type(tensor).__name__} {list(tensor.shape)}], a weight that is gathered over a mesh axis, is at "
                    f"version {_version(tensor)}; expected version {version} instead"
                )


def _refill(sources: list[Any], holds: list[Any], reason: str) -> None:
    specs = [t._spec for t in (*sources, *holds)]

    def make() -> Plan:
        builder = Builder(reason, specs, plan_into)
        count = len(sources)
        refill_together(builder, builder.inputs[:count], builder.inputs[count:])
        return Plan(builder.define([]), (), (), tuple(builder.comms), "redistribute", specs[0].mesh, False)

    moving.run_plan((reason, "refill", *specs), make, [*sources, *holds], explicit=True)


def _stamp(tensor: Any) -> tuple[Any, int, int]:
    """What changes when the tensor's data does."""
    value = tensor._value
    return value, value.shared_group().version, _version(tensor)


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version
