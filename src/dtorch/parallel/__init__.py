"""Distributing modules: ``parallelize`` and what it decides by; ``describe`` says what it did."""

from . import nn
from .apply import parallelize
from .description import Description, describe
from .layout import Layout
from .plan import Plan, Row
from .sources import plan_of

__all__ = ["Description", "Layout", "Plan", "Row", "describe", "nn", "parallelize", "plan_of"]
