"""The recipes of CONTRIBUTING: a made-up spec and a made-up block function.

Each is tried in this process, as far as that goes, and by its recipe in a copy of the tree.
"""

# Records that are made up.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import filecmp
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from linattn.typing import Array, Features, State

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("linattn", "backends", "docs", "tests")
IGNORED = ("__pycache__", "*.png", "fake_gpu")

# A made-up spec -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cube:
    """A made-up spec: ``phi = (x P)^2 + shift``."""

    P: Array
    shift: Array


class CubeMap:
    """A map of the made-up spec."""

    num_features = 8

    def __init__(self, heads=(), dim=6):
        rng = np.random.default_rng(0)
        self.spec = Cube(rng.standard_normal((*heads, dim, 8)), rng.random((*heads, 8)))

    def query_spec(self, xp, dtype, device):
        return Cube(*(xp.asarray(a, dtype=dtype) for a in (self.spec.P, self.spec.shift)))

    key_spec = query_spec

    def query_features(self, x):
        return Features(None, np.matmul(x, self.spec.P) ** 2 + self.spec.shift[..., None, :])

    key_features = query_features


def cube_features(spec, tokens, xp):
    values = xp.matmul(tokens.x, spec.P) ** 2 + spec.shift[..., None, :]
    return Features(None, values)


def cube_vjp(spec, tokens, cotangent, xp):
    u = xp.matmul(tokens.x, spec.P)
    return xp.matmul(2 * u * cotangent.values, xp.matrix_transpose(spec.P))


# A made-up block function -------------------------------------------------------------------------


def rescale_state(state: State) -> State:
    """Double the sums of a state and halve its scale."""
    return State(2 * state.kvz, state.log_scale - 0.6931471805599453, state.length)


# Both by their recipes ----------------------------------------------------------------------------


def places_of(page: str, title: str) -> set[str]:
    """Files and folders that the steps of a recipe name."""
    section = re.split(r"^## ", page.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]
    steps = re.findall(r"^\d\. (?:.+\n)+", section, flags=re.MULTILINE)
    return {place for step in steps for place in re.findall(r"`([\w.]+/[\w./]*)`", step)}


def place_of(file: str, places: set[str]) -> str:
    """The place of a recipe where a file is; the file itself where it is in none."""
    folders = [place for place in places if place.endswith("/") and file.startswith(place)]
    return file if file in places or not folders else max(folders, key=len)


def changed_files(copy: Path) -> set[str]:
    files = [
        path.relative_to(copy)
        for folder in FOLDERS
        for path in (copy / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return {
        file.as_posix()
        for file in files
        if not (ROOT / file).exists() or not filecmp.cmp(copy / file, ROOT / file, shallow=False)
    }


class Copy:
    """A copy of the tree that a recipe is followed in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns(*IGNORED))
        shutil.copy(ROOT / "pyproject.toml", path)

    def add(self, file: str, text: str, *, before: str = "", after: str = "") -> None:
        """Put text where a file has another, or at its end."""
        source = (self.path / file).read_text(encoding="utf-8")
        anchor = before or after or source
        assert source.count(anchor) == 1, f"{file} has {source.count(anchor)} times {anchor!r}"
        changed = source.replace(anchor, text + anchor if before else anchor + text)
        (self.path / file).write_text(changed, encoding="utf-8")

    def run(self, *arguments: str) -> None:
        paths = os.pathsep.join([str(self.path), str(self.path / "backends")])
        result = subprocess.run(
            [sys.executable, "-B", *arguments],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr


LISTED = "__all__ = [\n"


def add_spec(copy: Copy) -> None:
    file, name = "linattn/typing/specs.py", '    "Cube",\n'
    copy.add(file, name, after=LISTED)
    copy.add(file, f"{inspect.getsource(Cube)}\n\n", before="Spec: TypeAlias = Exponential")
    copy.add(file, "Cube | ", after="\nSpec: TypeAlias = ")
    file, imported = "linattn/typing/__init__.py", "    Cube,\n"
    copy.add(file, imported, after="from linattn.typing.specs import (\n")
    copy.add(file, name, after=LISTED)
    file = "linattn/_generic/specs.py"
    copy.add(file, imported, after="from linattn.typing import (\n")
    for rule in (cube_features, cube_vjp):
        copy.add(file, f"{inspect.getsource(rule)}\n\n", before="SPECS: dict")
    entry = '    Cube: SpecRules({"P": 2, "shift": 1}, cube_features, cube_vjp),\n'
    copy.add(file, entry, after="SPECS: dict[type, SpecRules] = {\n")
    file = "linattn/testing/_blocks.py"
    copy.add(file, imported, after="from linattn.typing import (\n")
    pair = '    cube = Cube(matrix(), logs() ** 2)\n    yield Pair("Cube", cube, cube)\n'
    copy.add(file, pair, before="    opaque = Opaque(")
    row = "| `Cube(P, shift)` | `(x P)^2 + shift` |\n"
    copy.add("docs/typing.md", row, before="| `Opaque(fn, vjp)` |")
    file = "tests/attentions.py"
    copy.add(file, "Cube, ", after="from linattn.typing import ")
    copy.add(file, f"{inspect.getsource(CubeMap)}\n\n", before="MAPS: dict")
    copy.add(file, '    "cube": CubeMap(dim=DIM),\n', after="MAPS: dict[str, Any] = {\n")


SPEC_WORKS = """
import linattn_numpy
from linattn.testing import check_backend
from linattn.typing import Cube

def read_block(query_spec, tokens, state, want_log):
    assert not isinstance(query_spec, Cube), "tried on the new spec"
    return NotImplemented

options = {"num_problems": 40, "dtypes": ["float64"], "extras": ["limited_threads"]}
report = check_backend(linattn_numpy, **options)
assert report.passed, report
linattn_numpy.read_block = read_block
report = check_backend(linattn_numpy, on_fail="return", **options)
assert "tried on the new spec" in str(report), report
"""


def add_block_function(copy: Copy) -> None:
    body, name = inspect.getsource(rescale_state), '    "rescale_state",\n'
    may_decline = body.replace("-> State:", "-> State | Declined:")
    method = re.sub(r"    return .*", "    ...", f"\n@staticmethod\n{may_decline}")
    file = "linattn/typing/backend.py"
    copy.add(file, textwrap.indent(method, "    "), before="\n\nclass Services(")
    file = "linattn/_generic/states.py"
    copy.add(file, f"\n\n{body}")
    file = "linattn/_generic/__init__.py"
    copy.add(file, "    rescale_state,\n", after="from linattn._generic.states import (\n")
    call, read = (
        "                state = functions.rescale_state(state)\n",
        "                read, (spec, seen) = state, read_spec(problem, state)",
    )
    copy.add("linattn/_driver/runner.py", call, before=read)
    declined = '    if state.kvz.dtype != "float64":\n        return Declined("not in float64")\n'
    copy.add(
        "backends/linattn_numpy/states.py",
        "\n\n" + may_decline.replace("    return", f"{declined}    return"),
    )
    file = "backends/linattn_numpy/__init__.py"
    copy.add(file, "    rescale_state,\n", after="from linattn_numpy.states import (\n")
    copy.add(file, name, after=LISTED)
    declared = "    implements(Backend.rescale_state)(rescale_state)\n"
    copy.add(file, declared, before="    implements(Backend.scan_block)")
    file = "linattn/testing/_blocks.py"
    copy.add(file, f"    {name}", before='        "exact_more",\n')
    copy.add(
        file,
        '        "rescale_state": (state,),\n',
        after="    arguments: dict[str, tuple[Any, ...]] = {\n",
    )
    result = '    "rescale_state": ("state",),\n'
    copy.add("linattn/testing/backend.py", result, after="RESULTS = {\n")


BLOCK_FUNCTION_WORKS = """
import numpy as np
import linattn
import linattn_numpy
from linattn.feature_maps import EluFeatures
from linattn.testing import check_backend

query, key, value = np.random.default_rng(0).standard_normal((3, 2, 40, 6))
wanted = linattn.reference.kernel_attention(query, key, value, EluFeatures())
for dtype, reason in (("float64", ""), ("float32", "not in float64")):
    arrays = (x.astype(dtype) for x in (query, key, value))
    with linattn.explain() as report:
        out = linattn.linear_attention(*arrays, EluFeatures())
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    reasons = [choice.reason for choice in report.choices if choice.function == "rescale_state"]
    assert reasons == [reason], report
report = check_backend(linattn_numpy, num_problems=20, extras=["limited_threads"])
assert report.passed, report
(row,) = (row for row in report.rows if row.check == "rescale_state")
assert "declined: not in float64" in row.detail, report
linattn_numpy.rescale_state = lambda state: state._replace(length=1)
options = {"num_problems": 20, "extras": ["limited_threads"], "on_fail": "return"}
report = check_backend(linattn_numpy, **options)
assert [row.check for row in report.rows if row.result == "FAILED"] == ["rescale_state"], report
"""


# Tests of the suite that a new function must leave green.
CONTRACT = [
    "tests/test_contract.py",
    "tests/test_layout.py",
    "-k",
    "twin or type or of_the_contract",
]


@pytest.mark.parametrize(
    ("title", "add", "works", "tests"),
    [
        ("Add a spec", add_spec, SPEC_WORKS, ["tests/test_masks.py", "-k", "cube"]),
        ("Add a block function", add_block_function, BLOCK_FUNCTION_WORKS, CONTRACT),
    ],
)
def test_a_recipe_names_every_place_and_no_other(tmp_path, title, add, works, tests):
    copy = Copy(tmp_path)
    add(copy)
    places = places_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), title)
    assert {place_of(file, places) for file in changed_files(tmp_path)} == places
    copied = f"import linattn; assert linattn.__file__.startswith({str(tmp_path)!r})\n"
    copy.run("-c", copied + works)
    copy.run(
        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not frameworks", *tests
    )
