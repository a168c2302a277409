"""``Tensor``: what users hold. A ``torch.Tensor`` with a global shape whose data lies on the devices of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh, checked_mesh, coordinates
from ..core.placements import REPLICATE, Placement, Placements
from ..core.spec import Spec, fitting_placements
from . import composites, construct, dispatch, moving, printing
from .defaults import default_mesh
from .future import TensorFuture
from .hotpath import Value

_torch_data: Any = torch.Tensor.data
_detach = torch.ops.aten.detach.default


class Tensor(torch.Tensor):
    """A global tensor: one tensor to the program, pieces on the devices of a mesh.

    Every ``torch`` function, method and operator works on it, autograd included. Shape, stride and dtype are those of
    the whole tensor.

    Args:
        data: a ``torch.Tensor``, a nested list, a number, or another global tensor.
        device_mesh: where it lives; the default mesh when omitted.
        placements: one per mesh axis; replicated when omitted.
        requires_grad: as in ``torch.tensor``.

    Raises:
        MeshError, PlacementError: mesh or placements that do not fit.
        UsageError: data that is no tensor.
    """

    __slots__ = ("_spec", "_value")
    _spec: Spec
    _value: Value
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    __torch_dispatch__: Any = classmethod(dispatch.dispatch)

    def __new__(
        cls,
        data: Any,
        *,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        if isinstance(data, Tensor):
            made = moving.redistributed(data.detach(), checked_mesh(device_mesh or data.device_mesh), placements)
            made = made.clone() if made._value is data._value else made
        else:
            made = construct.distribute(cls, _plain(data), checked_mesh(device_mesh or default_mesh()), placements)
        if dtype is not None:
            made = made.to(dtype)
        return made.requires_grad_(requires_grad) if requires_grad else made

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lives on."""
        return self._spec.mesh

    @property
    def placements(self) -> Placements:
        """How it lies along each mesh axis."""
        return self._spec.placements

    @property
    def shards(self) -> list[torch.Tensor]:
        """A copy of the local tensor of each device, in the mesh's row-major order; waits for the values.

        Devices that hold the same piece share one tensor.
        """
        pieces = moving.fetch_pieces(self)
        return [pieces[self._spec.piece_of(c)] for c in coordinates(self._spec.mesh.shape)]

    def local_shape(self, coord: Sequence[int]) -> torch.Size:
        """Local shape on the device at a mesh coordinate."""
        return torch.Size(self._spec.local_box(coord)[1])

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None) -> Tensor:
        """The same values under other placements or on another mesh; differentiable.

        Args:
            device_mesh: target mesh; the present one when omitted.
            placements: target placements. When omitted, they are kept if the target mesh has as many axes, and
                replicated if not.

        Returns:
            The tensor itself where nothing changes, a view of it where no device's piece changes (the placements differ
            along mesh axes of one device only), else a tensor with memory of its own.
        """
        return moving.redistributed(self, checked_mesh(device_mesh or self.device_mesh), placements)

    def redistribute_like(self, other: Tensor) -> Tensor:
        """The same values on the mesh and under the placements of another tensor."""
        return moving.redistributed(self, other.device_mesh, fitting_placements(other.device_mesh, other.placements, self.shape))

    def redistribute_by_dict(
        self, placements: Mapping[str, Placement], device_mesh: DeviceMesh | None = None, default: str = "keep"
    ) -> Tensor:
        """Redistribute by axis name.

        Args:
            placements: axis name to placement; names that the mesh does not have are passed over, so one program
                serves many meshes.
            device_mesh: target mesh; the present one when omitted.
            default: what becomes of axes not named: ``"keep"``, ``"replicate"``, or ``"error"``.

        Raises:
            UsageError: unknown default, or an axis not named under ``"error"``.
        """
        mesh = checked_mesh(device_mesh or self.device_mesh)
        return self.redistribute(mesh, _by_name(self, mesh, placements, default))

    def to_torch(self) -> torch.Tensor:
        """The value as a plain, detached tensor of the global shape; waits for it.

        Raises:
            RemoteError: an operator it depends on failed.
        """
        return moving.fetch_whole(self)

    def full_tensor(self) -> torch.Tensor:
        """Same as ``to_torch``."""
        return self.to_torch()

    def to_torch_async(self) -> TensorFuture:
        """The value as a future; the program goes on."""
        return moving.fetch_async(self)

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As in PyTorch; a plain ``gradient`` is taken as replicated."""
        if gradient is not None and not isinstance(gradient, Tensor):
            gradient = Tensor(gradient, device_mesh=self.device_mesh)
        super().backward(gradient, *args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a NumPy array of the global shape; waits for it."""
        return self.to_torch().numpy(force=force)

    def tolist(self) -> Any:
        """The value as nested lists; waits for it."""
        return self.to_torch().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return printing.text(self)

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def _repr_html_(self) -> str:
        return printing.html(self)

    def __copy__(self) -> Tensor:
        made: Any = self.detach().requires_grad_(self.requires_grad)
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only tensors created by the user (graph leaves) can be deep-copied; copy t.detach() instead")
            copied = _copied(self, memo).requires_grad_(self.requires_grad)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    def share_memory_(self) -> NoReturn:
        raise _no_memory_here(self, "share_memory_()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_memory_here(self, "DLPack export")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        # Who asks whether there is one takes only this error for a no.
        raise AttributeError(str(_no_memory_here(self, "the CUDA array interface")))

    def is_shared(self) -> bool:
        return False

    def untyped_storage(self) -> NoReturn:
        raise _no_memory_here(self, "the storage", SAVING)

    def storage(self) -> NoReturn:
        raise _no_memory_here(self, "the storage", SAVING)

    def _typed_storage(self) -> NoReturn:
        raise _no_memory_here(self, "the storage", SAVING)

    def apply_(self, fn: Any) -> NoReturn:
        raise _no_memory_here(self, "apply_()")

    def map_(self, *args: Any) -> NoReturn:
        raise _no_memory_here(self, "map_()")

    def map2_(self, *args: Any) -> NoReturn:
        raise _no_memory_here(self, "map2_()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            four_parts(
                f"pickling {type(self).__name__} of shape {tuple(self.shape)}",
                ELSEWHERE,
                "pickle.dumps, torch.save or a process pool",
                f"{SAVING}, and distribute anew what was loaded",
            )
        )

    @property
    def data(self) -> Any:
        """The same memory outside autograd, which does not notice writes to it; assigning makes the tensor hold another one's."""
        return dispatch.HANDLERS[_detach](type(self), _detach, (self,), {})

    @data.setter
    def data(self, other: Any) -> None:
        if not isinstance(other, Tensor):
            other = Tensor(other, device_mesh=self.device_mesh, placements=self.placements)
        _torch_data.__set__(self, other)
        self._spec, self._value = other._spec, other._value


Tensor.__torch_dispatch__ = classmethod(dispatch.entrance(Tensor))
composites.install(Tensor)


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """A copy outside autograd. As in PyTorch, tensors over one memory stay over one, and parameters do not."""
    apart = isinstance(tensor, torch.nn.Parameter)
    # The memo keeps the value, so that no other is given its id.
    known = None if apart else memo.get(id(tensor._value))
    copied: Any = tensor.detach().clone() if known is None else known[1]
    if known is None and not apart:
        memo[id(tensor._value)] = tensor._value, copied
    return copied.redistribute(placements=tensor.placements).detach()


ELSEWHERE = "its data lies on the devices of a session, not in this process"
SAVING = (
    "save a model by dtorch.save_pretrained(model, path), a tensor as t.to_torch(), and a state dict as "
    "{name: t.to_torch() for name, t in model.state_dict().items()}"
)


def _no_memory_here(tensor: Tensor, wanted: str, remedy: str = "use t.to_torch(), a plain copy, instead") -> UsageError:
    given = f"{wanted} of a tensor of shape {tuple(tensor.shape)} on {tensor.device_mesh!r}"
    return UsageError(four_parts(given, ELSEWHERE, "the method on your line", remedy))


def _plain(data: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    try:
        return torch.tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            four_parts(
                f"data of type {type(data).__name__}",
                f"a tensor is made of a torch.Tensor, numbers or nested lists of them ({error})",
                "dtorch.Tensor(data, ...)",
                "convert the data first",
            )
        ) from None


def _by_name(tensor: Tensor, mesh: DeviceMesh, placements: Mapping[str, Placement], default: str) -> Placements:
    where = "redistribute_by_dict(placements, default=...)"
    if default not in ("keep", "replicate", "error"):
        raise UsageError(
            four_parts(f"default={default!r}", 'default is "keep", "replicate" or "error"', where, "use one of these")
        )
    kept = dict(zip(tensor.device_mesh.axis_names(), tensor.placements, strict=True))
    out: list[Placement] = []
    for name in mesh.axis_names():
        if name in placements:
            out.append(placements[name])
        elif default == "error":
            raise UsageError(
                four_parts(
                    f"no placement for axis {name!r} of {mesh!r}",
                    'under default="error" every axis is named',
                    where,
                    f"name {name!r}, or use another default",
                )
            )
        else:
            out.append(kept.get(name, REPLICATE) if default == "keep" else REPLICATE)
    given = [axis for axis, name in enumerate(mesh.axis_names()) if name in placements]
    return fitting_placements(mesh, out, tensor.shape, given)
