"""The demo from start to end: plain PyTorch first, then the same model on the mesh, and the comparison."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh

from .drawing import draw_mesh, draw_weight, side_by_side
from .mesh import parse_mesh
from .model import HEADS, NAME, Loaded, load_model, weights_file
from .talk import INDENT, Answer, ask

FIRST_QUESTION = "What is the capital of France?"
SECOND_QUESTION = "Write one sentence about the sea."

IDENTICAL, DIFFERENT = 0, 1
"""Exit codes."""


def run_demo(prompt: str | None = None, mesh: str = "tp=2,pp=2", tokens: int = 48, device: str = "cpu") -> int:
    """Ask two questions, on plain PyTorch and on a mesh, and print both and whether the tokens are the same.

    Args:
        prompt: the second question.
        mesh: axes and devices, e.g. ``"dp=1,tp=2,pp=2"``.
        tokens: length of an answer, at most.
        device: ``"cpu"`` or ``"cuda"``; all devices of the mesh are simulated on it.

    Returns:
        Exit code: 0 when the tokens are identical, 1 when they are not.

    Raises:
        UsageError: a mesh that does not fit, a missing package, or weights that cannot be read.
    """
    wanted = parse_mesh(mesh, device)
    weights_file()
    if device != "cpu":
        dtorch.init(simulate={device: wanted.size()})
    dtorch.zeros(1, device_mesh=wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(load_model(), wanted, [FIRST_QUESTION, prompt or SECOND_QUESTION], tokens)


def _run(loaded: Loaded, mesh: DeviceMesh, questions: Sequence[str], tokens: int) -> int:
    loaded.model.to(mesh.device_type)
    print(f"\n{NAME} on plain PyTorch\n")
    expected = [_answer(loaded, q, tokens) for q in questions]
    dtorch.parallelize(loaded.model, mesh)
    print(f"{draw_mesh(mesh, _contents(loaded.model, mesh))}\n\n{_weights(loaded.model)}\n\n{NAME} on the mesh\n")
    same = []
    with dtorch.explain() as report:
        for question, before in zip(questions, expected, strict=True):
            after = _answer(loaded, question, tokens, before)
            same.append(torch.equal(before.ids, after.ids))
    print(summary(report))
    return IDENTICAL if all(same) else DIFFERENT


def _answer(loaded: Loaded, question: str, tokens: int, expected: Answer | None = None) -> Answer:
    print(f"  {question}\n{INDENT}", end="", flush=True)
    answer = ask(loaded, question, tokens)
    verdict = "" if expected is None else f"  tokens identical: {'yes' if torch.equal(expected.ids, answer.ids) else 'no'}\n"
    print(f"{INDENT}({answer.tokens} tokens in {answer.seconds:.1f} s)\n{verdict}")
    return answer


def _contents(model: Any, mesh: DeviceMesh) -> list[str]:
    """What each pipeline stage holds: which layers, and what stands outside of them."""
    out = []
    for stage in mesh.unbind("pp"):
        here = [name for name, p in model.named_parameters(remove_duplicate=False) if p.device_mesh is stage]
        layers = sorted({int(m[1]) for name in here if (m := re.search(r"layers\.(\d+)\.", name))})
        others = [name.split(".")[-2] for name in here if "layers." not in name]
        out.append(", ".join([f"layers {layers[0]} to {layers[-1]}", *others]))
    return out


def _weights(model: Any) -> str:
    """Three weights, drawn: one split by heads, one by columns, one by rows."""
    named = dict(model.named_parameters())
    query, down, table = (
        next(n for n in named if re.search(p, n))
        for p in (r"\.0\..*q_proj\.weight", r"\.0\..*down_proj\.weight", r"embed_tokens\.weight")
    )
    size = named[query].shape[0] // HEADS
    mesh = named[query].device_mesh
    heads = [named[query].local_shape(c)[0] // size for c in _coordinates_along_tp(mesh)]
    notes = [f"{' + '.join(map(str, heads))} of {HEADS} heads", "", "also the output layer"]
    blocks = [
        draw_weight(n.removeprefix("model.").removesuffix(".weight"), named[n], note)
        for n, note in zip((query, down, table), notes, strict=True)
    ]
    return "three of the weights, over the devices of tp\n\n" + side_by_side(blocks)


def _coordinates_along_tp(mesh: DeviceMesh) -> list[list[int]]:
    if "tp" not in mesh.axis_names():
        return [[0] * mesh.ndim]
    return [[i if a == mesh.axis("tp") else 0 for a in range(mesh.ndim)] for i in range(mesh.size("tp"))]


def summary(report: Any) -> str:
    """What was communicated: collectives and bytes, by mesh axis and kind. What crosses stages is put down to ``pp``."""
    count: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for event in report.events:
        key = ("pp" if event.comm.kind == "transfer" else event.comm.axis, event.comm.kind)
        count[key] += 1
        nbytes[key] += event.comm.nbytes
    lines = [
        f"  {axis:<4} {kind:<15} {count[axis, kind]:>7,} times {nbytes[axis, kind] / 1e6:>10,.2f} MB"
        for axis, kind in sorted(count)
    ]
    return "\n".join(["communication for both answers", *(lines or ["  none"])])
