"""Random programs on global tensors, beside the same programs on plain PyTorch.

``python -m dtorch.testing.programs --help`` says how to run them. ``check`` runs one that is given as text.
"""

from .run import check

__all__ = ["check"]
