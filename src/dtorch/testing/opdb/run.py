"""One operator, all its cases: plain PyTorch once for each sample and variant, dtorch under each placement."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from ... import explain, init_device_mesh, use_mesh
from ...core.errors import UsageError, four_parts
from ...sharding.call import leaves
from .cases import MAIN_DTYPES, MESHES, OTHER_DTYPES, VARIANTS, Case, mesh_text
from .compare import Difference, differences
from .placements import choices, drawn, place, two
from .record import LAYOUT, WAYS, Failure, Record
from .samples import chosen, dtypes_of, samples_of
from .settings import Settings
from .tables import ALL, INCOMPARABLE, LINEAR
from .variants import Sample, Started, gradients, start

SOFT_SHARE = 0.8
"""Of the time limit, after which no further case is begun."""
TEXT_LIMIT = 400
KINDS = {"value": "wrong value", "meta": "wrong shape or dtype", "layout": LAYOUT}


class NoMeaning(Exception):
    """An operator has no such variant, or not for this sample."""


class Expected:
    """What plain PyTorch makes of a sample by one variant.

    Attributes:
        outs: what ``out=`` is given.
        tensors: the tensors that are placed: the sample's, then ``outs``.
        result, grads: what is compared; ``grads`` is None where nothing is differentiated.
    """

    def __init__(self, op: Any, variant: str, sample: Sample, seed: int) -> None:
        """Raises whatever the operator raises, and NoMeaning where the variant has none for the sample."""
        _check(op, variant, sample)
        self.outs = _out_tensors(op, sample, seed) if variant == "out" else []
        self.tensors = [*sample.tensors, *self.outs]
        self.result, self.grads = _plain(op, variant, sample, self.tensors, seed)
        if "backward" in variant and self.grads is None:
            raise NoMeaning("nothing to differentiate")
        if any(t.layout is not torch.strided for t in leaves(self.result, torch.Tensor)):
            raise NoMeaning("sparse result")
        self._again = partial(_plain, op, variant, sample, seed=seed)

    @cached_property
    def judges(self) -> list[tuple[Any, list[torch.Tensor] | None]]:
        """Results that tell rounding from error: in double precision, and on inputs that differ by rounding."""
        found = []
        for change in (_doubled, _shaken):
            try:
                found.append(self._again([change(t) for t in self.tensors]))
            except Exception:
                # Not every operator takes doubles, and numbers that were just in range may leave it.
                continue
        return found


def _plain(
    op: Any, variant: str, sample: Sample, tensors: list[torch.Tensor], seed: int
) -> tuple[Any, list[torch.Tensor] | None]:
    """Result and gradients of a variant on copies of plain tensors."""
    copies, count = [t.clone() for t in tensors], len(sample.tensors)
    started = start(op, variant, sample, copies[:count], copies[count:], seed)
    return started.result, gradients(started) if started.outs else None


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _shaken(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    signs = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(3))
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs).to(tensor.dtype)


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
        UsageError: the operator has no such sample, or the sample other tensors than the case places.
        Whatever plain PyTorch raises.
    """
    record = Record(op.full_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = samples_of(op, getattr(torch, case.dtype), settings.seed)
        sample = samples[case.sample] if case.sample < len(samples) else None
        if sample is None:
            raise _no_case(op, case, f"{case.dtype} samples of {op.full_name} that can be placed are below {len(samples)}")
        expected = Expected(op, case.variant, sample, settings.seed)
        count = len(expected.tensors)
        if [len(row) for row in case.placements] != [len(case.mesh)] * count:
            raise _no_case(op, case, f"this sample has {count} tensors, and each a placement for each of {len(case.mesh)} axes")
        _judge(op, case, sample, expected, settings.seed, record)
    return record


def _no_case(op: Any, case: Case, rule: str) -> UsageError:
    return UsageError(four_parts(f"case {str(case)!r} of {op.full_name}", rule, "--case", "copy it from a failure's command"))


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
                    for case in _placed_cases(op, variant, name, number, expected, main, settings):
                        yield case, sample, expected


def _expected(op: Any, variant: str, sample: Sample, seed: int, record: Record) -> Expected | None:
    try:
        return Expected(op, variant, sample, seed)
    except NoMeaning as error:
        record.skipped[f"{variant}: {error}"] += 1
    except Exception as error:
        record.skipped[f"plain {variant}: {_brief(error)[:80]}"] += 1
    return None


def _placed_cases(
    op: Any, variant: str, dtype: str, number: int, expected: Expected, main: bool, settings: Settings
) -> Iterator[Case]:
    inputs = range(len(expected.tensors) - len(expected.outs))
    linear = LINEAR.get(op.full_name, ())
    summed = [i for i in inputs if main and (linear is ALL or i in linear)]
    for mesh in MESHES:
        rows = [choices(mesh, t, i in summed) for i, t in enumerate(expected.tensors)]
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
        found = _found(started.result, expected.result, expected, 0, values)
    except Exception as error:
        return Failure("refused", str(case), _brief(error))
    if not any(d.kind != LAYOUT for d in found) and expected.grads is not None:
        try:
            wrong = _gradient_differences(started, expected, values)
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


def _gradient_differences(started: Started, expected: Expected, values: bool) -> list[Difference]:
    if not started.outs:
        return [Difference("value", "no result requires a gradient")]
    return [d for d in _found(gradients(started), expected.grads, expected, 1, values) if d.kind != LAYOUT]


def _found(got: Any, right: Any, expected: Expected, part: int, values: bool) -> list[Difference]:
    """Differences that no judge explains by rounding; ``part`` is 0 for results, 1 for gradients."""
    where = ("result", "gradient")[part]
    found = differences(got, right, values, where)
    if any(d.kind == "value" for d in found):
        for judge in expected.judges:
            judged = differences(got, right, values, where, judge[part])
            if not any(d.kind == "value" for d in judged):
                return judged
    return found


def _check(op: Any, variant: str, sample: Sample) -> None:
    """Raise NoMeaning where a variant has none."""
    if "backward" in variant and not any(sample.differentiable):
        raise NoMeaning("nothing to differentiate")
    if variant.startswith("inplace"):
        if op.get_inplace() is None or sample.broadcasts or not isinstance(sample.tree[0], torch.Tensor):
            raise NoMeaning("no such form")
        if variant == "inplace_backward" and not op.supports_inplace_autograd:
            raise NoMeaning("nothing to differentiate")
    if variant == "out" and not op.supports_out:
        raise NoMeaning("no such form")


def _out_tensors(op: Any, sample: Sample, seed: int) -> list[torch.Tensor]:
    """Tensors of the result's shapes and dtypes, filled with something else."""
    result = start(op, "forward", sample, [t.clone() for t in sample.tensors], [], seed).result
    return [torch.ones(t.shape, dtype=t.dtype) for t in leaves(result, torch.Tensor)]


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:TEXT_LIMIT]
