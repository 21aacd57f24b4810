"""Types: what a user's type checker is told of results is what they are."""

from __future__ import annotations

import runpy
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

USER = Path(__file__).with_name("typed_user.py")


def test_the_package_says_that_it_is_typed():
    assert (files("linattn") / "py.typed").is_file()


def test_results_are_what_the_types_say():
    arrays = np.random.default_rng(0).standard_normal((3, 6, 4), dtype=np.float32)
    runpy.run_path(str(USER))["check"](*arrays, flag=True)


def test_mypy_sees_types_and_what_is_wrong(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(tmp_path)
    options = [
        "--strict",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path}",
        "--no-error-summary",
    ]
    said, _, code = api.run([*options, str(USER)])
    assert code == 0, said
    text = USER.read_text(encoding="utf-8")
    wrong = {
        "state": ("(query, key, value, phi, return_state=True)\n", "(query, key, value, phi)\n"),
        "flag": ("is_causal=True", 'is_causal="no"'),
        "name": ("is_causal=True", "is_casual=True"),
        "map": ("phi: FeatureMap = EluFeatures()", "phi = EluFeatures"),
    }
    for name, (right, changed) in wrong.items():
        assert right in text
        (tmp_path / f"{name}.py").write_text(text.replace(right, changed), encoding="utf-8")
    said, _, code = api.run([*options, *(f"{name}.py" for name in wrong)])
    assert code == 1
    assert {line.partition(".py")[0] for line in said.splitlines() if "error:" in line} == set(
        wrong
    )
