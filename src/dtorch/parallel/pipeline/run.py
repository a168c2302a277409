"""``pipeline``: a parallelized model run in micro-batches that fill all its stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import UsageError, four_parts
from ..axes import PIPELINE, size_of
from ..hooks import moves_of
from ..layout import Layout, layout_of
from .ambient import Ambient, Own
from .batch import MicroBatch, Reduction, micro_batches, weights
from .clock import draw
from .gradients import Gradients
from .outputs import detached, find_loss, put_together, weighted_sum
from .passes import Pass
from .schedule import Forward, Schedule, check_schedule, make_schedule


class Pipeline:
    """A model that takes its batch in micro-batches; made by ``pipeline``. ``print`` it to see its schedule."""

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int,
        schedule: str,
        loss_fn: Callable[..., torch.Tensor] | None,
        reduction: Reduction,
        batch_dims: Mapping[str, int | None],
    ) -> None:
        self.model, self.micro_batches = model, micro_batches
        self._name, self._loss_fn, self._reduction, self._dims = schedule, loss_fn, reduction, batch_dims

    @property
    def schedule(self) -> Schedule:
        """The order of a step, as data."""
        return self._schedule(self.micro_batches, True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch, forward only and without gradients.

        Tensors in the output are joined along dim 0; a loss or another number is the mean for the batch.

        Raises:
            UsageError: arguments that cannot be cut, or outputs that cannot be joined.
        """
        with torch.no_grad():
            parts, _ = micro_batches(args, kwargs, None, self.micro_batches, self._dims)
            share = weights(parts, self.model, self._reduction, False)
            outputs = self._run([self._forward(part) for part in parts], Gradients(), backward=False)
            return put_together(outputs, [p.rows for p in parts], share)

    def step(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Forward and backward for a batch: gradients are added to ``.grad`` as ``loss.backward()`` would, all or, if this
        fails, none.

        Args:
            *args, **kwargs: the model's arguments, with labels where it computes the loss.
            target: for ``loss_fn``; cut along the batch as the arguments are.
            return_outputs: also return what the model gave, joined. That keeps all of it until the end.

        Returns:
            The loss of the batch, detached; with ``return_outputs`` a pair of it and the output.

        Raises:
            UsageError: no loss, gradients switched off, or arguments that cannot be cut.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                four_parts(
                    "pipe.step() where gradients are switched off",
                    "a step is forward and backward",
                    "inside torch.no_grad() or torch.inference_mode()",
                    "call pipe(...) for forward only, or leave that context",
                )
            )
        if self._loss_fn is None and target is not None:
            kwargs, target = {**kwargs, "target": target}, None
        parts, cutter = micro_batches(args, kwargs, target, self.micro_batches, self._dims)
        share = weights(parts, self.model, self._reduction, self._loss_fn is not None)
        gradients = Gradients()
        try:
            bodies = [self._train(part, weight, return_outputs) for part, weight in zip(parts, share, strict=True)]
            results = self._run(bodies, gradients, backward=True)
        except BaseException:
            gradients.undo()
            raise
        gradients.keep()
        cutter.give_back()
        loss = weighted_sum([loss for loss, _ in results], share)
        return (loss, put_together([out for _, out in results], [p.rows for p in parts], share)) if return_outputs else loss

    def __str__(self) -> str:
        return draw(self.schedule)

    def _schedule(self, count: int, backward: bool) -> Schedule:
        devices = size_of(self._layout().mesh, PIPELINE)
        return make_schedule(self._name, devices, count, self._layout().stages.count // devices, backward)

    def _layout(self) -> Layout:
        layout = layout_of(self.model)
        assert layout is not None
        return layout

    def _run(self, bodies: list[Callable[[Pass], None]], gradients: Gradients, backward: bool) -> list[Any]:
        """Issue every unit in order; what each micro-batch put out."""
        ambient, moves, device_type = Ambient(), moves_of(self.model), self._layout().mesh.device_type
        seeds = torch.randint(2**62, (len(bodies),)).tolist()
        passes = [Pass(body, moves, ambient, Own(seed, device_type), gradients) for body, seed in zip(bodies, seeds, strict=True)]
        try:
            for unit in self._schedule(len(bodies), backward).order:
                one = passes[unit.micro]
                one.forward(unit.stage) if isinstance(unit, Forward) else one.backward(unit.stage)
        finally:
            for one in passes:
                one.close()
        return [one.output for one in passes]

    def _forward(self, part: MicroBatch) -> Callable[[Pass], None]:
        def body(one: Pass) -> None:
            one.output = self.model(*part.args, **part.kwargs)

        return body

    def _train(self, part: MicroBatch, weight: float, outputs: bool) -> Callable[[Pass], None]:
        def body(one: Pass) -> None:
            output = self.model(*part.args, **part.kwargs)
            loss = find_loss(output if self._loss_fn is None else self._lossof(output, part.target))
            if weight:
                one.begin_backward(loss, torch.full_like(loss, weight))
            one.output = loss.detach(), detached(output) if outputs else None

        return body

    def _lossof(self, output: Any, target: Any) -> torch.Tensor:
        assert self._loss_fn is not None
        return self._loss_fn(output) if target is None else self._loss_fn(output, target)


def pipeline(
    model: nn.Module,
    micro_batches: int,
    schedule: str = "1f1b",
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    reduction: Reduction = "mean",
    batch_dims: Mapping[str, int | None] | None = None,
) -> Pipeline:
    """Run a parallelized model in micro-batches, so that all its stages work at once.

    ``pipe.step(**batch)`` is forward and backward: it returns the loss and leaves gradients in ``.grad``. ``pipe(**batch)`` is
    forward only, and returns what the model would for the whole batch. The model is not changed.

    Args:
        model: a module that ``parallelize`` distributed, usually over a mesh with an axis ``pp``.
        micro_batches: how many parts a batch is cut into along dim 0; a batch with fewer rows into as many as it has.
        schedule: ``"gpipe"`` (all forward, then all backward), ``"1f1b"`` (by turns, fewer activations kept), or
            ``"interleaved"`` (by turns, for a model with ``virtual_stages``; devices stand idle less).
        loss_fn: ``loss_fn(output, target)`` for a model that computes no loss; the target is given to ``step``.
        reduction: how the loss goes over the batch: ``"mean"`` of its rows, or of its labels that are not -100; ``"sum"``; or
            a function that is given a micro-batch's arguments and returns how many items its loss is the mean of.
        batch_dims: for keyword arguments whose batch is not dim 0, which dim it is, or None to give every micro-batch the
            whole. Tensors whose dim 0 is not as long as the batch are given whole anyway.

    Raises:
        UsageError: a model that lies on no mesh, a schedule that is unknown or does not go with its stages, or batch dims of
            arguments that the model does not take.
    """
    where = "pipeline(model, micro_batches, schedule)"
    layout = layout_of(model)
    if layout is None:
        raise UsageError(
            four_parts(
                f"a {type(model).__name__} that lies on no mesh",
                "a pipeline runs through the stages of a parallelized model",
                where,
                "call dtorch.parallelize(model, mesh) first, with an axis 'pp' in the mesh",
            )
        )
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise UsageError(
            four_parts(f"micro_batches={micro_batches!r}", "a batch is cut into one part or more", where, "give a positive int")
        )
    if isinstance(reduction, str) and reduction not in ("mean", "sum"):
        given = f"reduction={reduction!r}"
        raise UsageError(four_parts(given, "it is 'mean', 'sum' or a function that counts", where, "use one of these"))
    check_schedule(schedule, layout.stages.count // size_of(layout.mesh, PIPELINE))
    _check_names(model, batch_dims or {}, where)
    return Pipeline(model, micro_batches, schedule, loss_fn, reduction, batch_dims or {})


def _check_names(model: nn.Module, batch_dims: Mapping[str, int | None], where: str) -> None:
    parameters = inspect.signature(type(model).forward).parameters
    unknown = sorted(batch_dims.keys() - parameters.keys())
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given, rule = f"batch_dims of {unknown}", f"{type(model).__name__}.forward takes {[*parameters][1:]}"
        raise UsageError(four_parts(given, rule, where, "name arguments of the model"))
