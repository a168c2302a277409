"""The sample script for Slurm, as ``sbatch`` would run it, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.cluster.network import ENVIRONMENT, ROOT, eventually
from tests.cluster.test_up import free_port

SCRIPT = ROOT / "examples" / "slurm" / "cluster.sbatch"
STAND_INS = {
    "scontrol": '[ "$1 $2" = "show hostnames" ] && printf "127.0.0.1\\n127.0.0.2\\n"',
    # Each node runs the command, after srun's own options.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nfor _ in 1 2; do "$@" & done\nwait',
}
PROGRAM = """
import os, pathlib, stat, sys
import dtorch
from dtorch import Shard, init_device_mesh
x = dtorch.arange(9.0, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(0)])
print(sys.argv[1], x.sum().item(), oct(os.stat(os.environ["DTORCH_KEY"]).st_mode & 0o777), flush=True)
sys.exit(3)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, text in STAND_INS.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    (folder / "program.py").write_text(PROGRAM)
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "PYTHON": sys.executable,
        "DTORCH_PORT": str(free_port()),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env={**ENVIRONMENT, **job}, capture_output=True, text=True, timeout=110)


def test_a_job(tmp_path: Path) -> None:
    ran = run(tmp_path, "program.py", "hello")
    assert (ran.returncode, ran.stdout) == (3, f"{tmp_path}/.dtorch-17.key\nhello 36.0 0o600\n"), ran.stderr
    assert ran.stderr.count("all 1 workers are there") == 2
    eventually(lambda: not list(tmp_path.glob(".dtorch-*")))


def test_without_a_program(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.returncode == 2 and "usage: sbatch" in ran.stderr
