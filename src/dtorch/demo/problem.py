"""Errors of the demo, in the four parts that all of dtorch's have."""

from __future__ import annotations

from dtorch import UsageError


def problem(given: str, rule: str, where: str, remedy: str) -> UsageError:
    """An error that says what was given, which rule it breaks, where, and what to do."""
    return UsageError(f"{given}\n  rule:  {rule}\n  where: {where}\n  to do: {remedy}")
