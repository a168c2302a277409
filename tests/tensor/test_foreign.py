"""Functions and operators of a program and of its modules reach workers in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dtorch

MODULE = """
import torch

@torch.library.custom_op("here::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)

made = torch.library.Library("there", "DEF")
made.define("thrice(Tensor x) -> Tensor")
made.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
torch.library.register_fake("there::thrice", torch.empty_like, lib=made)
"""

PROGRAM = r"""
import pathlib, sys, types, warnings
import torch, operators_of_mine, dtorch
from dtorch import Shard, init_device_mesh

warnings.simplefilter("ignore")
HALF = 0.5

@torch.library.custom_op("main::halved", mutates_args=())
def halved(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return x * HALF if y is None else x * HALF + y

@halved.register_fake
def _(x, y=None):
    return torch.empty_like(x)

@torch.library.custom_op("main::raise_", mutates_args=("x",))
def raise_(x: torch.Tensor, n: int) -> None:
    x += n

x = dtorch.arange(6.0, device_mesh=init_device_mesh("cpu", 3), placements=[Shard(0)])
print((x + 1).sum().item())

# From here on workers run.
pathlib.Path("later").mkdir()
pathlib.Path("later", "found_later.py").write_text("def seven(x): return other(x) + 7\ndef other(x): return x * 1")
sys.path.insert(0, "later")
import found_later
made = types.ModuleType("made_here")
sys.modules["made_here"] = made
exec("def eight(x): return other(x) + 8\ndef other(x): return x * 1", vars(made))
for function in (found_later.seven, made.eight):
    print(dtorch.local_map(function, [[Shard(0)]], [Shard(0)])(x).tolist())

lost = torch.library.Library("lost", "DEF")
lost.define("nowhere(Tensor x) -> Tensor")
lost.impl("nowhere", lambda x: x * 1, "CompositeExplicitAutograd")
torch.library.register_fake("lost::nowhere", torch.empty_like, lib=lost)

print(torch.ops.here.twice(x).tolist(), torch.ops.there.thrice(x).tolist())
print(halved(x).tolist(), halved(x, x).tolist())
raise_(x, 4)
print(x.tolist())
try:
    torch.ops.lost.nowhere(x)
except dtorch.UsageError as error:
    print(str(error).splitlines()[0])
print((x + 1).sum().item())
"""

PRINTED = [
    "21.0",
    "[7.0, 8.0, 9.0, 10.0, 11.0, 12.0]",
    "[8.0, 9.0, 10.0, 11.0, 12.0, 13.0]",
    "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0] [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]",
    "[0.0, 0.5, 1.0, 1.5, 2.0, 2.5] [0.0, 1.5, 3.0, 4.5, 6.0, 7.5]",
    "[4.0, 5.0, 6.0, 7.0, 8.0, 9.0]",
    "the operator lost::nowhere, registered at {program}",
    "45.0",
]


def test_wherever_they_are_from(tmp_path: Path) -> None:
    (tmp_path / "operators_of_mine.py").write_text(MODULE)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, "DTORCH_WORKERS": "2", "PYTHONPATH": str(Path(dtorch.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [line.format(program=program) for line in PRINTED]
