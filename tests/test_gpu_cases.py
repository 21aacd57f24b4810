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
from benchmarks.gpu import cases, library, parity, times
from linattn.typing import Declined
from tests.fake_gpu.device import cupy
from tests.ptx import check

pytestmark = pytest.mark.fake_gpu

ALL = {case.name: case for case in cases.cases()}
REAL = (
    *("basic full", "basic causal", "cross full"),
    *("wide gradient full", "wide gradient causal"),
)
MASKED = ("masked full", "masked causal", "blind causal")


@pytest.fixture
def fake(monkeypatch):
    """The library of the checks, which replaces functions of linattn_cupy; they are restored."""
    monkeypatch.setattr(linattn_cupy.device, "launch", linattn_cupy.device.launch)
    for module in (linattn_cupy.gradients, linattn_cupy.state_vjps):
        monkeypatch.setattr(module, "Declined", Declined)
    with warnings.catch_warnings():
        yield check.Interpreted(0)


def small(name, **changes):
    """A case of that name, of few heads and tokens; sizes as in test_cupy_backend.py."""
    case = ALL[name]
    length = min(case.keys, 150)
    sizes = {"dim": 16, "features": 40, "value_dim": 24, "lead": (1, 2)}
    return replace(case, **{"queries": min(case.queries, 150), "keys": length, **sizes, **changes})


@pytest.mark.parametrize(
    "case",
    [
        small("bfloat16 favor nan causal"),
        small("bfloat16 favor one key head gradient full"),
        *map(check.small, (ALL[f"bfloat16 favor {what}"] for what in REAL)),
        *map(check.small, (ALL[f"float32 favor {what}"] for what in MASKED)),
    ],
    ids=lambda case: case.name,
)
def test_a_case_passes(fake, case):
    found = parity.check(fake, case)
    assert found["passed"], found
    assert found["deterministic"]


def test_results_that_are_off_do_not_pass(fake, monkeypatch):
    case = small("float32 favor basic full")
    monkeypatch.setattr(fake, "numpy", lambda a: a.get().astype(np.float64) + 1e-4)
    found = parity.check(fake, case)
    assert not found["passed"]
    assert found["deterministic"]
    assert found["errors"]["output"] > case.bound


def test_results_that_change_do_not_pass(fake, monkeypatch):
    tiny = itertools.count()
    monkeypatch.setattr(
        fake, "numpy", lambda a: a.get().astype(np.float64) * (1 + 1e-12 * next(tiny))
    )
    found = parity.check(fake, small("float32 favor basic full"))
    assert not found["passed"]
    assert not found["deterministic"]
    assert found["errors"]["output"] < 1e-5


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


def test_a_number_made_of_nan_does_not_pass(fake, monkeypatch):
    monkeypatch.setattr(fake, "numpy", lambda a: np.nan_to_num(a.get().astype(float), nan=0.5))
    found = parity.check(fake, small("float32 favor nan causal"))
    assert found["errors"]["output"] == np.inf


def test_heads_that_repeat_others_are_compared(fake, monkeypatch):
    case = small("float32 elu long causal", lead=(7,))
    assert parity.check(fake, case)["passed"]
    exact = fake.numpy

    def last_head_is_another(array):
        return np.concatenate([exact(array)[:-1], exact(array)[:1] * 2])

    monkeypatch.setattr(fake, "numpy", last_head_is_another)
    assert not parity.check(fake, case)["passed"]


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
        ("tf32 elu full", {"log_activations", "key_weights", "query_weights"}),
        ("bfloat16 elu causal gradient", {"causal_rows", "causal_gradients"}),
        ("bfloat16 Decoder.step", {"decode"}),
    ],
)
def test_times_are_taken(fake, monkeypatch, name, kernels):
    for constant, value in {"LEAD": (1, 1), "LENGTH": 70, "DECODED": (1, 2), "BUDGET": 0.0}.items():
        monkeypatch.setattr(times, constant, value)
    monkeypatch.setattr(times, "BATCH_SECONDS", 0.0)
    found = dict(times.items())[name]()
    assert kernels <= set(found["kernels"])
    assert all(0 < found[how]["ms"] < 60e3 for how in found if how != "kernels")
