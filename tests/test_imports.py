"""What importing and calling linattn loads, each time in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = {
    "array_api_strict",
    "cupy",
    "dask",
    "hypothesis",
    "jax",
    "matplotlib",
    "pytest",
    "rich",
    "scipy",
    "sklearn",
    "torch",
    "typer",
}

CALL = """
import numpy
import linattn
from linattn.feature_maps import PositiveFeatures
x = numpy.ones((2, 5, 4), dtype=numpy.float32)
for is_causal in (False, True):
    out = linattn.linear_attention(x, x, x, PositiveFeatures(4, rng=0), is_causal=is_causal)
    assert type(out) is numpy.ndarray and out.shape == x.shape
"""

# What the package may load at import beyond itself and what NumPy brings: small, and no array
# namespace. A new name here is a cost that every user pays: benchmarks/import_time.py tells it.
ALLOWED_AT_IMPORT = {
    "__future__",
    "array_api_compat",
    "copy",
    "dataclasses",
    "errno",
    "linattn",
    "numpy.typing",
    "zlib",
}
ALLOWED_PREFIXES = ("array_api_compat.common", "linattn.", "numpy._typing.")


def modules_after(program: str) -> set[str]:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("program", ["import linattn", CALL], ids=["import", "numpy-call"])
def test_no_optional_library_is_loaded(program):
    assert roots(modules_after(program)) & OPTIONAL == set()


def test_import_adds_little_to_numpy():
    # Recent versions of NumPy load what dataclasses loads.
    added = modules_after("import linattn") - modules_after("import numpy, dataclasses")
    assert "linattn.functional" in added
    others = {name for name in added if not name.startswith(ALLOWED_PREFIXES)}
    assert others - ALLOWED_AT_IMPORT == set()


def test_gradients_are_loaded_by_their_first_use():
    use = "import linattn\nlinattn.linear_attention_vjp"
    later = modules_after(use) - modules_after("import linattn")
    assert {"linattn.gradients", "linattn._driver.backward"} <= later
    assert roots(modules_after(use)) & OPTIONAL == set()


def test_backend_is_found_at_the_first_call_only():
    backends = {"linattn_numpy", "linattn_cupy"}
    assert roots(modules_after("import linattn")) & backends == set()
    assert roots(modules_after(CALL)) & backends == {"linattn_numpy"}
