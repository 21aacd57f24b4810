"""The GPU benchmark without a GPU: its checks can fail, and its times are medians."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from benchmarks.gpu import cases, library, parity, times
from linattn import _dispatch
from linattn_cupy import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h100"
ALL = {case.name: case for case in cases.cases()}


# Parity -----------------------------------------------------------------------------------------


def test_relative_error():
    wanted = np.array([3.0, 4.0])
    assert parity.relative_error(np.array([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert parity.relative_error(wanted * 1e200, wanted * 1e200) == 0
    assert parity.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert parity.relative_error(np.ones(2), np.zeros(2)) > 1
    assert parity.relative_error(np.ones(3), np.ones(2)) == np.inf
    assert not parity.relative_error(np.array([np.nan, 4.0]), wanted) <= np.inf


def test_cases_are_all_there():
    assert len(ALL) == len(list(cases.cases()))
    for dtype, feature_map, kind in itertools.product(cases.DTYPES, cases.MAPS, ("full", "causal")):
        assert f"{dtype} {feature_map} basic {kind}" in ALL
    assert {case.operation for case in ALL.values()} == {
        "attention",
        "decode_step",
        "decoder",
        "decoder_graph",
        "gradient",
        "graph",
    }
    assert sorted(case.name for case in cases.telling_first()) == sorted(ALL)


@pytest.mark.parametrize("name", ["float32 elu masked full", "float32 elu masked causal"])
def test_masked_inputs_hold_nan_behind_the_mask_only(name):
    inputs = parity.host_inputs(ALL[name])
    hidden = ~np.broadcast_to(inputs.mask, inputs.key.shape[:-1])
    assert hidden.any()
    assert_array_equal(inputs.mask[..., 0], True)
    for array in (inputs.key, inputs.value):
        assert_array_equal(array[hidden], np.nan)
        assert_array_equal(np.isfinite(array[~hidden]), True)


# Times ----------------------------------------------------------------------------------------


class FakeClock:
    """Each call takes as long as it says."""

    def __init__(self, times):
        self.now = 0.0
        self.calls: list[int] = []
        self.times = times

    def call(self, number):
        self.calls.append(number)
        self.now += next(self.times)

    def seconds(self, work):
        before = self.now
        work()
        return self.now - before


def test_measure_takes_medians_of_warm_rotated_calls(monkeypatch):
    monkeypatch.setattr(times, "BUDGET", 0.0)
    clock = FakeClock(itertools.chain([9.0] * 6, itertools.repeat(1.1e-3)))
    found = times.measure(clock.seconds, [partial(clock.call, i) for i in range(3)])
    assert found["ms"] == pytest.approx(1.1)
    assert found["spread"] == pytest.approx(0, abs=1e-9)
    assert clock.calls[7:] == [0, 1, 2] * 5


def test_measure_gives_the_median_and_the_spread(monkeypatch):
    monkeypatch.setattr(times, "BUDGET", 0.0)
    clock = FakeClock(itertools.chain([1.0] * 3, [1.0, 2.0, 3.0, 4.0, 5.0]))
    found = times.measure(clock.seconds, [lambda: clock.call(0)])
    assert found["ms"] == 3e3
    assert found["spread"] == pytest.approx(1.0)


def test_items_have_names_of_their_own():
    names = [name for name, _ in times.items()]
    assert len(set(names)) == len(names) > 30


def test_what_the_backend_says_of_hardware_is_what_the_results_say():
    run = json.loads(hardware.MEASURED.read_text(encoding="utf-8"))
    said = (RESULTS / "first_contact.log").read_text(encoding="utf-8")
    assert f"----- {len(run['failures'])} of {run['checks']} failed" in said
    assert run["device"] in said


# Running ----------------------------------------------------------------------------------------


def test_the_backend_is_found_in_a_plain_checkout(monkeypatch):
    monkeypatch.setattr(_dispatch, "_entry_points", dict)
    assert library.register()
    assert linattn.registered_backends()["cupy"] == "linattn_cupy"
    assert not library.register()


@pytest.mark.parametrize("name", ["first_contact", "times"])
def test_the_command_says_why_it_cannot_run(tmp_path, name):
    # A cupy that is there and finds no driver, whatever is installed here.
    (tmp_path / "cupy.py").write_text(
        "import types\n__version__ = '99'\n"
        "def count():\n    raise RuntimeError('cudaErrorInsufficientDriver')\n"
        "cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=count))\n"
    )
    known = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    out = tmp_path / "out.json"
    finished = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": known},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    assert finished.stderr == (
        "benchmarks.gpu: cupy 99 finds no usable NVIDIA driver: cudaErrorInsufficientDriver\n"
    )
    assert not out.exists()


def test_the_command_says_what_is_missing(tmp_path):
    # Before it imports linattn, which needs it too.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('cupy', 'array_api_compat'):\n    sys.modules[name] = None\n"
    )
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.first_contact"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    assert finished.stderr == (
        "benchmarks.gpu: needs numpy, cupy, array_api_compat, ml_dtypes; cupy, array_api_compat "
        "cannot be imported\n"
    )


def test_the_kernel_of_the_benchmark_compiles(compile_kernel, tmp_path):
    path = tmp_path / "f.cu"
    path.write_text(times.BUSY)
    (kernel,) = compile_kernel(path, {}, "sm_90").values()
    assert kernel.spill_bytes == kernel.stack_bytes == 0


def test_the_file_of_times_holds_what_failed_too(monkeypatch, tmp_path):
    def fail():
        raise ImportError("no such library")

    ours = [("a b", lambda: {"eager": {"ms": 1.0}}), ("b", fail), ("c", fail)]
    monkeypatch.setattr(times, "items", lambda: iter(ours))
    monkeypatch.setattr(times, "unable", lambda: None)
    monkeypatch.setattr(times, "register", lambda: False)
    monkeypatch.setattr(times, "describe", lambda: {"device": "Double"})
    assert times.main(["b", "--out", str(tmp_path / "times.json")]) == 0
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["machine"] == {"device": "Double"}
    failed = {"error": "ImportError: no such library"}
    assert found["times"] == {"a b": {"eager": {"ms": 1.0}}, "b": failed}
