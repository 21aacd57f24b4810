"""The GPU benchmark without a GPU: its checks can fail, and its times are medians."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import types
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn
import linattn_cupy.device
import linattn_cupy.gradients
from benchmarks.gpu import cases, first_contact, library, parity, times
from linattn import _dispatch
from linattn.typing import Declined
from linattn_cupy import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h100"
ALL = {case.name: case for case in cases.cases()}


class EmulatedLibrary(library.CupyLibrary):
    """NumPy arrays in the place of CuPy's; kernels run by the emulator."""

    def __init__(self, launches):
        self.launches = launches
        self.waits = False
        self.poisoned = []

    def array(self, host, dtype):
        return host.copy() if host.dtype == bool else host.astype(library.host_dtype(dtype))

    def numpy(self, array):
        return np.asarray(array).astype(np.float64)

    def poison(self, byte):
        self.poisoned.append(byte)


@pytest.fixture
def emulated(cupy_backend, emulation):
    cupy_backend.emulator.orders = [emulation.ASCENDING]
    return EmulatedLibrary(cupy_backend.launches)


def small(name, **changes):
    """A case of that name, of few heads and tokens; sizes as in test_cupy_backend.py."""
    case = ALL[name]
    length = min(case.keys, 150)
    sizes = {"dim": 16, "features": 40, "value_dim": 24, "lead": (1, 2)}
    return replace(case, **{"queries": min(case.queries, 150), "keys": length, **sizes, **changes})


# Parity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "float32 favor basic causal",
        "float32 favor one key head causal",
        "float32 favor jump causal",
        "float32 favor decoder",
        "tf32 favor all outputs causal",
        "float16 favor masked causal",
        "bfloat16 favor all outputs causal",
        "bfloat16 favor gradient causal",
        "bfloat16 favor nan causal",
        "bfloat16 favor decode step",
        "bfloat16 favor jump causal",
        "bfloat16 favor blind causal",
        "bfloat16 favor moved axes causal",
        "bfloat16 favor one key head gradient full",
        "float16 favor per head causal",
        "float32 elu continued full",
    ],
)
def test_a_case_passes_on_the_emulator(emulated, name):
    found = parity.check(emulated, small(name))
    assert found["passed"], found
    assert found["deterministic"]
    assert emulated.poisoned == [0xFF, 0]


def test_results_that_are_off_do_not_pass(emulated, monkeypatch):
    case = small("float32 favor basic full")
    monkeypatch.setattr(emulated, "numpy", lambda a: np.asarray(a, np.float64) + 1e-4)
    found = parity.check(emulated, case)
    assert not found["passed"]
    assert found["deterministic"]
    assert found["errors"]["output"] > case.bound


def test_results_that_change_do_not_pass(emulated, monkeypatch):
    tiny = itertools.count()
    monkeypatch.setattr(
        emulated, "numpy", lambda a: np.asarray(a, np.float64) * (1 + 1e-12 * next(tiny))
    )
    found = parity.check(emulated, small("float32 favor basic full"))
    assert not found["passed"]
    assert not found["deterministic"]
    assert found["errors"]["output"] < 1e-5


def test_generic_code_does_not_pass_for_a_kernel():
    case = small("float32 favor basic full")
    found = parity.check(EmulatedLibrary([]), case)
    assert found["errors"]["output"] < case.bound
    assert found["kernels"] == []
    assert not found["passed"]


def test_generic_code_does_not_pass_for_kernels_that_gave_up(fake_cupy, cupy_backend, monkeypatch):
    # The library replaces both; they are restored.
    monkeypatch.setattr(linattn_cupy.device, "launch", linattn_cupy.device.launch)
    monkeypatch.setattr(linattn_cupy.gradients, "Declined", Declined)
    noted = library.CupyLibrary()
    emulated = EmulatedLibrary(noted.launches)
    case = small("bfloat16 elu gradient full")
    assert parity.check(emulated, case)["passed"]
    inputs = parity.host_inputs(case)
    inputs.gradient[..., 0, 0] = 3e38  # its products overflow
    monkeypatch.setattr(parity, "host_inputs", lambda case: inputs)
    found = parity.check(emulated, case)
    assert library.GENERIC in found["kernels"]
    assert not found["passed"]


def test_a_number_made_of_nan_does_not_pass(emulated, monkeypatch):
    def plausible(array):
        return np.nan_to_num(np.asarray(array, np.float64), nan=0.5)

    case = small("float32 favor nan causal")
    assert parity.check(emulated, case)["passed"]
    monkeypatch.setattr(emulated, "numpy", plausible)
    assert parity.check(emulated, case)["errors"]["output"] == np.inf


def test_relative_error():
    wanted = np.array([3.0, 4.0])
    assert parity.relative_error(np.array([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert parity.relative_error(wanted * 1e200, wanted * 1e200) == 0
    assert parity.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert parity.relative_error(np.ones(2), np.zeros(2)) > 1
    assert parity.relative_error(np.ones(3), np.ones(2)) == np.inf
    assert not parity.relative_error(np.array([np.nan, 4.0]), wanted) <= np.inf


def test_heads_that_repeat_others_are_compared(emulated, monkeypatch):
    case = small("float32 elu long causal", lead=(7,))
    assert parity.check(emulated, case)["passed"]
    exact = emulated.numpy

    def last_head_is_another(array):
        return np.concatenate([exact(array)[:-1], exact(array)[:1] * 2])

    monkeypatch.setattr(emulated, "numpy", last_head_is_another)
    assert not parity.check(emulated, case)["passed"]


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
    assert inputs.mask[..., 0].all()
    for array in (inputs.key, inputs.value):
        assert np.isnan(array[hidden]).all()
        assert np.isfinite(array[~hidden]).all()


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


# What needs CuPy, on a double of it ---------------------------------------------------------------


class FakeStream:
    """Kernels that are launched while it captures do not run; its graph launches them."""

    device: Any = None
    now: Any = None
    null: Any = None
    kept: list[Any]

    def __init__(self, non_blocking=False):
        self.ptr = 3

    def __enter__(self):
        FakeStream.now = self
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        pass

    def begin_capture(self):
        self.launch, self.kept = FakeStream.device.launch, []

        def kept(*arguments):
            self.kept.append(arguments)

        linattn_cupy.device.launch = kept

    def end_capture(self):
        linattn_cupy.device.launch = self.launch

        def again():
            for arguments in self.kept:
                self.launch(*arguments)

        return types.SimpleNamespace(launch=again)


class FakeEvent:
    done = False

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass


@pytest.fixture
def fake_cupy(monkeypatch, emulated, cupy_backend):
    """A module `cupy` of NumPy's functions, as far as the benchmark calls it."""
    cupy: Any = types.ModuleType("cupy")
    for name in ("empty", "empty_like", "full", "ones", "copyto", "ascontiguousarray", "asarray"):
        setattr(cupy, name, getattr(np, name))
    cupy.ndarray = ()  # no array is CuPy's
    cupy.random = types.SimpleNamespace(
        standard_normal=lambda shape, dtype: np.random.default_rng(0).standard_normal(shape, dtype)
    )
    FakeStream.device = cupy_backend
    FakeStream.now = FakeStream()
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda index: {"name": b"Double"},
        driverGetVersion=lambda: 13000,
        streamLegacy=1,
    )
    cupy.cuda = types.SimpleNamespace(
        Stream=FakeStream,
        Event=FakeEvent,
        Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
        MemoryPool=lambda: types.SimpleNamespace(malloc=None),
        using_allocator=lambda allocator: nullcontext(),
        get_current_stream=lambda: FakeStream.now,
        get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at),
        runtime=runtime,
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    cupy.__version__ = "99"
    cupy.RawKernel = lambda text, name, options=(): lambda grid, block, arguments: None
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


@pytest.mark.parametrize("name", ["bfloat16 elu graph causal", "float32 elu decoder graph"])
def test_a_graph_that_does_not_run_again_does_not_pass(fake_cupy, emulated, monkeypatch, name):
    found = parity.check(emulated, small(name))
    assert found["passed"], found
    idle = types.SimpleNamespace(launch=lambda: None)
    end = FakeStream.end_capture
    monkeypatch.setattr(FakeStream, "end_capture", lambda self: (end(self), idle)[1])
    assert not parity.check(emulated, small(name))["passed"]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("generic elu causal", set()),
        ("tf32 elu full", {"log_activations", "key_weights", "query_weights", "products"}),
        ("bfloat16 elu causal", {"segment_states", "scan_states", "causal_rows", "redo_rows"}),
        ("bfloat16 elu causal gradient", {"causal_rows", "causal_gradients"}),
        ("bfloat16 Decoder.step", {"decode"}),
        ("bfloat16 decode_step", {"decode"}),
    ],
)
def test_times_on_a_double(fake_cupy, emulated, monkeypatch, name, kernels):
    for constant, value in {"LEAD": (1, 1), "LENGTH": 70, "DECODED": (1, 2), "BUDGET": 0.0}.items():
        monkeypatch.setattr(times, constant, value)
    monkeypatch.setattr(times, "BATCH_SECONDS", 0.0)
    found = dict(times.items())[name]()
    assert kernels <= set(found["kernels"])
    assert bool(kernels) == bool(found["kernels"])
    assert all(0 < found[how]["ms"] < 60e3 for how in found if how != "kernels")
    assert ("graph" in found) == (
        not name.endswith("gradient") and not name.startswith(("generic", "tf32"))
    )


def test_the_file_of_times_holds_what_failed_too(fake_cupy, monkeypatch, tmp_path):
    def fail():
        message = "no such library"
        raise ImportError(message)

    ours = [("a b", lambda: {"eager": {"ms": 1.0}}), ("b", fail), ("c", fail)]
    monkeypatch.setattr(times, "items", lambda: iter(ours))
    monkeypatch.setattr(times, "unable", lambda: None)
    assert times.main(["b", "--out", str(tmp_path / "times.json")]) == 0
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["machine"]["device"] == "Double"
    assert found["machine"]["kernels"] == hardware.kernel_hashes()
    failed = {"error": "ImportError: no such library"}
    assert found["times"] == {"a b": {"eager": {"ms": 1.0}}, "b": failed}


def test_all_that_a_case_launches_is_compiled_first(fake_cupy, cupy_backend, monkeypatch):
    for where, name in ((linattn_cupy.device, "launch"), (linattn_cupy.gradients, "Declined")):
        monkeypatch.setattr(where, name, getattr(where, name))
    launch = linattn_cupy.device.launch
    compiled, launched = set(), set()
    case = small("bfloat16 favor gradient causal")
    monkeypatch.setattr(first_contact, "_items", lambda *, few: {case.name: case})
    monkeypatch.setattr(library, "register", lambda: False)
    monkeypatch.setattr(
        linattn_cupy.device, "_kernel", lambda *variant: compiled.add(variant[:3]), raising=True
    )
    monkeypatch.setattr(linattn_cupy.device, "open_compiler", lambda: None)
    assert first_contact._compile([case.name]) == 0
    assert cupy_backend.launches == []

    def noted(source, function, options, *rest):
        launched.add((source, function, tuple(options.items())))
        launch(source, function, options, *rest)

    monkeypatch.setattr(linattn_cupy.device, "launch", noted)
    parity.check(EmulatedLibrary(cupy_backend.launches), case)
    assert compiled == launched
    assert launched
