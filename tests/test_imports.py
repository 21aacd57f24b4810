"""What importing and calling linattn loads, each time in an interpreter of its own."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from functools import cache

import pytest

import linattn

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


@cache
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


def test_import_adds_nothing_to_numpy():
    added = modules_after("import numpy, linattn") - modules_after("import numpy")
    assert {name for name in added if name.startswith("linattn")} == {"linattn"}
    assert added <= {"__future__", "linattn", *ALLOWED_AT_IMPORT}


def test_the_first_function_adds_little_to_numpy():
    # Recent versions of NumPy load what dataclasses loads.
    use = "import linattn\nlinattn.linear_attention"
    added = modules_after(use) - modules_after("import numpy, dataclasses")
    assert "linattn.functional" in added
    others = {name for name in added if not name.startswith(ALLOWED_PREFIXES)}
    assert others - ALLOWED_AT_IMPORT == set()


def test_gradients_are_loaded_by_their_first_use():
    first = "import linattn\nlinattn.linear_attention"
    use = f"{first}\nlinattn.linear_attention_vjp"
    later = modules_after(use) - modules_after(first)
    assert {"linattn.gradients", "linattn._driver.backward"} <= later
    assert roots(modules_after(use)) & OPTIONAL == set()


SUBMODULES = [
    *("baselines", "datasets", "diagnostics", "feature_maps", "gradients", "interop", "kernels"),
    "layers",
    *("positions", "reference", "sampling", "sklearn", "stream", "testing", "typing"),
]


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_are_loaded_by_their_first_use(name):
    loaded = modules_after(f"import linattn\nassert linattn.{name}.__name__ == 'linattn.{name}'")
    assert f"linattn.{name}" in loaded
    assert f"linattn.{name}" not in modules_after("import linattn")


@pytest.mark.frameworks
@pytest.mark.parametrize("name", ["torch", "jax", "transformers"])
def test_modules_for_frameworks_are_loaded_by_their_first_use(name):
    pytest.importorskip(name)
    use = (
        f"import warnings; warnings.simplefilter('ignore')\nimport linattn\nlinattn.interop.{name}"
    )
    assert name in modules_after(use)
    assert name not in modules_after("import linattn\nlinattn.interop")


MISSING = """
import sys
sys.modules[{library!r}] = None
import linattn
try:
    linattn.{module}
except ImportError as error:
    assert {words!r} in str(error) and "pip install" in str(error), error
else:
    raise SystemExit("no error")
assert linattn.linear_attention
"""


@pytest.mark.parametrize(
    ("module", "library", "words"),
    [
        ("interop.torch", "torch", "linattn.interop.torch needs torch"),
        ("interop.jax", "jax", "linattn.interop.jax needs jax"),
        ("interop.onnx", "ndonnx", "linattn.interop.onnx needs ndonnx"),
        (
            "interop.transformers",
            "transformers",
            "interop.transformers needs torch",
        ),
        ("sklearn", "sklearn.utils.validation", "linattn.sklearn needs scikit-learn"),
        ("testing", "hypothesis", "linattn.testing needs hypothesis"),
    ],
)
def test_a_module_without_its_library_names_it(module, library, words):
    modules_after(MISSING.format(module=module, library=library, words=words))


def test_dir_lists_what_is_for_users():
    program = (
        "import linattn\nlinattn.linear_attention, linattn.attention, linattn.load_state\n"
        "print(*(n for n in dir(linattn) if n[0] != '_'))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    names = {name for name in linattn.__all__ if name[0] != "_"}
    assert finished.stdout.split() == sorted(names | {*SUBMODULES})
    frameworks = {"torch", "jax", "transformers"}
    there = {name for name in frameworks if importlib.util.find_spec(name) is not None}
    assert frameworks & set(dir(linattn.interop)) == there


def test_help_needs_no_optional_library():
    program = (
        "import sys\n"
        "for name in ('hypothesis', 'jax', 'sklearn', 'torch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import linattn, pydoc\n"
        "assert 'linear_attention' in pydoc.render_doc(linattn)\n"
        "assert pydoc.render_doc(linattn.interop)\n"
        "assert not {'sklearn', 'testing'} & set(dir(linattn))\n"
        "assert not {'torch', 'jax', 'transformers'} & set(dir(linattn.interop))"
    )
    modules_after(program)


def test_a_star_imports_every_public_name_once():
    program = (
        "from linattn import *\nimport linattn, pickle, sys\n"
        "assert all(name in globals() for name in linattn.__all__)\n"
        "assert linear_attention is linattn.linear_attention\n"
        "assert State is linattn.State\n"
        "assert pickle.loads(pickle.dumps(linear_attention)) is linear_attention"
    )
    assert roots(modules_after(program)) & OPTIONAL == set()


def test_help_says_where_to_start():
    text = linattn.__doc__ or ""
    for name in ("attention", "linear_attention", "softmax_attention"):
        assert f":func:`{name}`" in text
    for name in SUBMODULES:
        assert f"``{name}``" in text
    assert doctest.testmod(linattn).failed == 0
    assert doctest.DocTestFinder().find(linattn)[0].examples


def test_backend_is_found_at_the_first_call_only():
    backends = {"linattn_numpy", "linattn_cupy"}
    assert roots(modules_after("import linattn")) & backends == set()
    assert roots(modules_after(CALL)) & backends == {"linattn_numpy"}
