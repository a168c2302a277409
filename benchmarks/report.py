"""The table for people and the JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dtorch

from .figure import Figure
from .setting import SEED, Setting

HEADER = ("figure", "measured", "must reach", "", "best known peer")


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table, aligned; the spread is the middle half of the samples."""
    rows = [HEADER, *(_cells(f) for f in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "| " + " | ".join("-" * max(3, w) for w in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(figure: Figure) -> tuple[str, ...]:
    return figure.title, figure.measured_text(), figure.limit_text(), "ok" if figure.reached else "short", figure.peer


def notes(figures: Sequence[Figure]) -> str:
    """What else was seen, figure by figure."""
    return "\n".join(f"{f.name}: {note}" for f in figures for note in f.notes)


def machine(setting: Setting) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "dtorch": dtorch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if setting.device == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": setting.threads,
        "seed": SEED,
        "quick": setting.quick,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_json(path: Path, about: dict[str, Any], figures: Sequence[Figure], failed: dict[str, str]) -> None:
    """Write everything; ``failed`` names the groups that broke, and how."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": about, "figures": [f.as_json() for f in figures], "failed": failed}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
