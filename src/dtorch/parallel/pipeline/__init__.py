"""Micro-batched pipelines: orders of work as data, a clock that times them, and what runs a model's passes in that order."""

from .run import Pipeline, pipeline

__all__ = ["Pipeline", "pipeline"]
