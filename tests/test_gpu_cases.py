"""What a GPU is checked and timed by, on the fake GPU: cases pass, and each check can fail."""

# mypy: disable-error-code="attr-defined, misc"

from __future__ import annotations

import itertools
import types
import warnings
from dataclasses import replace

import numpy as np
import pytest

import linattn
import linattn_cupy
from benchmarks.gpu import cases, first_contact, library, parity, times
from linattn.typing import Declined
from linattn_cupy import planning
from tests.fake_gpu.device import cupy

pytestmark = pytest.mark.fake_gpu

ALL = {case.name: case for case in cases.cases()}
LISTED = [
    *("bfloat16 favor nan causal", "bfloat16 favor jump causal", "float32 favor nan causal"),
    *(f"bfloat16 favor wide gradient {kind}" for kind in ("full", "causal")),
]
"""Cases that are not drawn; `python -m benchmarks.gpu.first_contact` runs all."""


@pytest.fixture
def fake(monkeypatch):
    """The library of the checks, which replaces functions of linattn_cupy; they are restored."""
    monkeypatch.setattr(linattn_cupy.device, "launch", linattn_cupy.device.launch)
    for module in (linattn_cupy.gradients, linattn_cupy.state_vjps):
        monkeypatch.setattr(module, "Declined", Declined)
    with warnings.catch_warnings():
        yield library.CupyLibrary()


def small(name, **changes):
    """A case of that name, of few heads and tokens; sizes as in test_cupy_backend.py."""
    case = ALL[name]
    length = min(case.keys, 150)
    sizes = {"dim": 16, "features": 40, "value_dim": 24, "lead": (1, 2)}
    sizes["value_dim"] = 136 if "wide" in name else 24
    return replace(case, **{"queries": min(case.queries, 150), "keys": length, **sizes, **changes})


@pytest.mark.parametrize("name", LISTED)
def test_a_case_passes(fake, name):
    found = parity.check(fake, small(name))
    assert found["passed"], found


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_case_passes(fake, monkeypatch, seed):
    """All options together, of sizes that are compiled anyway; in few and in many segments."""
    processors, workspace = divmod(seed % 9, 3)
    monkeypatch.setattr(linattn_cupy.device, "processors", lambda: (1, 4, 50)[processors])
    monkeypatch.setattr(planning, "MAX_WORKSPACE", 2 ** (15 + 6 * workspace))
    case = cases.drawn(seed)
    if (case.feature_map, case.operation) == ("relu", "gradient"):
        # Tokens of so few dims often share no feature, which generic code pulls back.
        case = replace(case, feature_map="elu")
    case = replace(case, dim=16, features=40, value_dim=24)
    found = parity.check(fake, case)
    assert found["passed"], (case, found)


def off(fake, exact, count):
    """Results that are a little off."""
    return lambda array: exact(array) + 1e-4


def changing(fake, exact, count):
    """Results that change from run to run."""
    return lambda array: exact(array) * (1 + 1e-12 * next(count))


def filled(fake, exact, count):
    """A number in the place of NaN."""
    return lambda array: np.nan_to_num(exact(array), nan=0.5)


def one_head_off(fake, exact, count):
    """The last of many heads is another."""
    return lambda array: np.concatenate([exact(array)[:-1], exact(array)[:1] * 2])


@pytest.mark.parametrize(
    ("name", "spoil", "same"),
    [
        ("float32 favor basic full", off, True),
        ("float32 favor basic full", changing, False),
        ("float32 favor nan causal", filled, True),
        ("float32 elu long causal", one_head_off, True),
    ],
)
def test_wrong_results_do_not_pass(fake, monkeypatch, name, spoil, same):
    case = small(name, lead=(7,)) if "long" in name else small(name)
    assert parity.check(fake, case)["passed"]
    monkeypatch.setattr(fake, "numpy", spoil(fake, fake.numpy, itertools.count()))
    found = parity.check(fake, case)
    assert not found["passed"]
    assert found["deterministic"] is same
    assert f"same bits {same}" in first_contact._said(found)
    assert (found["errors"]["output"] > case.bound) is same


@pytest.mark.parametrize("what", ["row_error", "findings"])
def test_one_wrong_row_and_a_race_do_not_pass(fake, monkeypatch, what):
    case = small("float32 favor basic full")
    if what == "row_error":
        monkeypatch.setattr(parity, what, lambda *pair: 2 * case.row_bound)
    else:
        monkeypatch.setattr(fake, what, lambda: ["race"])
    assert not parity.check(fake, case)["passed"]


def test_generic_code_does_not_pass_for_a_kernel(fake):
    case = small("float32 favor basic full")
    with linattn.without_backends():
        found = parity.check(fake, case)
    assert found["errors"]["output"] < case.bound
    assert found["kernels"] == []
    assert not found["passed"]


def test_generic_code_does_not_pass_for_kernels_that_gave_up(fake, monkeypatch):
    case = small("bfloat16 elu gradient full")
    inputs = parity.host_inputs(case)
    inputs.gradient[..., 0, 0] = 3e38  # its products overflow
    monkeypatch.setattr(parity, "host_inputs", lambda case: inputs)
    found = parity.check(fake, case)
    assert library.GENERIC in found["kernels"]
    assert not found["passed"]


@pytest.mark.parametrize("name", ["bfloat16 elu graph causal", "float32 elu decoder graph"])
def test_a_graph_that_does_not_run_again_does_not_pass(fake, monkeypatch, name):
    assert parity.check(fake, small(name))["passed"]
    end = cupy.cuda.Stream.end_capture

    class Idle(cupy.cuda.Stream):
        def end_capture(self):
            end(self)
            return types.SimpleNamespace(launch=lambda: None)

    monkeypatch.setattr(cupy.cuda, "Stream", Idle)
    assert not parity.check(fake, small(name))["passed"]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("tf32 elu full", {"pack_rows", "key_weights", "query_weights"}),
        ("bfloat16 elu causal gradient", {"causal_rows", "causal_gradients"}),
        ("bfloat16 Decoder.step", {"decode"}),
    ],
)
def test_times_are_taken(fake, monkeypatch, name, kernels):
    small = {"LEAD": (1, 1), "LENGTH": 70, "DIM": 16, "FEATURES": 40, "DECODED": (1, 2)}
    for constant, value in (small | {"BUDGET": 0.0, "BATCH_SECONDS": 0.0}).items():
        monkeypatch.setattr(times, constant, value)
    found = dict(times.items())[name]()
    assert kernels <= set(found["kernels"])
    assert all(0 < found[how]["ms"] < 60e3 for how in found if how != "kernels")
