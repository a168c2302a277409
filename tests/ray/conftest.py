"""Tests on Ray run where it is installed: ``make test-ray``, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]
