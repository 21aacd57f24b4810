"""What the README and the pages show: every example runs, every number is what a command prints."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import linattn
from linattn._driver import steps
from linattn.automatic import _costs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

EXAMPLE = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Those of MPI and xarray are in test_engines.py, those of ONNX in test_onnx.py.
FRAMEWORK = re.compile(
    r"^(?:import|from) (torch|jax|transformers|mpi4py|ndonnx|onnxruntime|xarray)"
    r"(?: import \w+| as \w+)?$",
    re.M,
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")

# What a page takes as given because it is the reader's own.
GIVEN = {"cli.md": ("query", "key", "value")}

MODULES = [
    info.name
    for info in pkgutil.walk_packages(linattn.__path__, "linattn.")
    if not info.name.startswith(("linattn.cli", "linattn.__main__", "linattn.interop."))
]


def examples(page: Path, framework: str | None) -> list[tuple[str, str]]:
    """Return kind and text of a page's examples that import this framework, or import none."""
    found = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    matches = [(FRAMEWORK.search(text), kind, text) for kind, text in found]
    return [(kind, text) for match, kind, text in matches if (match and match[1]) == framework]


def run_examples(page: Path, framework: str | None) -> None:
    """Run a page's examples from top to bottom in one namespace; check what prompts show."""
    names = GIVEN.get(page.name, ())
    namespace: dict[str, Any] = dict(
        zip(names, linattn.datasets.pretrained_qkv() if names else (), strict=True)
    )
    namespace["__name__"] = page.stem
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    for kind, text in examples(page, framework):
        # What the pages call of CuPy NumPy has too.
        text = text.replace("import cupy\n", "import numpy as cupy\n")
        if kind == "python":
            exec(compile(text, str(page), "exec"), namespace)
        else:
            test = parser.get_doctest(text, namespace, page.name, str(page), None)
            assert test.examples, text
            runner.run(test, clear_globs=False)
            namespace = test.globs
    assert runner.summarize(verbose=False).failed == 0


def last_place(shown: str) -> Decimal:
    """Return one unit of the last digit that a number shows."""
    exponent = Decimal(shown).as_tuple().exponent
    assert isinstance(exponent, int)
    return Decimal(1).scaleb(exponent)


def agree(shown: str, measured: str) -> bool:
    """Whether two prints of one measurement agree to a digit; rounding errors may differ."""
    a, b = Decimal(shown), Decimal(measured)
    return max(abs(a), abs(b)) < Decimal("1e-5") or abs(a - b) <= last_place(shown)


def section(name: str) -> list[str]:
    """Return the lines of a marked section of the README."""
    start, end = (f"<!-- --8<-- [{side}:{name}] -->\n" for side in ("start", "end"))
    return README.split(start)[1].split(end)[0].splitlines()


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p, None)], ids=lambda p: p.stem)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page, None)


OF_FRAMEWORKS = [
    pytest.param(framework, page, id=f"{framework}-{page.stem}")
    for framework in ("torch", "jax", "transformers")
    for page in PAGES
    if examples(page, framework)
]


@pytest.mark.frameworks
@pytest.mark.parametrize(("framework", "page"), OF_FRAMEWORKS)
def test_framework_examples_run(framework, page):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    run_examples(page, framework)


def test_readme_example_prints_what_its_comment_says(capsys):
    run_examples(ROOT / "README.md", None)
    ((_, text),) = examples(ROOT / "README.md", None)
    promised = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
    assert promised


@pytest.mark.parametrize("name", ["linattn", *MODULES])
def test_docstring_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# They are public for other modules of linattn.
INSIDE = {"linattn.gradients.differentiable_problem", "linattn.gradients.pullback_of"}


@pytest.mark.parametrize("name", ["linattn", *(m for m in MODULES if m.count(".") == 1)])
def test_what_is_public_has_an_example(name):
    module = importlib.import_module(name)
    public = {
        f"{name}.{key}": getattr(module, key)
        for key in getattr(module, "__all__", ())
        if not name.startswith("linattn._") and f"{name}.{key}" not in INSIDE
    }
    documented = {
        key: ">>> " in (value.__doc__ or "")
        for key, value in public.items()
        if value is not Any and (inspect.isclass(value) or inspect.isroutine(value))
    }
    lacking = [key for key, has_example in documented.items() if not has_example]
    assert len(lacking) <= len(documented) / 10, lacking


def test_readme_shows_the_defects_that_the_script_prints():
    printed = runpy.run_path(str(ROOT / "benchmarks" / "defects.py"))["table"]()
    shown = section("defects")
    assert [NUMBER.sub("#", line) for line in shown] == [NUMBER.sub("#", line) for line in printed]
    pairs = zip(NUMBER.findall("\n".join(shown)), NUMBER.findall("\n".join(printed)), strict=True)
    assert [pair for pair in pairs if not agree(*pair)] == []


def test_readme_shows_the_errors_that_compare_prints(tmp_path):
    arguments = ["compare", "--lengths", "64", "--time-budget", "0", "--out", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "linattn", *arguments], check=True, capture_output=True, text=True
    )
    record = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    measured: dict[str, list[float]] = {}
    for row in record["errors"]:
        measured.setdefault(row["label"], []).append(row["median"])
    # At 256 tokens attention() is exact.
    del measured["exact softmax"], measured["attention(), 0.1"]

    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section("limits")
        if line.startswith("| ")
    ]
    counts = {row["num_features"] for row in record["errors"]} - {None}
    columns = [str(count) for count in sorted(counts)]
    assert [cell.removesuffix(" columns") for cell in cells[0][1:]] == columns
    shown = {label: [number for number in numbers if number] for label, *numbers in cells[2:]}
    assert shown.keys() == measured.keys()
    for label, numbers in shown.items():
        for number, median in zip(numbers, measured[label], strict=True):
            assert abs(Decimal(number) - Decimal(median)) <= last_place(number), label


def test_pages_give_the_numbers_of_the_code():
    pages = {name: (ROOT / "docs" / name).read_text() for name in ("attention.md", "gradients.md")}
    rows = _costs.MIN_HELD_OUT
    assert f"like any from {rows} rows" in pages["attention.md"]

    most = steps.MAX_STATES
    held = f"at most {2 * most} states a head: {most} checkpoints"
    assert held in pages["gradients.md"]
    assert f"Up to {most} checkpoints are stored" in pages["gradients.md"]
    docstring = " ".join(str(linattn.linear_attention_vjp.__doc__).split())
    assert held in docstring


def test_files_that_the_pages_name_exist():
    named = {
        name
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for name in re.findall(
            r"(?:tests|benchmarks|linattn|backends|docs)/[\w/]+\.\w+",
            page.read_text(encoding="utf-8"),
        )
    }
    assert "tests/test_readme.py" in named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
