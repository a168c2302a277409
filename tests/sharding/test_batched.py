"""Linear algebra on batches: leading dims stay split, also where they broadcast or pieces are empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, stays, values

L = torch.linalg
SQUARE = values(5, 3, 3) / 4 + 4 * torch.eye(3)
SYMMETRIC = (SQUARE + SQUARE.mT) / 2 + torch.arange(3.0).diag()
TALL = values(5, 4, 3) + torch.eye(4, 3)
FACTOR = L.cholesky(SYMMETRIC)
RIGHT = values(5, 3, 2, seed=1)
LU, PIVOTS, _ = torch.ops.aten.linalg_lu_factor_ex(SQUARE)
LD, LD_PIVOTS = L.ldl_factor(SYMMETRIC)
QR = torch.geqrf(TALL)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "det": (L.det, (SQUARE,)),
    "slogdet": (L.slogdet, (SQUARE,)),
    "inv": (L.inv_ex, (SQUARE,)),
    "solve": (L.solve, (SQUARE, RIGHT)),
    "solve a vector": (L.solve, (SQUARE, RIGHT[..., 0])),
    "solve, one matrix": (L.solve, (SQUARE[0], RIGHT)),
    "solve, one right side": (L.solve, (SQUARE, RIGHT[0])),
    "solve, stretched": (L.solve, (SQUARE[:1], RIGHT)),
    "solve from the right": (lambda a, b: L.solve(a, b, left=False), (SQUARE, RIGHT.mT)),
    "solve_ex": (torch.ops.aten._linalg_solve_ex.default, (SQUARE, RIGHT)),
    "solve_ex, stretched": (torch.ops.aten._linalg_solve_ex.default, (SQUARE[:1], RIGHT)),
    "cholesky": (L.cholesky, (SYMMETRIC,)),
    "cholesky_inverse": (torch.cholesky_inverse, (FACTOR,)),
    "cholesky_solve": (torch.cholesky_solve, (RIGHT, FACTOR)),
    "solve_triangular": (lambda a, b: L.solve_triangular(a, b, upper=False), (FACTOR, RIGHT)),
    "lu_factor": (L.lu_factor_ex, (SQUARE,)),
    "lu": (L.lu, (SQUARE,)),
    "lu_unpack": (torch.lu_unpack, (LU, PIVOTS)),
    "lu_unpack in part": (lambda a, p: torch.lu_unpack(a, p, unpack_data=False)[0], (LU, PIVOTS)),
    "lu_solve": (L.lu_solve, (LU, PIVOTS, RIGHT)),
    "ldl_factor": (L.ldl_factor_ex, (SYMMETRIC,)),
    "ldl_solve": (L.ldl_solve, (LD, LD_PIVOTS, RIGHT)),
    "qr": (L.qr, (TALL,)),
    "qr without q": (lambda a: L.qr(a, "r"), (TALL,)),
    "geqrf": (torch.geqrf, (TALL,)),
    "householder_product": (L.householder_product, QR),
    "ormqr": (torch.ormqr, (*QR, values(5, 4, 2))),
    "svd": (lambda a: L.svd(a, full_matrices=False)[1], (TALL,)),
    "svdvals": (L.svdvals, (TALL,)),
    "eigh": (L.eigh, (SYMMETRIC,)),
    "eigvalsh": (L.eigvalsh, (SYMMETRIC,)),
    "eig": (L.eig, (SYMMETRIC,)),
    "pinv": (L.pinv, (TALL,)),
    "pinv with tolerances": (lambda a, t: L.pinv(a, atol=t), (TALL, torch.full((5,), 0.1))),
    "matrix_exp": (L.matrix_exp, (SQUARE / 8,)),
    "matrix_rank": (L.matrix_rank, (TALL,)),
    "cond": (L.cond, (SQUARE,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    check(fn, *inputs, limit=20, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["det", "inv", "solve", "cholesky", "qr", "svdvals", "eigvalsh", "matrix_exp"])
def test_gradients(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    check(fn, *inputs, grad=True, limit=12, rtol=1e-3, atol=1e-4)


def test_two_batch_dims() -> None:
    a, b = SQUARE[:4].view(2, 2, 3, 3), RIGHT[:2, None]
    check(lambda a, b: L.solve(a, b), a, b, limit=20, rtol=1e-4, atol=1e-5)
    check(L.svdvals, a, limit=20, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["det", "inv", "solve_ex", "lu_solve", "qr", "svd", "eigh", "pinv", "eig"])
def test_split_batches_stay_where_they_are(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    stays(fn, *inputs, mesh=(3,), placements=[[Shard(0)]] * len(inputs))
    stays(fn, *inputs, mesh=(2, 2), placements=[[Shard(0), Shard(0)]] * len(inputs))


@pytest.mark.parametrize("name", ["solve", "cholesky", "inv with a check"])
def test_of_checked_operators_only_error_codes_move(name: str) -> None:
    fn, inputs = {**PROGRAMS, "inv with a check": (L.inv, (SQUARE,))}[name]
    mesh = init_device_mesh("cpu", (3,))
    not_replicated(fn, *[place(t, mesh, (Shard(0),)) for t in inputs], at_most_nbytes=2 * 5 * 4)


def test_a_singular_matrix_is_named_by_its_place_in_the_whole_batch() -> None:
    singular = SQUARE.clone()
    singular[4] = 0
    x = place(singular, init_device_mesh("cpu", (3,)), (Shard(0),))
    with pytest.raises(RuntimeError, match="Batch element 4"):
        L.inv(x).to_torch()


def test_one_matrix_for_a_split_batch() -> None:
    stays(torch.ops.aten._linalg_solve_ex.default, SQUARE[0], RIGHT, mesh=(3,), placements=[[Replicate()], [Shard(0)]])
