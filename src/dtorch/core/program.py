"""The whole vocabulary between client and worker: plans and the instructions that carry them.

Instructions are imperative and frozen; a batch of them is executed in order. Values on a worker are named by integer
handles that the client allots. A *slot* is a place inside one plan; slots ``0 .. n-1`` are the plan's inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

VERSION = 4
"""Of this page: raised with every change of what it says. Who speaks another version is refused."""


class Slot(msgspec.Struct, frozen=True, tag="slot"):
    """A local argument that is the value in a slot."""

    index: int


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A local argument that comes with each call, so that a changing number needs no new plan."""

    index: int


class Vary(msgspec.Struct, frozen=True, tag="vary"):
    """A local argument that differs by coordinate: ``values`` is row-major over the step's ``axes``."""

    values: list[Any]


class Const(msgspec.Struct, frozen=True, tag="const"):
    """A torch constant by kind (``dtype layout memory_format device complex``) and its text."""

    kind: str
    text: str


class Local(msgspec.Struct, frozen=True, tag="local"):
    """Run one PyTorch operator once per coordinate over ``axes`` of mesh number ``mesh``."""

    operator: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[int]
    axes: list[int]
    mesh: int = 0


class Collective(msgspec.Struct, frozen=True, tag="collective"):
    """Combine the pieces of a slot along one mesh axis.

    ``kind`` is one of ``all_gather`` (concatenate along ``dim``), ``all_reduce`` (``op``), ``reduce_scatter`` (``op``,
    then keep ``sizes`` along ``dim``), ``all_to_all`` (concatenate along ``from_dim``, then keep ``sizes`` along another
    dim, ``dim``), ``slice`` (no communication: keep ``sizes`` along ``dim``) or ``fill`` (no communication: make a
    partial whose first piece is the value). ``outer`` lists the mesh axes before ``axis`` that
    shard the same dim of the target, outermost first: ``sizes`` is row-major over them and ``axis``; ``from_sizes`` and
    ``from_outer`` are the same for the source, where it is split along ``axis``. ``order`` lists the dims of the whole from
    the largest stride to the smallest, which pieces alone cannot tell. With ``refill`` (of
    ``all_gather`` only) the output slot is an input of the plan, and its memory is written, brought back first where it
    was dropped.
    """

    kind: str
    source: int
    output: int
    axis: int
    dim: int
    sizes: list[int]
    op: str
    mesh: int = 0
    outer: list[int] = []
    order: list[int] = []
    from_dim: int = 0
    refill: bool = False
    from_sizes: list[int] = []
    from_outer: list[int] = []


class Exchange(msgspec.Struct, frozen=True, tag="exchange"):
    """Assemble each target piece from exactly the parts of source pieces that it needs, point to point.

    ``parts[t]`` lists ``(source piece, offset in source, offset in target, size)`` for target piece ``t``; offsets and
    sizes are per dim. ``shapes[t]`` is the target piece's local shape, ``dtype`` that of all pieces. Source and target may
    lie on different meshes. ``order`` as for ``Collective``.
    """

    source: int
    output: int
    parts: list[list[tuple[int, list[int], list[int], list[int]]]]
    shapes: list[list[int]]
    mesh: int
    target_mesh: int
    dtype: str
    order: list[int] = []


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Run the function in a slot on the pieces of others, once per coordinate over ``axes`` of mesh number ``mesh``.

    It gives a tuple of tensors, one for each output.
    """

    function: int
    inputs: list[int]
    outputs: list[int]
    axes: list[int]
    mesh: int = 0


class Together(msgspec.Struct, frozen=True, tag="together"):
    """Several collectives of one kind over one axis of one mesh, none of which needs another's output: sent as one."""

    parts: list[Collective]


Step = Local | Collective | Exchange | Apply | Together


class MeshInfo(msgspec.Struct, frozen=True):
    """What a worker must know of a mesh: device type, shape and the logical ids, row-major."""

    device_type: str
    shape: list[int]
    ids: list[int]


class DefinePlan(msgspec.Struct, frozen=True, tag="define"):
    """Teach workers a plan. ``axes[slot]`` and ``meshes_of[slot]`` say along which axes of which mesh a slot varies."""

    plan: int
    operator: str
    meshes: list[MeshInfo]
    axes: list[list[int]]
    meshes_of: list[int]
    inputs: int
    steps: list[Step]
    outputs: list[int]
    random: bool = False


class Call(msgspec.Struct):
    """Run a plan: input handles in, output handles out; ``scalars`` are this call's changing numbers. Travels in ``Calls``."""

    plan: int
    inputs: list[int]
    outputs: list[int]
    scalars: list[Any]


class Calls(msgspec.Struct, frozen=True, tag="calls", gc=False):
    """A run of ``count`` Calls, packed: some thousand of them are under way at a time.

    ``words`` holds 64-bit little-endian integers: for each call its plan, its numbers of inputs, outputs and scalars, then
    the handles of inputs and outputs. ``scalars`` holds those of all calls, in order.
    """

    words: bytes
    scalars: list[Any]
    count: int

    @staticmethod
    def of(*calls: Call) -> Calls:
        """Calls packed."""
        words: list[int] = []
        for c in calls:
            words += (c.plan, len(c.inputs), len(c.outputs), len(c.scalars), *c.inputs, *c.outputs)
        return Calls(array("q", words).tobytes(), [s for c in calls for s in c.scalars], len(calls))

    def unpacked(self, word: int = 0, scalar: int = 0) -> Iterator[Call]:
        """The calls from a place on: number of its first word, and of its first scalar."""
        words = memoryview(self.words).cast("q")
        while word < len(words):
            plan, inputs, outputs, scalars = words[word : word + 4]
            word += 4
            middle, end = word + inputs, word + inputs + outputs
            if min(inputs, outputs, scalars) < 0 or end > len(words) or scalar + scalars > len(self.scalars):
                raise ValueError("a packed call is cut short")
            yield Call(plan, words[word:middle].tolist(), words[middle:end].tolist(), self.scalars[scalar : scalar + scalars])
            word, scalar = end, scalar + scalars


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Run a plan that draws random numbers from a generator in this state; the reply carries the state afterwards."""

    plan: int
    inputs: list[int]
    outputs: list[int]
    scalars: list[Any]
    state: Any


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Store tensors as the pieces of a value; ``tensors`` holds one per piece that the worker holds, row-major over ``axes``."""

    handle: int
    mesh: MeshInfo
    axes: list[int]
    tensors: list[Any]


class Read(msgspec.Struct, frozen=True, array_like=True):
    """A box of a stored tensor, and the box of a piece that it fills; offsets and sizes are per dim, in elements.

    What is read at ``offset`` with ``size`` has its dims put in ``order``, is taken as of ``shape`` (dims of length 1 come
    and go) and written at ``at``. ``source`` numbers the tensors of the ``Load``.
    """

    source: int
    offset: list[int]
    size: list[int]
    order: list[int]
    at: list[int]
    shape: list[int]


class Filled(msgspec.Struct, frozen=True):
    """A value to be filled from files: for each piece, row-major over ``axes``, its local shape and what fills it.

    A worker reads those that it holds.
    """

    handle: int
    mesh: MeshInfo
    axes: list[int]
    dtype: str
    shapes: list[list[int]]
    reads: list[list[Read]]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Fill values from safetensors files that the worker can open. ``tensors`` holds number of file and name of each."""

    files: list[str]
    tensors: list[tuple[int, str]]
    values: list[Filled]


class PutFunction(msgspec.Struct, frozen=True, tag="put_function"):
    """Store a Python function as a value, for ``Apply``: itself within a process, pickled to others.

    A worker takes instructions over trusted links only.
    """

    handle: int
    function: Any


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Send back the pieces of a value, which varies over ``axes`` of a mesh; with ``describe`` only shape, stride and dtype.

    A worker answers with the list of all pieces, and None for each that an earlier worker holds as well, or that it lacks.
    """

    handle: int
    mesh: MeshInfo
    axes: list[int]
    describe: bool = False


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Forget values; with ``release`` give the memory they took back to the system, for something large comes next."""

    handles: list[int]
    release: bool = False


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Give back the memory of values, and so of all that shares it, and keep the values: a plan will refill them.

    Until then nothing may read them.
    """

    handles: list[int]


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Forget plans that the client's cache has evicted."""

    plans: list[int]


class DefaultDtype(msgspec.Struct, frozen=True, tag="default_dtype"):
    """Run what follows under this default dtype: that of the client when it made it."""

    dtype: str


class Barrier(msgspec.Struct, frozen=True, tag="barrier"):
    """Reply once everything before has run."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Release everything and end."""


Instruction = (
    DefinePlan | Calls | Draw | Put | Load | PutFunction | Fetch | Free | Drop | Forget | DefaultDtype | Barrier | Shutdown
)


class Failure(msgspec.Struct, frozen=True):
    """An operator failed.

    Attributes:
        sequence: the position of its Call in the stream.
        cause: the worker that should have given something and had nothing to give; -1 where nobody else is to blame.
    """

    sequence: int
    operator: str
    plan: int
    device: str
    shapes: str
    message: str
    traceback: str
    cause: int = -1

    @property
    def caused(self) -> bool:
        """Whether another worker is to blame."""
        return self.cause >= 0


class Reply(msgspec.Struct, frozen=True):
    """What a worker answers to a batch's last instruction.

    Attributes:
        failures: every failure since the last reply.
        silent: calls since then to which it had nothing to give to other workers: position in the stream, and why, as the
            worker and the position of what failed before.
    """

    result: Any = None
    failures: list[Failure] = []
    silent: list[tuple[int, int, int]] = []


class Sink(Protocol):
    """Where a client's instructions go: a controller, or a fake in a test.

    Attributes:
        travels: whether they leave the process.
    """

    travels: bool

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Take a batch whose first Call has sequence number ``first``; its effects need not be visible yet."""

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Take a batch and answer its last instruction."""

    def close(self) -> None:
        """End the workers and release everything."""


class PendingReply(Protocol):
    """A reply that may not have arrived."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self, timeout: float | None = None) -> Reply:
        """The reply; waits up to ``timeout`` seconds and raises ``TimeoutError``."""

    def add_done_callback(self, fn: Any) -> None:
        """Call ``fn(self)`` once the reply is there, from any thread."""
