"""Reductions, scans and softmax."""

from __future__ import annotations

from ..draw import Draw

SUMS = ["sum", "nansum", "mean", "count_nonzero", "all", "any", "amax", "amin", "prod", "std", "var", "logsumexp"]
ROUND = frozenset(["mean", "std", "var", "logsumexp", "prod"])
EXACT = frozenset(["count_nonzero", "all", "any", "prod"])


def over_dims(draw: Draw) -> None:
    """Over some dims, or all."""
    name = draw.one(SUMS)
    # Of no complex numbers, PyTorch takes even the extreme.
    t = draw.tensor(lambda t: not (t.is_complex() and name in ("amax", "amin")), name in EXACT)
    value = draw.value(t)
    single = name == "prod"
    if not value.ndim or draw.chance(0.2):
        arguments = str(tuple(range(value.ndim))) if name == "logsumexp" else ""
    elif single or draw.chance(0.5):
        arguments = f"{draw.dim(t)}"
    else:
        arguments = f"{tuple(draw.random.sample(range(value.ndim), draw.between(1, value.ndim)))}"
    if arguments and name != "count_nonzero" and draw.chance(0.4):
        arguments += ", keepdim=True"
    draw.emit(f"{t}.{name}({arguments})", rounds=name in ROUND)


def along(draw: Draw) -> None:
    """Scans along a dim."""
    t = draw.tensor(lambda t: t.ndim > 0, exact=True)
    name = draw.one(("cumsum", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"))
    pair = name in ("cummax", "cummin")
    draw.emit(f"{t}.{name}({draw.dim(t)})", results=2 if pair else 1, rounds=name in ("cumprod", "logcumsumexp"))


def softmax(draw: Draw) -> None:
    """Softmax, norms and the like."""
    t = draw.tensor(lambda t: t.ndim > 0 and t.is_floating_point())
    d = draw.dim(t)
    choices = [f"{t}.softmax({d})", f"{t}.log_softmax({d})", f"{t}.norm(dim={d})", f"torch.linalg.vector_norm({t}, dim={d})"]
    n = draw.value(t).shape[-1]
    choices += [f"torch.nn.functional.layer_norm({t}, ({n},))", f"torch.var_mean({t}, {d})[{draw.between(0, 1)}]"]
    draw.emit(draw.one(choices), rounds=True)


def extreme(draw: Draw) -> None:
    """Extremes with their places."""
    t = draw.tensor(exact=True)
    value = draw.value(t)
    if not value.ndim or draw.chance(0.2):
        draw.emit(f"{t}.{draw.one(('max', 'min', 'argmax', 'argmin', 'amax'))}()", moves=True)
        return
    keep = ", keepdim=True" if draw.chance(0.3) else ""
    if draw.chance(0.4):
        draw.emit(f"{t}.{draw.one(('argmax', 'argmin'))}({draw.dim(t)}{keep})", moves=True)
    else:
        name = draw.one(("max", "min", "median"))
        draw.emit(
            f"{t}.{name}({draw.dim(t)}{keep})" + ("[0]" if name == "median" else ""),
            results=1 if name == "median" else 2,
            moves=True,
        )


def differences(draw: Draw) -> None:
    """Differences of neighbours, and the trace."""
    t = draw.tensor(lambda t: t.ndim > 0)
    trace = draw.value(t).ndim == 2 and draw.chance(0.4)
    draw.emit(f"{t}.trace()" if trace else f"{t}.diff(dim={draw.dim(t)})")


ROWS = ((10, over_dims), (4, along), (3, softmax), (5, extreme), (1, differences))
