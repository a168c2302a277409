"""Draw a random program. The plain side runs along, so that every line is drawn for tensors that are really there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from ...core.placements import REDUCE_OPS
from . import memory
from .program import LOOK, Program, defined, used
from .sides import Plain

DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
MESHES = ((2,), (3,), (4,), (1,), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1), (2, 2, 2), (1, 2, 2), (2, 1, 3))
NUMEL = 256
"""Elements of the largest input."""
RESULT_NUMEL = 4096
TOO_LARGE = 1e6
"""Tensors with larger numbers are compared, and no longer computed with."""
REFUSALS = 2
"""Lines of one program that plain PyTorch refuses; what is drawn beyond them is dropped."""

Row = Callable[["Draw"], None]


class Declined(Exception):
    """A row finds no tensors that suit it."""


class Draw:
    """A program under way.

    Attributes:
        random: source of all choices.
        plain: the plain side, on which every line has run.
        inexact: memory (see ``memory.of``) that holds rounded numbers. Nothing that may flip by rounding reads it.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.mesh: tuple[int, ...] = random.choice(MESHES)
        self.plain = Plain()
        self.lines: list[str] = []
        self.inexact: set[int] = set()
        self.wild: set[int] = set()
        self.refused = self.count = self.steps = 0
        self.kept: list[Any] = []

    # --- choices

    def one(self, items: Sequence[Any]) -> Any:
        return self.random.choice(items)

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def value(self, name: str) -> torch.Tensor:
        return self.plain.names[name]

    def names(self, suits: Callable[[torch.Tensor], bool] = lambda _: True, exact: bool = False) -> list[str]:
        """Live tensors that suit and that may be computed with, oldest first."""
        return [
            name
            for name, t in self.plain.tensors().items()
            if t is not None and suits(t) and memory.of(t) not in self.wild and not (exact and memory.of(t) in self.inexact)
        ]

    def tensor(self, suits: Callable[[torch.Tensor], bool] = lambda _: True, exact: bool = False) -> str:
        """A live tensor, younger ones more often."""
        names = self.names(suits, exact)
        if not names:
            raise Declined
        return names[max(self.between(0, len(names) - 1), self.between(0, len(names) - 1))]

    def dim(self, name: str, negative: bool = True) -> int:
        n = self.value(name).ndim
        if not n:
            raise Declined
        return self.between(-n if negative else 0, n - 1)

    def size(self) -> int:
        return 0 if self.chance(0.03) else self.between(1, 9) if self.chance(0.3) else self.between(1, 4)

    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for _ in range(self.one((0, 1, 1, 2, 2, 2, 3, 3, 4))):
            n = self.size()
            shape = (*shape, n if n * torch.Size(shape).numel() <= NUMEL else 1)
        return shape

    def number(self, name: str) -> str:
        """A literal that suits the dtype of a tensor."""
        dtype = self.value(name).dtype
        if dtype is torch.bool and self.chance(0.8):
            return self.one(("True", "False"))
        return str(self.between(-3, 3)) if dtype is torch.int64 or self.chance(0.7) else f"{self.between(-3, 3)}.0"

    def placements(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Text of random placements: splits even, uneven and with empty pieces, several on one dim, and partial ones."""
        lengths = {d: [n] for d, n in enumerate(shape)}
        texts = []
        for k in self.mesh:
            if self.chance(0.25) or (not shape and self.chance(0.5)):
                texts.append("Replicate()")
            elif not shape or self.chance(0.25):
                ops = ("sum", "avg", "prod") if dtype.is_complex else REDUCE_OPS
                op = self.one(("sum", *ops))
                texts.append("Partial()" if op == "sum" else f"Partial({op!r})")
            else:
                d = self.between(0, len(shape) - 1)
                even = self.chance(0.6)
                lengths[d] = [s for n in lengths[d] for s in (_even(n, k) if even else self._cut(n, k))]
                texts.append(f"Shard({d})" if even else f"Shard({d}, sizes={tuple(lengths[d])})")
        return f"[{', '.join(texts)}]"

    def _cut(self, n: int, k: int) -> list[int]:
        cuts = sorted(self.between(0, n) for _ in range(k - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]

    # --- lines

    def given(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, grad: bool = False) -> str:
        """A new input."""
        shape = self.shape() if shape is None else tuple(shape)
        dtype = dtype or self.one(DTYPES)
        if torch.Size(shape).numel() > RESULT_NUMEL:
            raise Declined
        more = ", grad=True" if grad and (dtype.is_floating_point or dtype.is_complex) else ""
        return self.emit(f"given({shape}, {dtype}, {self.between(0, 99)}, {self.placements(shape, dtype)}{more})")

    def partner(self, name: str, exact: bool = False) -> str:
        """A tensor that broadcasts with another, or a new one."""
        shape = self.value(name).shape

        def fits(t: torch.Tensor) -> bool:
            return all(a == b or 1 in (a, b) for a, b in zip(reversed(t.shape), reversed(shape), strict=False)) and (
                t.ndim <= 4 and t.numel() * max(1, len(shape)) <= RESULT_NUMEL
            )

        if self.chance(0.6):
            return self.tensor(fits, exact)
        return self.given(self.into(shape), None if self.chance(0.3) else self.value(name).dtype)

    def target(self, suits: Callable[[torch.Tensor], bool] = lambda _: True, repeated: bool = False) -> str:
        """A tensor to write to.

        Args:
            repeated: also one that is expanded, which PyTorch refuses or takes.
        """
        return self.tensor(lambda t: suits(t) and (not memory.overlaps_itself(t) or (repeated and 0 in t.stride())))

    def apart(self, target: str, *others: str) -> None:
        """Decline where a write to a tensor would change another while that is read."""
        if any(memory.collide(self.value(target), self.value(o)) for o in others):
            raise Declined

    def into(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that expands to another."""
        kept = tuple(shape)[self.between(0, len(shape)) if self.chance(0.3) else 0 :]
        return tuple(1 if self.chance(0.2) else n for n in kept)

    def emit(self, text: str, rounds: bool = False, results: int = 1, moves: bool = False, seeds: bool = False) -> Any:
        """Add a line and run it on the plain side.

        Args:
            text: an expression; a statement that assigns nothing if ``results`` is 0.
            rounds: the result is not exact, even of small integers.
            results: number of tensors that the expression gives.
            seeds: the line seeds its side first.
            moves: numbers only change their place; nothing is computed of several.

        Returns:
            The name of the result, or a tuple of them, or None.

        Raises:
            Declined: plain PyTorch refuses the line.
        """
        names = [f"t{self.count + i}" for i in range(results)]
        self.count += results
        line = f"{', '.join(names)} = {text}" if results else text
        line = f"torch.manual_seed({self.between(0, 99)}); {line}" if seeds else line
        before = {n: t._version for n, t in self.plain.tensors().items() if t is not None}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.plain.run(line)
        except Exception:
            self.refused += 1
            if self.refused <= REFUSALS:
                self.lines.append(line)
            raise Declined from None
        self.lines.append(line)
        self._judge(line, before, rounds, moves)
        return (names[0] if results == 1 else tuple(names)) if results else None

    def _judge(self, line: str, before: dict[str, int], rounds: bool, moves: bool) -> None:
        """Note what became inexact or too large to go on with."""
        live = {n: t for n, t in self.plain.tensors().items() if t is not None}
        sources = [live[n] for n in used(line) if n in live]
        rounds = rounds or any(memory.of(t) in self.inexact for t in sources)
        rounds = rounds or not (moves or memory.sums_exactly(sources))
        for name, tensor in live.items():
            if name in defined(line) or tensor._version != before.get(name, tensor._version):
                self.kept.append(tensor)
                if memory.is_float(tensor) and (rounds or not memory.small_integers(tensor)):
                    self.inexact.add(memory.of(tensor))
                if memory.largest(tensor) > TOO_LARGE or tensor.numel() > RESULT_NUMEL or tensor.ndim > 6:
                    self.wild.add(memory.of(tensor))


def _even(n: int, k: int) -> list[int]:
    return [n // k + (i < n % k) for i in range(k)]


def program(random: Random, rows: Sequence[tuple[int, Row]], low: int = 5, high: int = 20) -> Program:
    """A random program.

    Args:
        rows: kinds of statements, each with its weight.
        low, high: bounds of the number of statements.
    """
    draw = Draw(random)
    grad = draw.chance(0.5)
    for _ in range(draw.between(1, 3)):
        draw.given(grad=grad, dtype=draw.one((torch.float32, torch.float64)) if grad and draw.chance(0.7) else None)
    weights, kinds = [w for w, _ in rows], [r for _, r in rows]
    steps, tries = draw.between(low, high), 0
    while draw.steps < steps and tries < steps * 4:
        tries += 1
        try:
            random.choices(kinds, weights)[0](draw)
            draw.steps += 1
        except Declined:
            continue
        if draw.chance(0.08):
            draw.lines.append(LOOK)
    return Program(draw.mesh, tuple(draw.lines))
