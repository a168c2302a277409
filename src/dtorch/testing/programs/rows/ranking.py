"""Sorting, ranks, and searches."""

from __future__ import annotations

from ..draw import Draw


def sort(draw: Draw) -> None:
    """Sorted, with stable places."""
    t = draw.tensor(lambda t: t.ndim > 0, exact=True)
    more = draw.one(("", ", descending=True"))
    if draw.chance(0.6):
        draw.emit(f"{t}.sort(dim={draw.dim(t)}, stable=True{more})", results=2, moves=True)
    else:
        draw.emit(f"{t}.argsort(dim={draw.dim(t)}, stable=True{more})", moves=True)


def top(draw: Draw) -> None:
    """The largest, the k-th, each once. Of ties, which one is taken is not defined, so places are left out."""
    t = draw.tensor(lambda t: t.ndim > 0 and not t.requires_grad, exact=True)
    d = draw.dim(t)
    n = draw.value(t).shape[d]
    choices = [
        f"{t}.topk({draw.between(0, n)}, {d})[0]",
        f"{t}.kthvalue({draw.between(1, max(n, 1))}, {d})[0]",
        f"{t}.unique()",
        f"{t}.msort()",
    ]
    choices += [f"{t}.topk({draw.between(0, n)}, {d}, largest=False)[0]", f"{t}.quantile(0.5, {d})", f"{t}.mode({d})[0]"]
    draw.emit(draw.one(choices), moves=True)


def search(draw: Draw) -> None:
    """Places in a sorted vector."""
    t = draw.tensor(exact=True)
    borders = draw.given((draw.size(),), draw.value(t).dtype)
    right = draw.one(("", ", right=True"))
    draw.emit(
        draw.one(
            (
                f"torch.bucketize({t}, {borders}.sort()[0]{right})",
                f"torch.searchsorted({borders}.sort()[0], {t}{right})",
                f"torch.isin({t}, {borders})",
            )
        ),
        moves=True,
    )


def counts(draw: Draw) -> None:
    """Histograms of small integers."""
    t = draw.tensor(lambda t: not t.is_floating_point() and not t.is_complex() and t.ndim == 1)
    draw.emit(draw.one((f"torch.bincount({t} % 5)", f"torch.nn.functional.one_hot({t} % 5, 5)")), moves=True)


ROWS = ((5, sort), (3, top), (1, search), (1, counts))
