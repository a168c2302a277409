"""Models parallelized over meshes of every kind, beside the same models on plain PyTorch.

``python -m dtorch.testing.parallel --help`` says how to run them. ``check`` runs one cell that is given as text.
"""

from .run import check

__all__ = ["check"]
