"""``dtorch.nn`` under its own name, so that ``from dtorch.nn import ...`` works; see ``parallel/nn.py``."""

from .parallel.nn import (
    ColumnParallelLinear,
    ColumnParallelLinearWithReplicateOutput,
    RowParallelLinear,
    RowParallelLinearWithReplicateOutput,
    VocabParallelEmbedding,
    assign_layers_to_stages,
    fully_shard,
)
from .parallel.nn import __getattr__ as __getattr__

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "VocabParallelEmbedding",
    "assign_layers_to_stages",
    "fully_shard",
]
