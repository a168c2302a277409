"""Weights between files and the devices of a mesh: what is read where, and by which name."""

from .load import load_pretrained
from .save import save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
