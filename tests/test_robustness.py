"""docs/robustness.md: each promise names the tests that hold it, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "robustness.md"


def promises() -> list[list[str]]:
    """The cells of each row of the page's tables, without headers."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if row[-1] not in ("held by", "---")]


@cache
def defined_in(name: str) -> set[str]:
    path = TESTS / name
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_its_promises():
    assert len(promises()) >= 40


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[0])
def test_a_promise_is_held_by_tests_that_exist(promise):
    _, _, held_by = promise
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", held_by)
    assert len(named) == held_by.count("`") / 2 >= 1
    assert [f"{file}::{test}" for file, test in named if test not in defined_in(file)] == []
