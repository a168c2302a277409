"""One operator, all its cases: plain PyTorch once for each sample and variant, dtorch under each placement."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from ... import explain, init_device_mesh, use_mesh
from ...sharding.call import leaves
from .cases import MAIN_DTYPES, MESHES, OTHER_DTYPES, VARIANTS, Case, mesh_text
from .compare import Difference, differences
from .placements import choices, drawn, place, two
from .record import LAYOUT, WAYS, Failure, Record
from .samples import chosen, dtypes_of, samples_of
from .settings import Settings
from .tables import INCOMPARABLE, LINEAR
from .variants import Sample, Started, gradients, start

SOFT_SHARE = 0.8
"""Of the time limit, after which no further case is begun."""
TEXT_LIMIT = 400
KINDS = {"value": "wrong value", "meta": "wrong shape or dtype", "layout": LAYOUT}


class Expected:
    """What plain PyTorch makes of a sample by one variant.

    Attributes:
        tensors: the tensors that are placed: the sample's, then what ``out=`` is given.
        result, grads: what is compared; ``grads`` is None where nothing is differentiated.
    """

    def __init__(self, op: Any, variant: str, sample: Sample, seed: int) -> None:
        """Raises whatever the operator raises, and LookupError where the variant has no meaning for the sample."""
        _check(op, variant, sample)
        self.outs = _out_tensors(op, sample, seed) if variant == "out" else []
        self.tensors = [*sample.tensors, *self.outs]
        started = start(op, variant, sample, [t.clone() for t in sample.tensors], [t.clone() for t in self.outs], seed)
        self.grads: list[torch.Tensor] | None = None
        if "backward" in variant:
            if not started.outs:
                raise LookupError("nothing to differentiate")
            self.grads = gradients(started)
        self.result = started.result


def run_operator(op: Any, settings: Settings, at: Callable[[str], None] = lambda _: None) -> Record:
    """Run every case of an operator.

    Args:
        op: the database's entry (``OpInfo``).
        at: told each case before it is run.
    """
    record, began = Record(op.full_name), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, sample, expected in _cases(op, settings, record):
            at(str(case))
            _judge(op, case, sample, expected, settings.seed, record)
            if time.monotonic() - began > settings.limit_s * SOFT_SHARE:
                record.status = "cut short"
                break
    record.seconds = time.monotonic() - began
    return record


def run_case(op: Any, case: Case, settings: Settings) -> Record:
    """Run a single case.

    Raises:
        IndexError: the operator has no such sample.
        Whatever plain PyTorch raises.
    """
    record = Record(op.full_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = samples_of(op, getattr(torch, case.dtype), settings.seed)[case.sample]
        assert sample is not None, "a sparse sample has no cases"
        _judge(op, case, sample, Expected(op, case.variant, sample, settings.seed), settings.seed, record)
    return record


def _cases(op: Any, settings: Settings, record: Record) -> Iterator[tuple[Case, Sample, Expected]]:
    dtypes = dtypes_of(op, MAIN_DTYPES, () if settings.main_only else OTHER_DTYPES)
    if not dtypes:
        record.skipped["dtype"] += 1
    for dtype, main in dtypes:
        try:
            samples = samples_of(op, dtype, settings.seed)
        except Exception as error:
            record.skipped[f"samples: {_brief(error)}"] += 1
            continue
        for number in chosen(len(samples), settings.samples):
            sample = samples[number]
            if sample is None:
                record.skipped["sparse sample"] += 1
                continue
            for variant in VARIANTS:
                expected = _expected(op, variant, sample, settings.seed, record)
                if expected is not None:
                    name = str(dtype).removeprefix("torch.")
                    for case in _placed_cases(op, variant, name, number, expected.tensors, main, settings):
                        yield case, sample, expected


def _expected(op: Any, variant: str, sample: Sample, seed: int, record: Record) -> Expected | None:
    try:
        return Expected(op, variant, sample, seed)
    except LookupError as error:
        record.skipped[f"{variant}: {_brief(error)}"] += 1
    except Exception as error:
        record.skipped[f"plain {variant}: {_brief(error)[:80]}"] += 1
    return None


def _placed_cases(
    op: Any, variant: str, dtype: str, number: int, tensors: list[torch.Tensor], main: bool, settings: Settings
) -> Iterator[Case]:
    linear = LINEAR.get(op.full_name, ())
    for mesh in MESHES:
        rows = [choices(mesh, t, main and (linear is None or i in linear)) for i, t in enumerate(tensors)]
        seed = f"{settings.seed} {op.full_name} {variant} {dtype} {mesh_text(mesh)} {number}"
        for placements in drawn(rows, settings.combinations, seed) if main else two(mesh, rows, seed):
            yield Case(variant=variant, dtype=dtype, mesh=mesh, sample=number, placements=placements)


def _judge(op: Any, case: Case, sample: Sample, expected: Expected, seed: int, record: Record) -> None:
    """Run a case, compare, and count it."""
    group = f"{case.variant}:{case.dtype}"
    with explain() as report:
        failure = _failure(op, case, sample, expected, seed)
    record.add(group, failure)
    if case.sharded and (failure is None or "refused" not in failure.kind):
        ways = {way for _, way in report.ways}
        record.ways[next((way for way in reversed(WAYS) if way in ways), "rule")] += 1
        record.fallbacks.update({name for name, way in report.ways if way == "replicated"})


def _failure(op: Any, case: Case, sample: Sample, expected: Expected, seed: int) -> Failure | None:
    values = op.full_name not in INCOMPARABLE
    try:
        started = _started(op, case, sample, expected, seed)
        found = differences(started.result, expected.result, values)
    except Exception as error:
        return Failure("refused", str(case), _brief(error))
    if not any(d.kind != LAYOUT for d in found) and expected.grads is not None:
        try:
            wrong = _gradient_differences(started, expected.grads, values)
        except Exception as error:
            return Failure("gradient refused", str(case), _brief(error))
        if wrong:
            return Failure("gradient wrong", str(case), wrong[0].text[:TEXT_LIMIT])
    worst = min(found, key=lambda d: list(KINDS).index(d.kind), default=None)
    return None if worst is None else Failure(KINDS[worst.kind], str(case), worst.text[:TEXT_LIMIT])


def _started(op: Any, case: Case, sample: Sample, expected: Expected, seed: int) -> Started:
    mesh = init_device_mesh("cpu", case.mesh)
    placed = [place(t, mesh, p) for t, p in zip(expected.tensors, case.placements, strict=True)]
    count = len(sample.tensors)
    with nullcontext() if sample.tensors else use_mesh(mesh):
        return start(op, case.variant, sample, placed[:count], placed[count:], seed)


def _gradient_differences(started: Started, expected: list[torch.Tensor], values: bool) -> list[Difference]:
    if not started.outs:
        return [Difference("value", "no result requires a gradient")]
    return [d for d in differences(gradients(started), expected, values, "gradient") if d.kind != LAYOUT]


def _check(op: Any, variant: str, sample: Sample) -> None:
    """Raise LookupError where a variant has no meaning."""
    if "backward" in variant and not any(sample.differentiable):
        raise LookupError("nothing to differentiate")
    if variant.startswith("inplace"):
        if op.get_inplace() is None or sample.broadcasts or not isinstance(sample.tree[0], torch.Tensor):
            raise LookupError("no such form")
        if variant == "inplace_backward" and not op.supports_inplace_autograd:
            raise LookupError("nothing to differentiate")
    if variant == "out" and not op.supports_out:
        raise LookupError("no such form")


def _out_tensors(op: Any, sample: Sample, seed: int) -> list[torch.Tensor]:
    """Tensors of the result's shapes and dtypes, filled with something else."""
    result = start(op, "forward", sample, [t.clone() for t in sample.tensors], [], seed).result
    return [torch.ones(t.shape, dtype=t.dtype) for t in leaves(result, torch.Tensor)]


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:TEXT_LIMIT]
