"""Types: what a user's type checker is told of results is what they are."""

from __future__ import annotations

import runpy
from importlib.resources import files
from pathlib import Path

import numpy as np

USER = Path(__file__).with_name("typed_user.py")


def test_the_package_says_that_it_is_typed():
    assert (files("linattn") / "py.typed").is_file()


def test_results_are_what_the_types_say():
    arrays = np.random.default_rng(0).standard_normal((3, 6, 4), dtype=np.float32)
    runpy.run_path(str(USER))["check"](*arrays, flag=True)
