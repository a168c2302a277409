"""One cell: the parallelized model beside the plain one."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from ... import shutdown
from ...core.errors import UsageError
from ...parallel import parallelize
from ...parallel.axes import PIPELINE
from ...tensor import client as clients
from ...tensor.tensor import Tensor
from . import oracle
from .cell import Cell, parse_cell
from .record import FAILED, GOOD, REFUSED, RIGHT, WRONG, Record
from .zoo import MODELS

FORWARD, BACKWARD = 1e-5, 1e-4
"""Largest error of outputs and of gradients, by the largest value of the tensor."""

SMALL = 1e-2
"""A gradient is measured by this part of the largest one of the model at least: some are zero but for rounding."""


class Wrong(Exception):
    """The two sides differ; the text says where."""


def check(text: str) -> Record:
    """Run the cell of a text. The running session is ended, so that a refusal is seen to allocate nothing.

    Raises:
        AssertionError: it is not right, nor refused where it must be.
        UsageError: the text names no cell.
    """
    record = run_cell(parse_cell(text))
    if record.kind not in GOOD:
        raise AssertionError(f"{record.cell}: {record.kind}: {record.text}")
    return record


def run_cell(cell: Cell) -> Record:
    """Run a cell in a session of its own."""
    expected = oracle.answer(cell.model, cell.inputs())
    shutdown()
    began = time.monotonic()
    kind, text, errors = RIGHT, "", (0.0, 0.0)
    try:
        kind, errors = _outcome(cell, expected)
    except Wrong as wrong:
        kind, text = WRONG, str(wrong)
    except Exception as error:
        kind, text = FAILED, f"{type(error).__name__}: {error}"
    finally:
        shutdown()
    return Record(str(cell), kind, text, *errors, seconds=time.monotonic() - began)


def impossible(cell: Cell) -> bool:
    """Whether a cell asks for what cannot be: more stages than the model has layers."""
    return cell.size(PIPELINE) * cell.option("virtual_stages") > MODELS[cell.model].layers


def _outcome(cell: Cell, expected: oracle.Answer) -> tuple[str, tuple[float, float]]:
    module = copy.deepcopy(oracle.plain(cell.model))
    if impossible(cell):
        _refused(module, cell)
        return REFUSED, (0.0, 0.0)
    module = parallelize(module, cell.mesh(), **cell.keywords())
    forward = _within(FORWARD, "logits", oracle.logits(module, expected.inputs), expected.logits)
    backward = _gradients(oracle.gradients_of(module, expected.inputs), expected.gradients)
    if expected.tokens is not None:
        tokens = _whole(oracle.generated(module, expected.inputs))
        if not torch.equal(tokens, expected.tokens):
            raise Wrong(f"tokens {tokens.tolist()}, expected {expected.tokens.tolist()}")
    return RIGHT, (forward, backward)


def _refused(module: Any, cell: Cell) -> None:
    try:
        parallelize(module, cell.mesh(), **cell.keywords())
    except UsageError:
        touched = [name for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)]
        if touched or clients.running() is not None:
            raise Wrong(f"refused after something was allocated: {touched or 'a session'}") from None
        return
    raise Wrong("not refused")


def _gradients(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest error of all gradients."""
    absent = [name for name, grad in expected.items() if (grad is None) != (actual[name] is None)]
    if absent:
        raise Wrong(f"gradients of {absent} on one side only")
    least = SMALL * max(_largest(grad) for grad in expected.values() if grad is not None)
    return max(_within(BACKWARD, name, actual[name], grad, least) for name, grad in expected.items() if grad is not None)


def _within(limit: float, name: str, actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The error of a tensor by the largest of its values, or by ``least`` where that is more."""
    whole = _whole(actual)
    if whole.shape != expected.shape or whole.dtype != expected.dtype:
        raise Wrong(f"{name}: {whole.dtype} {tuple(whole.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    error = _largest(whole - expected) / max(_largest(expected), least)
    # Not a number is not within anything.
    if not error <= limit:
        raise Wrong(f"{name}: off by {error:.2g} of the largest value")
    return error


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_torch().detach() if isinstance(tensor, Tensor) else tensor.detach()
