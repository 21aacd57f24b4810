"""The GPU benchmark without a GPU: its checks can fail, its arithmetic and its tables are right."""

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
from benchmarks.gpu import (
    behaviour,
    cases,
    ceilings,
    compilation,
    counts,
    floors,
    goals,
    library,
    limits,
    machine,
    machine_code,
    parity,
    peers,
    run,
    tables,
    timer,
    timings,
)
from benchmarks.gpu.record import Item, LeftOut, Record
from benchmarks.gpu.section import BROKEN, run_section
from benchmarks.gpu.timer import input_sets, measure
from linattn import _dispatch
from linattn.typing import Declined
from linattn_cupy import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h100"
ALL = {case.name: case for case in cases.cases()}


class EmulatedLibrary:
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
    quick = {case.name for case in cases.cases(quick=True)}
    assert quick < set(ALL)
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


# Floors and times -------------------------------------------------------------------------------

H200 = floors.Rates(copy=4.3e12, product=790e12, exp=4.2e12)


@pytest.mark.parametrize(
    ("feature_map", "dim", "is_causal", "microseconds"),
    [
        # 64 heads of 8,192 tokens: 512 bytes, 4 x 64 x 65 + 128 x 129 flops, 128 exponentials
        ("elu", 64, True, (62.4, 22.0, 16.0)),
        # 4 x 64 x 256 + 4 x 256 x 65 = 132,096 flops, 512 exponentials
        ("favor", 64, False, (62.4, 87.7, 63.9)),
        # 128 x 321 = 41,088 more
        ("favor", 64, True, (62.4, 114.9, 63.9)),
        ("favor", 128, True, (124.9, 207.4, 63.9)),
    ],
)
def test_floors_by_hand(feature_map, dim, is_causal, microseconds):
    sizes = floors.Sizes(64, dim, 256, dim)
    work = floors.attention_work(feature_map, sizes, 8192, itemsize=2, is_causal=is_causal)
    found = floors.floor(work, H200)
    assert [round(1e6 * x, 1) for x in found] == list(microseconds)
    assert found.seconds == max(found)


def test_floor_of_a_step():
    work = floors.decode_work(floors.Sizes(1024))
    assert work.bytes == 2 * 1024 * 4 * 256 * 66
    assert 1e6 * floors.floor(work, H200).seconds == pytest.approx(32.2, abs=0.1)


def test_what_is_executed_by_hand():
    # A token and head: half of the keys again, 2 x 64 x 256 + 2 x 256 x 64 flops each; all sides
    # once, 131,072; a causal square of 2 x 64 x 320, of whose strips 5 in 8 are done.
    flops = floors.executed_flops("favor", floors.Sizes(), 8192, is_causal=True)
    assert flops == 64 * 8192 * (32768 + 131072 + 25600)
    full = floors.executed_flops("elu", floors.Sizes(), 8192, is_causal=False)
    assert full == 64 * 8192 * 4 * 64 * 64


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


def test_measure_takes_medians_of_warm_rotated_calls():
    slow_start = itertools.chain([9.0] * 6, itertools.repeat(1.1e-3))
    clock = FakeClock(slow_start)
    found = measure(clock, [partial(clock.call, i) for i in range(3)], budget=0.0)
    assert found["seconds"] == pytest.approx(1.1e-3)
    assert found["spread"] == pytest.approx(0, abs=1e-9)
    assert found["calls"] == 3
    assert found["batches"] == 5
    assert clock.calls[7:] == [0, 1, 2] * 5


def test_measure_gives_the_median_and_the_spread():
    times = itertools.chain([1.0] * 3, [1.0, 2.0, 3.0, 4.0, 5.0])
    clock = FakeClock(times)
    found = measure(clock, [lambda: clock.call(0)], budget=0.0)
    assert found["seconds"] == 3.0
    assert found["spread"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("bytes_each", "free", "sets"),
    [
        (10**6, 10**9, 16),
        (10**8, 10**10, 2),
        (10**8, 10**8, 1),
        (10**8, 10**7, 0),
        (10**7, 10**9, 15),
    ],
)
def test_input_sets_are_more_than_the_cache_and_fit(bytes_each, free, sets):
    assert input_sets(bytes_each, 50 * 10**6, free) == sets


def test_items_have_names_of_their_own_and_begin_with_the_main_length():
    library_of_none: Any = None
    for items in (
        list(ceilings.items()),
        list(timings.items()),
        list(peers.items()),
        list(behaviour.items(library_of_none)),
    ):
        names = [item.name for item in items]
        assert len(set(names)) == len(names)
        assert names
    assert f" {timings.MAIN}" in next(iter(timings.items())).name
    assert len(list(timings.items(quick=True))) < len(list(timings.items()))


# Records ----------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "gpu.json", {"kernels": {}})


def never():
    message = "done before"
    raise AssertionError(message)


def test_a_section_is_saved_item_by_item(record):
    def broken():
        assert Record.read(record.path).running == "parity: b"
        message = "CUDA said no"
        raise RuntimeError(message)

    def absent():
        reason = "no such tool"
        raise LeftOut(reason)

    record.store("parity", "a", {"passed": True})
    items = [
        Item("a", never),
        Item("b", broken),
        Item("c", absent),
        Item("d", lambda: {"passed": False}),
    ]
    code = run_section(record, "parity", iter(items), time.time() + 100, lambda: True)
    assert code == 0
    again = Record.read(record.path)
    assert again.sections == record.sections
    assert (again.machine, again.running) == (record.machine, None)
    found = again.items("parity")
    assert list(found) == ["a", "b", "c", "d"]
    assert found["b"]["exception"].rstrip().endswith("RuntimeError: CUDA said no")
    assert found["c"]["left_out"] == "no such tool"
    assert again.failures() == ["parity: b", "parity: d"]


def test_a_broken_device_ends_the_process_and_another_goes_on(record):
    def broken():
        message = "illegal address"
        raise RuntimeError(message)

    items = [Item("a", broken), Item("b", lambda: {"passed": True})]
    stop = time.time() + 100
    assert run_section(record, "parity", iter(items), stop, lambda: False) == BROKEN
    assert list(record.items("parity")) == ["a"]
    assert run_section(record, "parity", iter(items), stop, lambda: False) == 0
    assert record.failures() == ["parity: a"]
    record.store("behaviour", "says nothing", {})
    assert record.failures() == ["parity: a", "behaviour: says nothing"]


def test_what_takes_its_process_along_has_a_name(record):
    assert not record.blame("it died")
    record.begin("behaviour", "forked: process")
    record = Record.read(record.path)
    assert record.blame("it died")
    assert record.items("behaviour") == {
        "forked: process": {"exception": "it died", "passed": False}
    }


def test_numbers_of_numpy_are_kept(record):
    record.store("parity", "a", {"passed": np.bool_(True), "x": np.float32(0.5), "p": Path("q")})
    assert Record.read(record.path).items("parity") == {"a": {"passed": True, "x": 0.5, "p": "q"}}


def test_out_of_time_is_said_and_no_failure(record):
    run_section(record, "parity", iter([Item("a", never)]), time.time() - 1)
    assert record.items("parity") == {"a": {"left_out": "out of time"}}
    assert record.failures() == []


def test_what_cannot_end_in_time_is_not_begun(record):
    items = [Item("long", never, 50.0), Item("short", lambda: {"passed": True}, 5.0)]
    run_section(record, "parity", iter(items), time.time() + 20)
    assert record.items("parity")["long"] == {"left_out": "out of time"}
    assert record.items("parity")["short"]["passed"]


class Processes:
    """In the place of processes: each item that is not done yet takes its process along."""

    def __init__(self, names):
        self.names, self.begun = names, []

    def run(self, command, **settings):
        section, path = command[3:5]
        record = Record.read(Path(path))
        if not record.machine:
            record.machine = {"kernels": hardware.kernel_hashes(), "device": {"name": "Double"}}
        left = [name for name in self.names if name not in record.items(section)]
        self.begun.append(section)
        if not left:
            record.save()
            return types.SimpleNamespace(returncode=0)
        record.begin(section, left[0])
        return types.SimpleNamespace(returncode=139)


@pytest.fixture
def on_double(fake_cupy, monkeypatch):
    monkeypatch.setattr(run, "unable", lambda: None)
    monkeypatch.setattr(tables, "report", lambda record: "")


def test_a_section_stops_after_some_deaths(on_double, monkeypatch, tmp_path):
    processes = Processes([f"item {i}" for i in range(20)])
    monkeypatch.setattr(subprocess, "run", processes.run)
    out = tmp_path / "gpu.json"
    assert run.main(["--out", str(out), "--only", "ceilings", "peers"]) == 0
    assert processes.begun == ["ceilings"] * 5 + ["peers"] * 5
    found = Record.read(out).items("ceilings")
    assert list(found) == [*(f"item {i}" for i in range(5)), "the rest"]
    assert "too many processes ended" in found["the rest"]["left_out"]
    assert run.main(["--out", str(out), "--only", "ceilings"]) == 0
    assert list(Record.read(out).items("ceilings"))[5:] == [
        *(f"item {i}" for i in range(5, 10)),
        "the rest",
    ]


def test_parts_of_a_run_make_one_record(on_double, monkeypatch, tmp_path):
    processes = Processes([])
    monkeypatch.setattr(subprocess, "run", processes.run)
    out = tmp_path / "gpu.json"
    run.main(["--out", str(out), "--only", "ceilings"])
    record = Record.read(out)
    record.store("ceilings", "copy", {"rate": 1.0})
    record.store("ceilings", "exp", {"left_out": "out of time"})
    record.store("peers", "fla", {"left_out": "fla is not installed"})
    run.main(["--out", str(out), "--only", "timings", "peers"])
    assert processes.begun == ["ceilings", "compilation", "timings", "peers"]
    assert Record.read(out).sections == {
        "ceilings": {"copy": {"rate": 1.0}},
        "peers": {"fla": {"left_out": "fla is not installed"}},
    }


@pytest.mark.parametrize("what", ["device", "kernels", "quick"])
def test_another_run_is_not_added_to(on_double, monkeypatch, tmp_path, capsys, what):
    monkeypatch.setattr(subprocess, "run", Processes([]).run)
    out = tmp_path / "gpu.json"
    run.main(["--out", str(out), "--only", "ceilings"])
    record = Record.read(out)
    others: dict[str, Any] = {"device": {"name": "X"}, "kernels": {}, "quick": False}
    record.machine[what] = others[what]
    record.store("ceilings", "copy", {"rate": 1.0})
    more = ["--quick"] if what == "quick" else []
    assert run.main(["--out", str(out), *more]) == 2
    words = {"device": "is of X, this is Double", "kernels": "other kernels", "quick": "--quick"}
    assert words[what] in capsys.readouterr().err
    assert Record.read(out).items("ceilings") == {"copy": {"rate": 1.0}}


# Tables -----------------------------------------------------------------------------------------


@pytest.fixture
def whole(record):
    """A run with something in every table: all times 1 ms, generic code 6 ms."""

    def store(section, name, found):
        record.items(section)[name] = found

    record.machine |= {
        "date": "2026-01-02",
        "commit": "abc",
        "python": "3.12",
        "versions": {"linattn": "0.1.0"},
        "device": {
            "name": "NVIDIA X100 80GB",
            "driver": "580",
            "memory_bytes": 80 * 2**30,
            "processors": 132,
            "nvrtc": "13.0",
        },
        "kernels": {"fused.cu": "00"},
    }
    rates = {"copy": "byte", "bfloat16": "flop", "float16": "flop", "tf32": "flop"}
    for name, unit in {**rates, "float32": "flop", "exp": "exp"}.items():
        store("ceilings", name, {"rate": 4e12, "unit": unit, "spread": 0.01})
    for case in cases.cases():
        ran = {"dtype": case.dtype, "bound": case.bound, "kernels": [], "deterministic": True}
        error = 0.5 if case.name == "tf32 elu jump" else 1e-6
        store("parity", case.name, {**ran, "errors": {"output": error}, "passed": True})
    for item in timings.items():
        name = item.name
        way = next((way for way in timings.WAYS if name.startswith(way)), name.split()[0])
        took = {"seconds": 6e-3 if "generic" in way else 1e-3, "eager_seconds": 2e-3}
        told: dict[str, Any] = {"way": way, "map": "favor", "kind": "decode"}
        told["dtype"] = name.split()[-1]
        if way in timings.WAYS:
            told["map"], told["kind"], length = name.removeprefix(way).split()
            told |= {"length": int(length), "dtype": timings.WAYS[way].dtype}
        store("timings", name, told | took)
    for item in peers.items():
        way, kind, length = item.name.rsplit(" ", 2)
        if way.startswith("fla"):
            store("peers", item.name, {"left_out": "fla is not installed"})
            continue
        told = {"way": way, "map": "exact", "kind": kind, "length": int(length)}
        seconds = 5e-4 if length == "4096" else 2e-3
        store("peers", item.name, told | {"dtype": "bfloat16", "seconds": seconds})
    library_of_none: Any = None
    for item in behaviour.items(library_of_none):
        store("behaviour", item.name, {"passed": True})
    record.save()
    return record


def test_the_report_is_80_columns_wide(whole):
    whole.store(
        "parity", "x " * 40, {"exception": "Trace\n" + "OSError: " + 300 * "y ", "passed": False}
    )
    whole.store("behaviour", "forked process", {"passed": False, "said": 200 * "z "})
    text = tables.report(whole)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("NVIDIA X100", "8,192 tokens", "bfloat16", "OSError", "fla is not installed"):
        assert part in text


def test_shares_of_the_floor_are_by_the_ceilings_of_the_run(whole):
    # 64 heads x 8,192 tokens x 512 bytes at 4e12 a second.
    item = whole.items("timings")["fused bfloat16 favor causal 8192"]
    found = goals.floor_of(whole, item)
    assert found is not None
    assert found.memory == pytest.approx(64 * 8192 * 512 / 4e12)
    assert found.product == pytest.approx(64 * 8192 * 173184 / 4e12)
    assert found.exp == pytest.approx(64 * 8192 * 512 / 4e12)
    del whole.items("ceilings")["copy"]
    assert goals.floor_of(whole, item) is None


def test_goals(whole):
    found = {goal.wanted: goal for goal in goals.goals(whole)}
    faster = found["full: float32 blocks 5 times generic code"]
    assert (faster.reached, faster.met) == ("6.00 times", True)
    memory = found["causal bfloat16: half of memory's rate, K and V twice"]
    assert (memory.reached, memory.met) == ("0.10 of it", False)
    ahead = [found[f"causal {n:,}: ahead of torch SDPA"] for n in (4096, 8192)]
    assert [goal.met for goal in ahead] == [False, True]
    whole.items("peers")["torch SDPA cuDNN causal 8192"]["seconds"] = 9e-4
    beside = {goal.wanted: goal for goal in goals.goals(whole)}
    assert beside["causal 8,192: ahead of torch SDPA"].reached == "0.90 times"
    whole.sections["peers"] = {}
    unknown = {goal.wanted: goal for goal in goals.goals(whole)}
    assert unknown["causal 8,192: ahead of torch SDPA"].met is None


def test_nan_is_the_worst_error(whole):
    first = next(iter(whole.items("parity").values()))
    first["errors"] = {"output": float("nan"), "state": 1e-7}
    assert "nan" in tables.report(whole)


def test_what_the_backend_says_of_hardware_is_what_the_results_say():
    run = json.loads(hardware.MEASURED.read_text(encoding="utf-8"))
    said = (RESULTS / "first_contact.log").read_text(encoding="utf-8")
    assert f"----- {len(run['failures'])} of {run['checks']} failed" in said
    found = json.loads((RESULTS / "run.json").read_text(encoding="utf-8"))["machine"]
    for name in ("commit", "date", "kernels"):
        assert run[name] == found[name]
    assert run["device"] == found["device"]["name"]


# Running ----------------------------------------------------------------------------------------


def test_the_backend_is_found_in_a_plain_checkout(monkeypatch):
    monkeypatch.setattr(_dispatch, "_entry_points", dict)
    assert library.register()
    assert linattn.registered_backends()["cupy"] == "linattn_cupy"
    assert not library.register()


def test_the_command_says_why_it_cannot_run(tmp_path):
    # A cupy that is there and finds no driver, whatever is installed here.
    (tmp_path / "cupy.py").write_text(
        "import types\n__version__ = '99'\n"
        "def count():\n    raise RuntimeError('cudaErrorInsufficientDriver')\n"
        "cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=count))\n"
    )
    known = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    out = tmp_path / "out.json"
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(out)],
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
        [sys.executable, "-m", "benchmarks.gpu.run"],
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


def test_a_section_in_a_process_of_its_own_that_dies_is_blamed(tmp_path, monkeypatch):
    # Its CuPy cannot describe a machine: it dies before the first item, and the next one begins.
    (tmp_path / "cupy.py").write_text(
        "import types\n__version__ = '99'\n"
        "cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 1))\n"
    )
    known = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu.run",
            "--out",
            "a/b.json",
            "--only",
            "parity",
            "peers",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": known},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1, finished.stderr
    found = Record.read(tmp_path / "a" / "b.json")
    assert "FileNotFoundError" not in finished.stderr  # --out is the caller's, not the checkout's
    assert "getDeviceProperties" in finished.stderr
    assert set(found.sections) == {"compilation", "parity", "peers"}
    assert found.failures() == ["parity: begin"]
    assert "Failed" in finished.stdout


@pytest.mark.parametrize(
    "text",
    [ceilings.EXPONENTIALS, ceilings.PRODUCTS_OF_WARPS, timer.BUSY],
    ids=["exp", "mma", "busy"],
)
def test_kernels_of_the_benchmark_compile(compile_kernel, tmp_path, text):
    path = tmp_path / "f.cu"
    path.write_text(text)
    (kernel,) = compile_kernel(path, {"CHAINS": ceilings.CHAINS}, "sm_90").values()
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


class FakePool:
    malloc = None

    def free_all_blocks(self):
        pass


class FakeHook:
    """Is told of 1,000 bytes that are given back, then of ``last`` bytes that stay."""

    last = 0

    def malloc_postprocess(self, **told):
        raise NotImplementedError

    free_postprocess = malloc_postprocess

    def __enter__(self):
        self.malloc_postprocess(mem_size=1000)
        self.free_postprocess(mem_size=1000)
        return self

    def __exit__(self, *error):
        self.malloc_postprocess(mem_size=self.last)


@pytest.fixture
def fake_cupy(monkeypatch, emulated, cupy_backend):
    """A module `cupy` of NumPy's functions, as far as the benchmark calls it."""
    cupy: Any = types.ModuleType("cupy")
    for name in ("empty", "empty_like", "full", "ones", "copyto", "ascontiguousarray", "asarray"):
        setattr(cupy, name, getattr(np, name))
    cupy.ndarray = ()  # no array is CuPy's

    def normal(shape, dtype):
        return np.random.default_rng(0).standard_normal(shape, dtype)

    generator = types.SimpleNamespace(standard_normal=normal)
    cupy.random = types.SimpleNamespace(
        standard_normal=normal,
        random=lambda shape, dtype: np.random.default_rng(0).random(shape, dtype),
        default_rng=lambda seed: generator,
    )
    FakeStream.device = cupy_backend
    FakeStream.now = FakeStream()
    device = types.SimpleNamespace(synchronize=lambda: None)
    properties = {
        "name": b"Double",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 1,
        "totalGlobalMem": 2**30,
        "l2CacheSize": 10**6,
    }
    cupy.cuda = types.SimpleNamespace(
        Stream=FakeStream,
        Event=FakeEvent,
        MemoryHook=FakeHook,
        MemoryPool=FakePool,
        using_allocator=lambda allocator: nullcontext(),
        Device=lambda: device,
        get_current_stream=lambda: FakeStream.now,
        get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at),
        runtime=types.SimpleNamespace(
            memGetInfo=lambda: (10**9, 10**9),
            getDeviceProperties=lambda index: properties,
            streamLegacy=1,
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
        ),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    cupy.get_default_memory_pool = FakePool
    cupy.RawKernel = lambda text, name, options=(): lambda grid, block, arguments: None
    cupyx: Any = types.ModuleType("cupyx")
    cupyx.allow_synchronize = lambda allowed: nullcontext()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    return cupy


def run_items(items, names):
    found = {item.name: item.run() for item in items if item.name in names}
    assert set(found) == set(names)
    return found


def test_behaviour_on_a_double(fake_cupy, emulated, monkeypatch):
    monkeypatch.setattr(behaviour, "SMALL", (1, 2, 130, 64))
    monkeypatch.setattr(behaviour, "feature_map_of", lambda *a: parity.feature_map_of("elu", 0, 0))
    names = [
        "work stays on the stream, bfloat16 causal",
        "no hidden synchronization, bfloat16 causal",
        "steps without synchronization, bfloat16",
        "max and min of infinities",
    ]
    found = run_items(behaviour.items(emulated), names)
    assert {name: item["passed"] for name, item in found.items()} == dict.fromkeys(names, True)


def test_a_call_of_cublas_is_not_to_be_captured(fake_cupy, emulated, monkeypatch):
    monkeypatch.setattr(behaviour, "SMALL", (1, 2, 130, 64))
    monkeypatch.setattr(behaviour, "feature_map_of", lambda *a: parity.feature_map_of("elu", 0, 0))
    name = "no graph of a call, float32 causal"
    assert run_items(behaviour.items(emulated), [name])[name]["passed"] is False

    def fail(call):
        message = "function must be a call that does not call cuBLAS"
        raise RuntimeError(message)

    monkeypatch.setattr(behaviour, "captured", fail)
    found = run_items(behaviour.items(emulated), [name])[name]
    assert found["passed"]
    assert "cuBLAS" in found["said"]


@pytest.mark.parametrize("name", ["bfloat16 elu graph causal", "float32 elu decoder graph"])
def test_a_graph_that_does_not_run_again_does_not_pass(fake_cupy, emulated, monkeypatch, name):
    found = parity.check(emulated, small(name))
    assert found["passed"], found
    idle = types.SimpleNamespace(launch=lambda: None)
    end = FakeStream.end_capture
    monkeypatch.setattr(FakeStream, "end_capture", lambda self: (end(self), idle)[1])
    assert not parity.check(emulated, small(name))["passed"]


def test_limits_on_a_double(fake_cupy, emulated, monkeypatch):
    monkeypatch.setattr(limits, "HEADS", 3)
    monkeypatch.setattr(limits, "LARGE", (3, 130, 64))
    names = ["3 heads, float32 full", "more than 2^31 elements, bfloat16 causal"]
    found = run_items(limits.items(emulated), names)
    assert all(item["passed"] for item in found.values())
    monkeypatch.setattr(limits, "LARGE", (3, 2**31, 64))
    large = next(item for item in limits.items(emulated) if item.name == names[1])
    with pytest.raises(LeftOut, match="needs 3840 GiB, 1 are free"):
        large.run()


@pytest.mark.parametrize(
    ("held", "passed"), [(limits.MAX_EXTRA_BYTES["float32"], True), (2**29, False)]
)
def test_memory_on_a_double(fake_cupy, emulated, monkeypatch, held, passed):
    rows = np.zeros((4, 16, 100, 64), np.float32)
    monkeypatch.setattr(limits, "_attend", lambda *arguments: rows)
    FakeHook.last = rows.nbytes + held
    found = limits._memory(emulated, "float32", "full", 100)
    assert found["extra_bytes"] == held
    assert found["passed"] is passed


def test_timings_on_a_double(fake_cupy, emulated, monkeypatch):
    monkeypatch.setattr(timings, "BATCH", 1)
    monkeypatch.setattr(timings, "HEADS", 1)
    monkeypatch.setattr(timings, "MAIN", 70)
    monkeypatch.setattr(timings, "DECODED", floors.Sizes(2, 64, 256, 64))
    monkeypatch.setattr(timings, "measure", partial(measure, budget=0.0))
    ways = {name: way._replace(lengths=(70,)) for name, way in timings.WAYS.items()}
    monkeypatch.setattr(timings, "WAYS", ways)
    names = [
        "step 1, generic elu causal 70",
        "step 2, tf32 elu full 70",
        "fused bfloat16 elu causal 70",
        "Decoder.step bfloat16",
        "decode_step bfloat16",
    ]
    found = run_items(timings.items(quick=True), names)
    for item in found.values():
        assert 0 < item["seconds"] < 60
        assert item["eager_seconds"] > 0
    assert [found[name]["graph"] for name in names] == [False, True, True, True, True]
    assert found[names[2]]["sets"] == 16
    kernels = ["segment_states", "scan_states", "causal_rows", "redo_rows"]
    assert list(found[names[2]]["kernels"]) == kernels
    by_products = {"log_activations", "key_weights", "query_weights", "products"}
    assert by_products < set(found[names[1]]["kernels"])
    assert "kernels" not in found[names[0]]


def test_a_call_that_cannot_be_captured_has_its_eager_times(fake_cupy, monkeypatch):
    def refused(call):
        message = "cublasSetStream"
        raise NotImplementedError(message)

    monkeypatch.setattr(timings, "measure", partial(measure, budget=0.0))
    monkeypatch.setattr(timings, "captured", refused)
    found = timings._timed([lambda: None], graphs=True)
    assert found["seconds"] == found["eager_seconds"] > 0
    assert found["graph"] is False
    assert found["not_captured"] == "NotImplementedError: cublasSetStream"


def test_all_that_a_case_launches_is_compiled_first(fake_cupy, cupy_backend, monkeypatch):
    launched: set[compilation.Variant] = set()
    case = small("bfloat16 favor gradient causal")
    found = compilation.variants([case])
    assert cupy_backend.launches == []
    launch = linattn_cupy.device.launch

    def noted(source, function, options, *rest):
        launched.add((source, function, tuple(options.items())))
        launch(source, function, options, *rest)

    monkeypatch.setattr(linattn_cupy.device, "launch", noted)
    parity.check(EmulatedLibrary(cupy_backend.launches), case)
    assert set(found) == launched
    assert len(found) == len(launched)


def test_ceilings_on_a_double(fake_cupy, monkeypatch):
    monkeypatch.setattr(ceilings, "COPIED", 4000)
    monkeypatch.setattr(ceilings, "measure", partial(measure, budget=0.0))
    found = run_items(ceilings.items(), ["copy", "exp"])
    assert found["copy"]["rate"] == 8000 / found["copy"]["seconds"]
    count = ceilings.BLOCKS * ceilings.THREADS * ceilings.CHAINS * ceilings.ROUNDS
    assert found["exp"]["rate"] == count / found["exp"]["seconds"]


def test_a_machine_is_described(fake_cupy):
    found = machine.describe()
    assert found["device"]["name"] == "Double"
    assert found["kernels"] == hardware.kernel_hashes()
    assert found["versions"]["numpy"] == np.__version__


# Counts -----------------------------------------------------------------------------------------

DISASSEMBLED = """
	.section	.text.adds,"ax",@progbits
	//## File "/kernels/f.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_2:
	//## File "/kernels/f.cu", line 5
        /*0020*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0040*/                   LDS.64 R6, [R2+0x10] ;
        /*0050*/               @P1 BRA `(.L_x_3) ;
.L_x_4:
	//## File "/kernels/f.cu", line 7
        /*0060*/               @P2 BRA `(.L_x_1) ;
	//## File "/kernels/f.cu", line 9
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/              @!P3 BRA `(.L_x_2) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   MUFU.RCP R9, R9 ;
        /*00b0*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*00c0*/                   BRA `(.L_x_5) ;
        /*00d0*/                   NOP ;
"""


def test_instructions_are_counted_by_loop():
    """What stands behind the end of a kernel and goes back into a loop is part of that loop."""
    outside, loops = machine_code.parts_of(DISASSEMBLED)["adds"]
    assert [(loop.line, loop.depth) for loop in loops] == [("f.cu:9", 1), ("f.cu:7", 2)]
    outer, inner = (loop.part for loop in loops)
    assert outer == ({"total": 3, "LDSM": 1, "BAR": 1, "branch": 1}, 4)
    assert inner == ({"total": 6, "HMMA": 1, "LDS": 1, "MUFU": 1, "branch": 3}, 2)
    # The last branch is what follows each kernel: nothing goes there.
    assert outside == ({"total": 4, "rest": 1, "branch": 3}, 0)
    kernel = {
        "registers": 40,
        "spill_bytes": 0,
        "dynamic_shared_bytes": 1024,
        "outside": {"instructions": outside.counts, "wavefronts": 0},
        "loops": [
            {"line": loop.line, "depth": loop.depth}
            | {"instructions": loop.part.counts, "wavefronts": loop.part.wavefronts}
            for loop in loops
        ],
    }
    table = counts.table_of({"f.cu": {"adds": kernel}})
    assert "adds: 40 registers, 0 B spilled, 1,024 B shared" in table
    assert [line.split()[:3] for line in table.splitlines()[-2:]] == [
        ["loop", "at", "f.cu:9"],
        ["loop", "at", "f.cu:7"],
    ]
