"""Distributing modules: ``parallelize`` and what it decides by; ``describe`` says what it did."""

from . import nn
from .apply import parallelize
from .layout import Layout, describe
from .plan import Plan, Row
from .sources import plan_of

__all__ = ["Layout", "Plan", "Row", "describe", "nn", "parallelize", "plan_of"]
