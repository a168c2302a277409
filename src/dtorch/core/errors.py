"""Every exception dtorch raises, by who must act.

DTorchError
├── UsageError (ValueError)       you: the call breaks a rule
│   ├── MeshError                 a mesh is malformed, or two meshes meet in one operator
│   ├── PlacementError            placements do not fit the mesh or the tensor
│   └── SessionClosedError        a tensor is used after ``shutdown()``
├── CommunicationForbidden        you: an operator needs communication where you forbade it
├── RemoteError (RuntimeError)    you: an operator failed on a worker; carries your file and line
├── WorkerLost (RuntimeError)     the operator of the cluster: a worker is gone
├── ProtocolError (RuntimeError)  the operator of the cluster: client and worker do not speak alike
└── InternalError (RuntimeError)  us: a bug in dtorch
"""

from __future__ import annotations


class DTorchError(Exception):
    """Base of every error dtorch raises."""


class UsageError(DTorchError, ValueError):
    """The call breaks a rule that the caller can keep."""


class MeshError(UsageError):
    """A device mesh is malformed, or tensors on different meshes meet in one operator."""


class PlacementError(UsageError):
    """Placements do not fit the mesh or the tensor."""


class SessionClosedError(UsageError):
    """The session that holds this tensor's data has been shut down."""


class CommunicationForbidden(DTorchError, RuntimeError):
    """An operator needs communication inside ``communication("forbid")``."""


class RemoteError(DTorchError, RuntimeError):
    """An operator failed on a worker.

    Attributes:
        operator: the operator's name, e.g. ``aten::embedding``.
        site: ``file:line`` of the user's code that issued it.
        device: logical device ids the failing call ran for.
        shapes: the local shapes of its tensor arguments.
        worker_traceback: the worker's own traceback, as text.
    """

    def __init__(self, text: str, *, operator: str, site: str, device: str, shapes: str, worker_traceback: str) -> None:
        super().__init__(text)
        self.operator = operator
        self.site = site
        self.device = device
        self.shapes = shapes
        self.worker_traceback = worker_traceback


class WorkerLost(DTorchError, RuntimeError):
    """A worker stopped answering."""


class ProtocolError(DTorchError, RuntimeError):
    """Two parts of a session do not understand each other."""


class InternalError(DTorchError, RuntimeError):
    """A bug in dtorch: one of its own invariants does not hold."""


def four_parts(given: str, rule: str, where: str, remedy: str) -> str:
    """Compose an error text: what was given, which rule it breaks, where, and what to do."""
    return f"{given}\n  rule:  {rule}\n  where: {where}\n  to do: {remedy}"
