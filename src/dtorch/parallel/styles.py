"""Tensor-parallel styles: which dim of a weight a style's name splits.

The names are those of the tensor-parallel plans that Hugging Face models carry. Of their meaning only the split of the
weights is needed: what has to be communicated follows from it, operator by operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..core.errors import UsageError, four_parts


@dataclass(frozen=True, slots=True)
class Style:
    """A tensor-parallel style.

    Attributes:
        side: ``"out"`` splits a weight's output features, ``"in"`` its input features, ``"rows"`` its dim 0; None keeps
            it whole.
        output: ``"gather"`` makes the module's output whole where no gradient is wanted; ``"sum"`` adds up a partial
            output at once, since more than one operator will use it; None leaves it as it comes.
        packed: whether the split dim holds several matrices one after the other.
    """

    side: str | None
    output: str | None = None
    packed: bool = False


def style_named(name: str, where: str) -> Style:
    """The style of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in STYLES:
        raise UsageError(
            four_parts(
                f"style {name!r}",
                f"a style is one of {sorted(STYLES)}",
                where,
                "use one of these, or placements by axis such as {'tp': Shard(0)}",
            )
        )
    return STYLES[name]


def split_dim(style: Style, owner: nn.Module, name: str, ndim: int) -> int | None:
    """The dim that a style splits of one parameter of a module, or None where it stays whole.

    A bias goes with the output features; a table of embeddings has its features on dim 1.
    """
    if style.side is None or ndim == 0:
        return None
    if style.side == "rows":
        return 0 if ndim > 1 else None
    out_dim, in_dim = feature_dims(owner)
    if ndim == 1 or "bias" in name:
        return ndim - 1 if style.side == "out" and not isinstance(owner, nn.Embedding) else None
    return (out_dim if style.side == "out" else in_dim) % ndim


def feature_dims(owner: nn.Module) -> tuple[int, int]:
    """Dims of output and input features in a module's weight."""
    for kinds, dims in FEATURE_DIMS:
        if any(kind in kinds for kind in (base.__name__ for base in type(owner).__mro__)):
            return dims
    return -2, -1


# Base class name -> dims of (output features, input features). Others hold them in their last two dims, as Linear does.
FEATURE_DIMS = (
    (("Conv1D", "_ConvTransposeNd"), (1, 0)),
    (("_ConvNd",), (0, 1)),
    (("Embedding", "EmbeddingBag"), (1, 0)),
)

STYLES = {
    "colwise": Style("out"),
    "colwise_gather_output": Style("out", output="gather"),
    "colwise_rep": Style("out", output="gather"),
    "packed_colwise": Style("out", packed=True),
    "rowwise": Style("in"),
    "rowwise_split_input": Style("in"),
    "rowwise_rep": Style("in"),
    "packed_rowwise": Style("in", packed=True),
    "embedding_rowwise": Style("rows", output="sum"),
    "embedding_colwise": Style("out"),
    "replicate": Style(None),
    "replicated": Style(None),
    "replicated_with_grad_allreduce": Style(None),
    "mla_kv_a_proj": Style(None),
    "sequence_parallel": Style(None),
    "all_reduce": Style(None),
    "activation": Style(None),
    "moe_tp_experts": Style(None),
    "ep_dispatch_experts": Style(None),
    "ep_router": Style(None),
    "grouped_gemm": Style(None),
    "moe_identity_expert": Style(None),
    "local": Style(None),
    "local_params": Style(None),
}
