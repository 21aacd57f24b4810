"""The programs of docs/recipes.md, each run as its engine runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
TEXT = PAGE.read_text(encoding="utf-8").split("\n## MPI\n")[1]
PROGRAMS = {
    text.split()[1].partition(".")[0]: text
    for text in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
}


def run(tmp_path, name, before=(), **environment):
    program = tmp_path / f"{name}_program.py"
    # What it asserts is seen by its exit code; that all of it ran, by the last line.
    program.write_text(f"{PROGRAMS[name]}\nprint('done')\n")
    done = subprocess.run(
        [*before, sys.executable, program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.count("done")


def test_programs_are_found():
    assert list(PROGRAMS) == ["mpi4py", "jax", "xarray"]


def test_mpi(tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    assert run(tmp_path, "mpi4py", ["mpirun", "-n", "3"], **allowed) == 3


@pytest.mark.frameworks
def test_jax_on_four_devices(tmp_path):
    pytest.importorskip("jax", reason="jax is not installed")
    flags = "--xla_force_host_platform_device_count=4"
    assert run(tmp_path, "jax", XLA_FLAGS=flags, JAX_PLATFORMS="cpu") == 1


def test_xarray(tmp_path):
    pytest.importorskip("xarray", reason="xarray is not installed")
    pytest.importorskip("dask.array", reason="dask is not installed")
    assert run(tmp_path, "xarray") == 1
