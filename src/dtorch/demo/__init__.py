"""The demo: a real language model answers on a simulated mesh, token for token as on plain PyTorch."""

from .run import run_demo

__all__ = ["run_demo"]
