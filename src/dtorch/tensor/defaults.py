"""The mesh that tensors are made on unless told."""

from __future__ import annotations

from ..core.mesh import DeviceMesh

_stack: list[DeviceMesh] = []


def default_mesh() -> DeviceMesh:
    """The mesh of the innermost ``use_mesh``, else one CPU device."""
    return _stack[-1] if _stack else DeviceMesh("cpu")


def push_mesh(mesh: DeviceMesh) -> None:
    """Make a mesh the default."""
    _stack.append(mesh)


def pop_mesh() -> None:
    """Undo the last ``push_mesh``."""
    _stack.pop()


def stacked_meshes() -> list[DeviceMesh]:
    """The meshes made the default and not undone, the present one last."""
    return list(_stack)


def exchange_meshes(meshes: list[DeviceMesh]) -> list[DeviceMesh]:
    """Put others in their place, for a computation that is gone on with; returns those that were there."""
    before = list(_stack)
    _stack[:] = meshes
    return before
