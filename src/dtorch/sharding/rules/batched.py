"""Linear algebra on batches of matrices: leading dims may be split, a matrix is whole. One row of core dims an operator.

A row says how many trailing dims of each input and each output belong to one matrix; the dims before them are batches,
which broadcast. An output that lacks a batch dim does not depend on it: every piece computes it whole and alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.spec import Spec
from ..call import OpCall
from ..labels import Labels
from ..rule import Rule, RuleFn
from .compose import tensor_names

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIDE = -1
"""Core dims of a right side, and of the solution: one where it is a vector for each matrix, else two."""


def batched(inputs: str, outputs: str) -> RuleFn:
    """Rule of an operator on matrices.

    Args:
        inputs: ``name:cores`` of each tensor argument, e.g. ``"LU:2 pivots:1"``; ``s`` for a right side.
        outputs: cores of each output, e.g. ``"210"``.
    """
    cores = {name: _core(core) for name, core in (row.split(":") for row in inputs.split())}

    def shard(call: OpCall) -> Labels:
        side = _side(call, list(cores))
        given = [side if cores[n] == SIDE else cores[n] for n in tensor_names(call)]
        made = [side if _core(c) == SIDE else _core(c) for c in outputs]
        shapes = [s.shape[: len(s.shape) - core] for s, core in zip(call.specs, given, strict=True)]
        full = torch.broadcast_shapes(*shapes)
        ins = [[*_batch(shape, full), *[None] * core] for shape, core in zip(shapes, given, strict=True)]
        outs = [_output(m.shape, core, full) for m, core in zip(call.outs, made, strict=True)]
        alike = {c: [i for i, dims in enumerate(outs) if c not in dims] for c in _LETTERS[: len(full)]}
        return Labels(ins, outs, alike=alike)

    return shard


def _core(text: str) -> int:
    return SIDE if text == "s" else int(text)


def _side(call: OpCall, names: Sequence[str]) -> int:
    """Core dims of the right side, by PyTorch's own test: a vector where its shape is that of the matrices less a dim."""
    side = next((v for n in ("B", "b") if n in names and isinstance(v := call.arg(n), Spec)), None)
    if side is None:
        return 2
    matrix = call.specs[0].shape
    return 1 if len(side.shape) == 1 or (len(matrix) - 1 == len(side.shape) and side.shape == matrix[:-1]) else 2


def _batch(shape: Sequence[int], full: Sequence[int]) -> list[str | None]:
    """Labels of batch dims, right-aligned; None where a 1 is stretched."""
    skip = len(full) - len(shape)
    return [_LETTERS[skip + d] if n == full[skip + d] else None for d, n in enumerate(shape)]


def _output(shape: torch.Size, core: int, full: Sequence[int]) -> list[str | None]:
    """Labels of an output; one that the call does not ask for is empty and has no batch."""
    if len(shape) < core or len(shape) - core > len(full):
        return [None] * len(shape)
    skip = len(full) - (len(shape) - core)
    matches = all(n in (1, full[skip + d]) for d, n in enumerate(shape[: len(shape) - core]))
    return [*_batch(shape[: len(shape) - core], full), *[None] * core] if matches else [None] * len(shape)


def checked(call: OpCall) -> Labels:
    """Error codes, checked whole: the message names the batch element."""
    return Labels([[None] * len(s.shape) for s in call.specs], [])


def _rows(text: str) -> dict[str, Rule]:
    """Rules from lines of ``operator | inputs | outputs``."""
    rows = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    return {name: Rule(batched(inputs, outputs)) for name, inputs, outputs in rows}


TABLE = {"_linalg_check_errors": Rule(checked)} | _rows("""
    _linalg_det                   | A:2                   | 021
    _linalg_eigh                  | A:2                   | 12
    _linalg_slogdet               | A:2                   | 0021
    _linalg_solve_ex              | A:2 B:s               | s210
    _linalg_svd                   | A:2                   | 212
    cholesky                      | self:2                | 2
    cholesky_inverse              | self:2                | 2
    cholesky_solve                | self:2 input2:2       | 2
    _cholesky_solve_helper        | self:2 A:2            | 2
    geqrf                         | self:2                | 21
    linalg_cholesky_ex            | self:2                | 20
    linalg_eig                    | self:2                | 12
    linalg_householder_product    | input:2 tau:1         | 2
    linalg_inv_ex                 | A:2                   | 20
    linalg_ldl_factor_ex          | self:2                | 210
    linalg_ldl_solve              | LD:2 pivots:1 B:2     | 2
    linalg_lu                     | A:2                   | 222
    linalg_lu_factor_ex           | A:2                   | 210
    linalg_lu_solve               | LU:2 pivots:1 B:2     | 2
    linalg_matrix_exp             | self:2                | 2
    linalg_pinv.atol_rtol_tensor  | self:2 atol:0 rtol:0  | 2
    linalg_qr                     | A:2                   | 22
    linalg_solve_triangular       | self:2 B:2            | 2
    lu_unpack                     | LU_data:2 LU_pivots:1 | 222
    ormqr                         | self:2 input2:1 input3:2 | 2
    triangular_solve              | self:2 A:2            | 22
""")
