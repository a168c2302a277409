"""dtorch: a cluster that looks like one device to a PyTorch program."""

from . import nn
from .core.errors import (
    CommunicationForbidden,
    DTorchError,
    InternalError,
    MeshError,
    PlacementError,
    ProtocolError,
    RemoteError,
    SessionClosedError,
    UsageError,
    WorkerLost,
)
from .core.mesh import DeviceMesh, init_device_mesh
from .core.placements import Partial, Placement, Replicate, Shard
from .parallel import describe, load_pretrained, parallelize, save_pretrained
from .parallel.pipeline import pipeline
from .session import init, session, shutdown
from .tensor.creation import (
    arange,
    empty,
    empty_like,
    eye,
    from_local,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    tensor,
    use_mesh,
    zeros,
    zeros_like,
)
from .tensor.future import TensorFuture
from .tensor.mapped import local_map
from .tensor.rules import register_rule
from .tensor.tensor import Tensor
from .tensor.watch import communication, explain

DTensor = Tensor
__version__ = "0.1.0"

__all__ = [
    "CommunicationForbidden",
    "DTensor",
    "DTorchError",
    "DeviceMesh",
    "InternalError",
    "MeshError",
    "Partial",
    "Placement",
    "PlacementError",
    "ProtocolError",
    "RemoteError",
    "Replicate",
    "SessionClosedError",
    "Shard",
    "Tensor",
    "TensorFuture",
    "UsageError",
    "WorkerLost",
    "arange",
    "communication",
    "describe",
    "empty",
    "empty_like",
    "explain",
    "eye",
    "from_local",
    "full",
    "full_like",
    "init",
    "init_device_mesh",
    "linspace",
    "load_pretrained",
    "local_map",
    "nn",
    "ones",
    "ones_like",
    "parallelize",
    "pipeline",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "register_rule",
    "save_pretrained",
    "session",
    "shutdown",
    "tensor",
    "use_mesh",
    "zeros",
    "zeros_like",
]
