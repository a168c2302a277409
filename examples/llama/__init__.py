"""A Llama written with ``dtorch.nn``, for any mesh. ``python -m examples.llama`` compares it with that of transformers."""

from .model import Llama

__all__ = ["Llama"]
