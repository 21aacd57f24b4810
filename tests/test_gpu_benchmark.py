"""The GPU benchmark without a GPU: its formulas are right, it can fail, and times are medians."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from benchmarks.gpu import cases, first_contact, formulas, library, parity, times
from linattn import _dispatch
from linattn_cupy import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h100"
ALL = {case.name: case for case in cases.cases()}


# Cases and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", cases.MAPS)
def test_formulas_are_what_the_library_computes(name, is_causal):
    rng = np.random.default_rng(0)
    query, grad = (rng.standard_normal((2, 3, 40, width)) for width in (16, 9))
    key, value = (rng.standard_normal((2, 1, 40, width)) for width in (16, 9))
    mask = rng.random((2, 1, 40)) < 0.7
    mask[..., :5] = False
    phi = parity.feature_map_of(name, 16, 32)
    rows = phi.projection * 16**-0.25 if name in ("favor", "hyperbolic") else None
    formula = formulas.Formula(name, rows)
    options = {"is_causal": is_causal, "key_mask": mask}
    output, state, norm = linattn.linear_attention(
        query, key, value, phi, return_state=True, return_log_normalizer=True, **options
    )
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi, **options)
    seen = mask[..., None, :] & (np.tri(40, dtype=bool) if is_causal else True)
    wanted = formulas.attend(formula, query, key, value, seen)
    assert_allclose(output, wanted.output, rtol=1e-10, atol=1e-12)
    assert_allclose(norm, wanted.log_normalizer, rtol=1e-10, atol=1e-12)
    kept = formulas.state(formula, key, value, mask)
    assert_allclose(state.kvz * np.exp(state.log_scale)[..., None], kept, rtol=1e-10)
    pulled = formulas.gradients(formula, query, key, value, seen, grad)
    for found, gradient in zip(pullback(grad), pulled, strict=True):
        assert_allclose(found, gradient, rtol=1e-9, atol=1e-12)


def test_errors():
    wanted = np.array([3.0, 4.0])
    assert parity.relative_error(np.array([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert parity.relative_error(wanted * 1e200, wanted * 1e200) == 0
    assert parity.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert parity.relative_error(np.ones(2), np.zeros(2)) > 1
    assert parity.relative_error(np.ones(3), np.ones(2)) == np.inf
    assert not parity.relative_error(np.array([np.nan, 4.0]), wanted) <= np.inf


def test_one_wrong_row_of_many_does_not_pass():
    wanted = np.ones((64, 4000, 8))
    got = wanted.copy()
    got[33, 1234] = 0
    assert parity.relative_error(got, wanted) < cases.BOUNDS["bfloat16"]
    assert parity.row_error(got, wanted) == pytest.approx(1)
    got[33, 1234] = np.nan
    assert not parity.row_error(got, wanted) <= np.inf
    assert parity.row_error(got[1:], wanted) == np.inf


def test_cases_are_all_there():
    assert len(ALL) == len(list(cases.cases())) == 354
    for dtype, feature_map, kind in itertools.product(cases.DTYPES, cases.MAPS, ("full", "causal")):
        assert f"{dtype} {feature_map} basic {kind}" in ALL
    operations = {"attention", "softmax", "gradient", "graph", "decode_step", "decoder"}
    assert {case.operation for case in ALL.values()} == operations | {"decoder_graph"}
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


# First contact ------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch, tmp_path, capfd):
    """Watch processes that run a program in the place of cases; return exit code and lines."""
    script = tmp_path / "cases.py"

    def command(*words):
        return [sys.executable, str(script), *words[words.index("--only") + 1 :]]

    monkeypatch.setattr(first_contact, "_command", command)
    monkeypatch.setattr(first_contact, "_compilers", lambda *given: [])

    def watch(program, names="abc", seconds=60.0):
        script.write_text("import os, sys\nleft = sys.argv[1:]\n" + program)
        code = first_contact._watch(list(names), Namespace(seconds=seconds, out=None))
        return code, capfd.readouterr().out.splitlines()

    return watch


RUN_ALL = """
for name in left:
    print("begun", name, flush=True)
    print("FAIL " if name in "{}" else "ok   ", name + ": said", flush=True)
"""


def test_cases_that_fail_are_printed_again(watched):
    code, said = watched(RUN_ALL.format("b"))
    assert code == 1
    assert said[:6] == [
        x for n in "abc" for x in (f"begun {n}", f"{'FAIL' if n == 'b' else 'ok  '}  {n}: said")
    ]
    assert said[6].startswith("----- 1 of 3 failed, ")
    assert said[7:] == ["FAIL  b: said"]
    code, said = watched(RUN_ALL.format(""))
    assert (code, len(said)) == (0, 7)


def test_a_case_that_ends_its_process_fails_and_the_rest_goes_on(watched):
    dies = "if left[0] == 'b':\n    print('begun b', flush=True)\n    os._exit(7)\n"
    code, said = watched(dies + "left = left[:1]\n" + RUN_ALL.format("") + "sys.exit(3)\n")
    assert code == 1
    assert "ok    c: said" in said
    assert said[-1] == "FAIL  b: its process ended with code 7"


def test_processes_that_run_nothing_fail_once(watched):
    code, said = watched("sys.exit(5)")
    assert code == 1
    assert said[0] == said[-1] == "FAIL  a: its process ended with code 5"
    assert said[1] == "----- 2 of 3 not run: b; c"


def test_what_time_left_out_is_printed(watched):
    code, said = watched("left = left[:2]\n" + RUN_ALL.format(""))
    assert code == 0
    assert said[4] == "----- 1 of 3 not run: c"
    code, said = watched(RUN_ALL.format(""), seconds=0.0)
    assert code == 1
    assert said[0] == "----- 3 of 3 not run: a; b; c"


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


def test_measure_gives_the_median_and_the_spread_of_warm_rotated_calls(monkeypatch):
    monkeypatch.setattr(times, "BUDGET", 0.0)
    clock = FakeClock(itertools.chain([9.0] * 6, itertools.repeat(1.1e-3)))
    found = times.measure(clock.seconds, [partial(clock.call, i) for i in range(3)])
    assert found["ms"] == pytest.approx(1.1)
    assert found["spread"] == pytest.approx(0, abs=1e-9)
    assert clock.calls[7:] == [0, 1, 2] * 5
    clock = FakeClock(itertools.chain([1.0] * 3, [1.0, 2.0, 3.0, 4.0, 5.0]))
    found = times.measure(clock.seconds, [lambda: clock.call(0)])
    assert found["ms"] == 3e3
    assert found["spread"] == pytest.approx(1.0)


def test_items_have_names_of_their_own():
    names = [name for name, _ in times.items()]
    assert len(set(names)) == len(names) > 30


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


# Both -------------------------------------------------------------------------------------------


def test_what_the_backend_says_of_hardware_is_what_the_results_say():
    run = json.loads(hardware.MEASURED.read_text(encoding="utf-8"))
    said = (RESULTS / "first_contact.log").read_text(encoding="utf-8")
    assert f"----- {len(run['failures'])} of {run['checks']} failed" in said
    assert run["device"] in said


def test_the_backend_is_found_in_a_plain_checkout(monkeypatch):
    monkeypatch.setattr(_dispatch, "_entry_points", dict)
    assert library.register()
    assert linattn.registered_backends()["cupy"] == "linattn_cupy"
    assert not library.register()


# A cupy that finds no driver, whatever is installed here; or none, nor what linattn needs.
NO_DRIVER = """
import sys, types
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
cupy.__version__, cupy.__spec__ = "99", types.SimpleNamespace()
def count():
    raise RuntimeError("cudaErrorInsufficientDriver")
cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=count))
"""
NOTHING = "import sys\nfor name in ('cupy', 'array_api_compat'):\n    sys.modules[name] = None\n"


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("first_contact", NO_DRIVER, "cupy 99 finds no usable NVIDIA driver: cudaErrorInsuffi"),
        ("times", NO_DRIVER, "cupy 99 finds no usable NVIDIA driver: cudaErrorInsufficientDriver"),
        (
            "first_contact",
            NOTHING,
            "needs numpy, cupy, array_api_compat, ml_dtypes; cupy, array_api_compat cannot be",
        ),
    ],
)
def test_the_command_says_why_it_cannot_run(tmp_path, name, there, said):
    (tmp_path / "sitecustomize.py").write_text(there)
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
    assert finished.stderr.startswith(f"benchmarks.gpu: {said}")
    assert not out.exists()
