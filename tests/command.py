"""The `linattn` command as the tests run it, and the files that they give it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from typer.testing import CliRunner

from linattn.cli import compare
from linattn.cli.app import app

PLAIN = {"COLUMNS": "80", "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "NO_COLOR": "1"}
SMALL = ["--num-features", "16", "--lengths", "64,128", "--time-budget", "2"]


def call(*arguments, **environment):
    return CliRunner().invoke(app, [str(word) for word in arguments], env={**PLAIN, **environment})


def passed(*arguments, **environment):
    """Call, with exit code 0."""
    result = call(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result


def python(*words):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False
    )


def save(path, **arrays):
    rng = np.random.default_rng(5)
    shapes = {"query": (2, 3, 20, 8), "key": (2, 3, 20, 8), "value": (2, 3, 20, 4)}
    content = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    content.update(arrays)
    present: dict[str, Any] = {name: a for name, a in content.items() if a is not None}
    np.savez(path, **present)
    return path


def row(method, median, cost=1.0, *, kind="map", num_features=None, **more):
    """Make a row of `linattn compare`."""
    given = {"held_out": False, "exact_share": 0.0, "setup_seconds": 0, "seconds": 1, **more}
    return compare.Row(
        method=method, label=method.upper(), num_features=num_features, kind=kind, cost=cost,
        failure="", median=median, percentile_90=median, heads=((median,),), calls=1, peak_bytes=1,
        **given,
    )  # fmt: skip


def assert_refused(result, text):
    """One line on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("linattn: error: ")
    assert text in lines[0]
    assert result.stdout == ""
