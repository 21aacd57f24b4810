"""A process that was forked from one that used a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, cupy, linattn
query, key, value = cupy.ones((3, 2, 200, 32), dtype="float32")
phi = linattn.feature_maps.EluFeatures()
linattn.linear_attention(query, key, value, phi)
if os.fork() == 0:
    try:
        linattn.linear_attention(query, key, value, phi)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.gpu
def test_a_forked_process_is_told():
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # without a driver CuPy raises errors of its own
        pytest.skip(f"cupy: no GPU: {error}")
    if not count:
        pytest.skip("cupy: no GPU")
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("CUDARuntimeError cudaErrorInitializationError")
