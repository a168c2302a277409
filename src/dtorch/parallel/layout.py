"""``Layout``: what ``parallelize`` decided, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..core.mesh import DeviceMesh, Family
from ..core.spec import Spec
from .stages import Stages

ATTRIBUTE = "_dtorch_layout"
"""Where a module keeps its layout."""


@dataclass(frozen=True)
class Layout:
    """How a module lies on a mesh.

    Attributes:
        title: the module's class.
        mesh: the mesh given.
        meshes: the mesh of each pipeline stage.
        stages: which module is on which stage.
        source: where the plan comes from.
        specs: of every parameter and buffer by qualified name; tied ones appear under each name.
        tied: further names of a parameter -> its first name.
        remarks: what a reader should know.
        family: what lets operators meet tensors of several stages while the module lives.
    """

    title: str
    mesh: DeviceMesh
    meshes: tuple[DeviceMesh, ...]
    stages: Stages
    source: str
    specs: Mapping[str, Spec]
    tied: Mapping[str, str]
    remarks: tuple[str, ...]
    family: Family

    def mesh_of(self, module_name: str) -> DeviceMesh:
        """The mesh of the stage that a module is on."""
        return self.meshes[self.stages.of[module_name]]

    def __deepcopy__(self, memo: dict) -> Layout:
        return self


def layout_of(module: nn.Module) -> Layout | None:
    """The layout that ``parallelize`` left on a module."""
    return getattr(module, ATTRIBUTE, None)
