"""The page "Bugs this finds" is what `benchmarks/bugs.py` makes, and its verdicts are right."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest

from benchmarks import bugs
from linattn.testing import batteries

PAGE = (Path(__file__).parents[1] / "docs" / "bugs.md").read_text(encoding="utf-8")
SUBJECTS = {subject.adapter.__name__: subject for subject in bugs.SUBJECTS}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_shows_each_adapter_and_its_verdict(name):
    subject = SUBJECTS[name]
    lines = inspect.getsource(subject.adapter).strip().splitlines()
    assert len(lines) <= bugs.MAX_LINES
    assert "\n".join(lines) in PAGE
    row = next(
        line
        for line in PAGE.splitlines()
        if line.startswith(f"| {subject.name} | {subject.package} ")
    )
    assert ("**fails**" if subject.right else "passes") in row


def test_reports_are_on_the_page():
    assert all(f"{repository}#{number}]" in PAGE for repository, number, *_ in bugs.REPORTS)


def test_verdicts_without_other_packages():
    haar = partial(batteries.haar, shapes=((2, 2),), num_draws=500)
    wrong = bugs.attempt(SUBJECTS["raw_qr"]._replace(check=haar), bugs.raw_qr)
    assert wrong.verdict == "**fails**"
    assert wrong.seen.endswith(" for 0")
    pytest.importorskip("scipy", reason="the right matrices are SciPy's")
    right = bugs.attempt(SUBJECTS["ortho_group"]._replace(check=haar), bugs.ortho_group)
    assert right.verdict == "passes"
    assert right.power.endswith(" %")


def test_a_missing_package_is_named():
    def absent(dim, rng):
        import linattn_no_such_package  # type: ignore[import-not-found]  # noqa: F401

    assert (
        bugs.attempt(SUBJECTS["raw_qr"], absent).verdict
        == "not run: linattn_no_such_package is not installed"
    )
