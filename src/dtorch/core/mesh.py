"""``DeviceMesh``: an n-d array of logical device ids, the only thing that changes between one device and a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from .errors import MeshError, four_parts

_DEVICE_TYPES = ("cpu", "cuda")
_interned: WeakValueDictionary[tuple, DeviceMesh] = WeakValueDictionary()


class DeviceMesh:
    """An n-dimensional array of logical device ids.

    Equal meshes are one object, so comparing them is an identity test.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh: nested sequence (or array) of distinct non-negative ids; ``None`` is the single device 0.
        mesh_dim_names: one distinct name per mesh axis, or ``None``.

    Raises:
        MeshError: duplicate or negative ids, ragged nesting, or names that do not match the mesh's shape.
    """

    __slots__ = ("__weakref__", "device_type", "families", "ids", "mesh_dim_names", "shape")

    device_type: str
    families: WeakSet[Family]
    ids: tuple[int, ...]
    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None

    def __new__(cls, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        shape, ids = _flatten([0] if mesh is None else mesh)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        return _intern(device_type, shape, ids, names)

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.shape)

    def size(self, axis: int | str | None = None) -> int:
        """Number of devices, of the whole mesh or along one axis (index or name)."""
        return math.prod(self.shape) if axis is None else self.shape[self.axis(axis)]

    def axis(self, axis: int | str) -> int:
        """Index of an axis given by name or (possibly negative) index.

        Raises:
            MeshError: there is no such axis.
        """
        if isinstance(axis, str):
            if self.mesh_dim_names and axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
        elif -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise MeshError(
            four_parts(
                f"axis {axis!r} of {self!r}",
                "an axis is one of the mesh's names or indices",
                "the mesh axis you named",
                f"use one of {self.axis_names()}",
            )
        )

    def axis_names(self) -> tuple[str, ...]:
        """The axis names, or ``("axis0", "axis1", ...)`` where the mesh has none."""
        return self.mesh_dim_names or tuple(f"axis{i}" for i in range(self.ndim))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Sub-mesh over the named axes, at coordinate 0 of every other axis."""
        wanted = [self.axis(n) for n in ((names,) if isinstance(names, str) else names)]
        coords = [
            tuple(c[wanted.index(a)] if a in wanted else 0 for a in range(self.ndim))
            for c in coordinates([self.shape[a] for a in wanted])
        ]
        return _intern(
            self.device_type,
            tuple(self.shape[a] for a in wanted),
            tuple(self.device_at(c) for c in coords),
            tuple(self.axis_names()[a] for a in wanted),
        )

    def on(self, device_type: str) -> DeviceMesh:
        """The mesh of the same shape, names and ids on devices of another type."""
        return _intern(device_type, self.shape, self.ids, self.mesh_dim_names)

    def unbind(self, name: str | int) -> list[DeviceMesh]:
        """The sub-meshes along an axis, one per coordinate; ``[self]`` when the mesh has no axis of that name."""
        if isinstance(name, str) and name not in (self.mesh_dim_names or ()):
            return [self]
        cut = self.axis(name)
        shape = self.shape[:cut] + self.shape[cut + 1 :]
        names = self.mesh_dim_names and self.mesh_dim_names[:cut] + self.mesh_dim_names[cut + 1 :]
        if not shape:
            shape, names = (1,), None
        whole = [(c, self.device_at(c)) for c in coordinates(self.shape)]
        return [
            _intern(self.device_type, shape, tuple(d for c, d in whole if c[cut] == i), names) for i in range(self.shape[cut])
        ]

    def akin(self, other: DeviceMesh) -> bool:
        """Whether an operator may meet tensors on both: they are one mesh, or members of one ``Family``."""
        return self is other or any(family in other.families for family in self.families)

    def device_at(self, coord: Sequence[int]) -> int:
        """Logical device id at a coordinate."""
        index = 0
        for c, n in zip(coord, self.shape, strict=True):
            index = index * n + c
        return self.ids[index]

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names(), self.shape, strict=True))
        ids = f"{self.ids[0]}..{self.ids[-1]}" if len(self.ids) > 8 else ", ".join(map(str, self.ids))
        return f"DeviceMesh({self.device_type!r}, {axes}; ids {ids})"

    def __reduce__(self) -> tuple:
        return _intern, (self.device_type, self.shape, self.ids, self.mesh_dim_names)

    def __deepcopy__(self, memo: dict) -> DeviceMesh:
        return self


class Family:
    """Meshes that one program is spread over, as a model is over its pipeline stages; they are akin as long as this lives."""

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        for mesh in meshes:
            mesh.families.add(self)


def init_device_mesh(
    device_type: str, mesh_shape: int | Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of the ids ``0 .. prod(mesh_shape) - 1`` in row-major order.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh_shape: devices along each axis; an int is a one-axis mesh.
        mesh_dim_names: one distinct name per axis, or ``None``.

    Raises:
        MeshError: an axis of size below 1, or names that do not match.
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
    return _intern(device_type, shape, tuple(range(math.prod(shape))), None if names is None else tuple(names))


def checked_mesh(mesh: Any) -> DeviceMesh:
    """The mesh itself.

    Raises:
        MeshError: it is none.
    """
    if not isinstance(mesh, DeviceMesh):
        given, remedy = f"device_mesh={mesh!r}", "make one with dtorch.init_device_mesh(...)"
        raise MeshError(four_parts(given, "a device mesh is a dtorch.DeviceMesh", "argument device_mesh", remedy))
    return mesh


def coordinates(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All coordinates of an array of this shape, row-major."""
    if not shape:
        yield ()
        return
    for head in range(shape[0]):
        for tail in coordinates(shape[1:]):
            yield (head, *tail)


def _intern(device_type: str, shape: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    key = (device_type, shape, ids, names)
    mesh = _interned.get(key)
    if mesh is None:
        _check(device_type, shape, ids, names)
        mesh = object.__new__(DeviceMesh)
        mesh.device_type, mesh.shape, mesh.ids, mesh.mesh_dim_names = key
        mesh.families = WeakSet()
        _interned[key] = mesh
    return mesh


def _flatten(nested: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ids of a nested sequence or array."""
    nested = nested.tolist() if hasattr(nested, "tolist") else nested
    if isinstance(nested, int):
        return (), (nested,)
    if not isinstance(nested, Sequence) or isinstance(nested, str):
        raise MeshError(
            four_parts(f"{nested!r} in mesh=...", "device ids are ints", "DeviceMesh(mesh=...)", "give ints, nested as the mesh")
        )
    parts = [_flatten(part) for part in nested]
    if len({shape for shape, _ in parts}) != 1:
        raise MeshError(
            four_parts(
                f"mesh={nested!r}",
                "a mesh is a full n-d array of device ids",
                "DeviceMesh(mesh=...)",
                "give every row the same length, and at least one id",
            )
        )
    return (len(parts), *parts[0][0]), tuple(i for _, ids in parts for i in ids)


def _check(device_type: str, shape: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    where = "DeviceMesh / init_device_mesh"
    if device_type not in _DEVICE_TYPES:
        raise MeshError(
            four_parts(
                f"device_type={device_type!r}",
                f"a device type is one of {_DEVICE_TYPES}",
                where,
                'name the type without an index, e.g. "cpu"',
            )
        )
    if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
        raise MeshError(
            four_parts(f"mesh shape {shape!r}", "every mesh axis has at least one device", where, "give a positive int per axis")
        )
    if len(set(ids)) != len(ids) or min(ids) < 0:
        raise MeshError(four_parts(f"device ids {ids!r}", "ids are distinct and not negative", where, "name every device once"))
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        raise MeshError(
            four_parts(
                f"mesh_dim_names={names!r} for shape {shape!r}",
                "one distinct name per mesh axis",
                where,
                f"give {len(shape)} different names",
            )
        )
