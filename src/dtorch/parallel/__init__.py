"""Distributing modules: ``parallelize`` and what it decides by; ``describe`` says what it did."""

from . import nn
from .apply import parallelize
from .layout import Layout, describe

__all__ = ["Layout", "describe", "nn", "parallelize"]
