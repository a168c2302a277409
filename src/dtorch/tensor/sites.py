"""Where an operator was issued: the innermost frame that is neither PyTorch's nor dtorch's."""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

Site = tuple[CodeType, int] | None
"""Code object and last instruction: cheap to take, turned into file and line only when somebody asks."""

_LIBRARY_ROOTS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
LIBRARY: dict[str, bool] = {}
"""What is known already of source files."""


def is_library(filename: str) -> bool:
    """Whether a source file belongs to PyTorch or dtorch (or is generated code without a file)."""
    known = LIBRARY.get(filename)
    if known is None:
        known = LIBRARY[filename] = filename.startswith((*_LIBRARY_ROOTS, "<frozen"))
    return known


def current_site() -> Site:
    """The site of the caller's caller; None on a thread that runs no user code."""
    frame = sys._getframe(1)
    while LIBRARY.get(frame.f_code.co_filename, True) and is_library(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def describe_site(site: Site) -> str:
    """``file:line in function``."""
    if site is None:
        return "the autograd engine"
    return f"{site[0].co_filename}:{line_of(site)} in {site[0].co_qualname}"


def line_of(site: tuple[CodeType, int]) -> int:
    """Line number in the site's file."""
    code, lasti = site
    return next((n for start, end, n in code.co_lines() if start <= lasti < end and n is not None), code.co_firstlineno)
