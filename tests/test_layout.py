"""How large files and functions may get before they are taken apart."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import linattn_numpy
from linattn import _generic, typing

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("linattn", "backends", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_SOURCE_LINES, MAX_TEST_LINES = 600, 1100
MAX_CODE_LINES = 60
MAX_PARAMETERS = 8
MAX_PRIVATE_FILES = 8
MAX_DRIVER_MODULES, MAX_DRIVER_IMPORTS = 25, 88
MAX_PROBLEM_FIELDS = 22

# Signatures that others chose: what users call, the contract of backends, torch's autograd.
CHOSEN = {"linear_attention", "linear_attention_vjp", "forward", "compare", "command"}
CONTRACT = {name for name in vars(typing.BlockTier) if not name.startswith("_")}

# Files of the NumPy backend that hold nothing which the generic code has too, and why.
WITHOUT_TWIN = {
    "assigned": "a fast path of reduce_block for one spec",
    "blas": "the thread pool of the BLAS",
    "borders": "where sequences begin in a tile",
    "buffers": "memory that is used again",
    "causal_scales": "when a causal block may go unshifted",
    "decoding": "whole problems of one token, which the driver walks otherwise",
    "limits": "ranges of floats in which the unshifted path is right",
    "products": "products into buffers",
    "recurrence_chunks": "chunks of a recurrence, whose generic code is in linattn/_recurrence",
    "recurrences": "whole recurrences, which are walked over in linattn/_recurrence otherwise",
    "threads": "threads",
    "tiles": "tiles that stay in cache",
    "token_features": "features of one token, for decoding",
    "triangles": "causal sums, a tile at a time",
    "tuning": "measured constants",
}

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(source: str) -> list[ast.FunctionDef | ast.Assert]:
    found = ast.walk(ast.parse(source))
    return [node for node in found if isinstance(node, ast.FunctionDef | ast.Assert)]


def functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in nodes(source) if isinstance(node, ast.FunctionDef)]


def code_lines(source: str) -> set[int]:
    """Return the lines that hold more than a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        line
        for token in tokens
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }


def own_lines(function: ast.FunctionDef) -> set[int]:
    """Return the lines of a function without its docstring."""
    lines = set(range(function.lineno, (function.end_lineno or 0) + 1))
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return lines


def length(function: ast.FunctionDef, code: set[int]) -> int:
    """Lines of code of a function, without its docstring."""
    return len(own_lines(function) & code)


def num_parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def is_private(path: Path, function: ast.FunctionDef) -> bool:
    parts = path.relative_to(ROOT).with_suffix("").parts
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return hidden or parts[0] != "linattn" or function.name.startswith("_")


def test_files_are_short():
    limits = [(SOURCES, MAX_SOURCE_LINES), (TESTS, MAX_TEST_LINES)]
    long = {
        name_of(path): count
        for paths, limit in limits
        for path in paths
        if (count := path.read_text(encoding="utf-8").count("\n")) > limit
    }
    assert long == {}


def test_functions_are_short():
    long = {}
    for path in (*SOURCES, *TESTS):
        source = path.read_text(encoding="utf-8")
        # Tokens are slow: only where a function has so many lines at all.
        many = [f for f in functions(source) if (f.end_lineno or 0) - f.lineno >= MAX_CODE_LINES]
        code = code_lines(source) if many else set()
        for function in many:
            if (count := length(function, code)) > MAX_CODE_LINES:
                long[f"{name_of(path)}::{function.name}"] = count
    assert long == {}


def test_functions_of_our_own_take_few_arguments():
    many = {
        f"{name_of(path)}::{function.name}": count
        for path in SOURCES
        if path.name != "tile_kernels.py"  # a kernel has a parameter for each array and size
        for function in functions(path.read_text(encoding="utf-8"))
        if is_private(path, function)
        and function.name not in CHOSEN | CONTRACT
        and (count := num_parameters(function)) > MAX_PARAMETERS
    }
    assert many == {}


def is_mute(test: ast.expr) -> bool:
    """Whether a failed assertion would say no more of arrays than that something is wrong."""
    if isinstance(test, ast.BoolOp):
        return any(is_mute(part) for part in test.values)
    names = {"all", "allclose", "array_equal"}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, names = test.operand, {"any"}
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Attribute)
        and test.func.attr in names
    )


def test_assertions_about_arrays_print_entries():
    """`assert_array_equal(a, b)` prints what differs; ``assert (a == b).all()`` does not."""
    mute = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS
        for node in nodes(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.Assert) and is_mute(node.test)
    ]
    assert mute == []


def test_few_private_files_lie_at_the_top():
    found = sorted(p.name for p in (ROOT / "linattn").glob("_*.py") if not p.name.startswith("__"))
    assert len(found) <= MAX_PRIVATE_FILES, found


def test_files_of_the_numpy_backend_are_named_as_their_generic_twins():
    numpy, generic = (
        {path.stem for path in (ROOT / folder).glob("[!_]*.py")}
        for folder in ("backends/linattn_numpy", "linattn/_generic")
    )
    assert numpy - generic == set(WITHOUT_TWIN)


@pytest.mark.parametrize("name", sorted(CONTRACT & set(linattn_numpy.__all__)))
def test_a_block_function_is_in_the_file_of_its_generic_twin(name):
    numpy, generic = (
        getattr(package, name).__module__.rpartition(".")[2]
        for package in (linattn_numpy, _generic)
    )
    assert numpy == generic


@pytest.mark.parametrize(
    "lines", [MAX_CODE_LINES, MAX_CODE_LINES + 1], ids=["just short enough", "too long"]
)
def test_lines_are_counted(lines):
    body = "    x = 1\n\n    # a comment\n" * (lines - 1)
    source = f'def f(a, b):\n    """Docstring.\n\n    More of it.\n    """\n{body}'
    (function,) = functions(source)
    assert length(function, code_lines(source)) == lines
    assert num_parameters(function) == 2


def test_a_problem_is_a_few_records():
    assert len(fields(typing.Problem)) <= MAX_PROBLEM_FIELDS


def test_the_driver_is_few_modules():
    folder = ROOT / "linattn" / "_driver"
    modules = {
        path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")
    }
    imports = {
        (name, node.module)
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("linattn._driver.")
    }
    assert len(modules) <= MAX_DRIVER_MODULES
    assert len(imports) <= MAX_DRIVER_IMPORTS


def test_the_driver_asks_what_is_visible_where_it_is_made():
    """Elsewhere a query sees some keys before its place and some after: no walk asks for causal."""
    asking = {
        path.name
        for path in (ROOT / "linattn" / "_driver").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "is_causal"
        # A run of queries in a window may be causal by itself.
        and getattr(node.value, "id", "") != "self"
    }
    assert asking == {"options.py"}
