"""The comparison with other libraries: is it right, is it fair, does it run to its end."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import recurrences, same_bits
from benchmarks.peers import numbers, oracle, page, rotation
from benchmarks.peers.limits import CAUSAL_BLOCK, limit_seconds, work
from benchmarks.peers.machine import describe, slug
from benchmarks.peers.problem import Inputs, Sizes
from benchmarks.peers.processes import PeerError
from benchmarks.peers.record import Cell, LeftOut, Record, Timing
from benchmarks.peers.registry import ATTENTION, GRADIENT, PEERS, TEXT
from benchmarks.peers.rotation import Budget, Runner, order, side_by_side
from benchmarks.peers.scales import CASES, DTYPES, PATHS
from benchmarks.peers.tables import as_markdown, as_text, tables
from benchmarks.peers.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "in_torch": "torch",
    "torch_by_hand": "torch",
    "in_jax": "jax",
    "performer": "performer_pytorch",
}
EACH = [
    pytest.param(name, kind, marks=[pytest.mark.frameworks] if peer.module in LIBRARIES else [])
    for name, peer in PEERS.items()
    for kind in peer.kinds
]
TOLERANCE = PEERS["linattn-favor"].tolerance
SMALL = ["--heads", "2", "--dim", "8", "--features", "16", "--rounds", "2", "--turn-seconds", "0"]


def skip_without_library(name):
    library = LIBRARIES.get(PEERS[name].module)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{name}: {library} is not installed")


@pytest.mark.parametrize(("name", "kind"), EACH)
@pytest.mark.filterwarnings("ignore")  # of other people's code
def test_peers_agree_with_their_formula(name, kind):
    skip_without_library(name)
    # Sums that are recovered by subtraction lose a digit, more or less by the processor.
    digits = 1 if name == "jax-backward" or kind in TEXT else 10
    assert Worker(name, 1).check(kind) <= PEERS[name].tolerance / digits


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("formula", ["softmax", "exponentials"])
def test_gradients_of_the_oracle_are_finite_differences(formula, is_causal):
    inputs = Inputs(Sizes(1, 2, 4, 6), 7)
    tokens = ("query", "key", "value")
    for name in (*tokens, "cotangent"):
        setattr(inputs, name, getattr(inputs, name).astype(np.float64))

    def vjp():
        if formula == "softmax":
            return oracle.softmax_vjp(inputs, is_causal=is_causal)
        return oracle.recipe_vjp(inputs, inputs.rows, is_causal=is_causal)

    _, *gradients = vjp()
    rng = np.random.default_rng(2)
    for name, gradient in zip(tokens, gradients, strict=True):
        start, direction = getattr(inputs, name), rng.standard_normal(gradient.shape)
        ends = []
        for step in (1e-6, -1e-6):
            setattr(inputs, name, start + step * direction)
            ends.append(np.sum(inputs.cotangent * vjp()[0]))
        setattr(inputs, name, start)
        assert np.sum(gradient * direction) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_check_sees_another_formula(kind, monkeypatch):
    def padded(x, rows):
        return oracle.stabilized(x, rows, 1e-2, is_query=True)

    monkeypatch.setattr(oracle, "exponentials", padded)
    assert Worker("linattn-favor", 1).check(kind) > TOLERANCE
    assert Worker("linattn-favor", 1).check(f"{kind} gradient") > TOLERANCE


@pytest.mark.parametrize("which", [1, 2, 3])
def test_check_sees_one_wrong_gradient(which, monkeypatch):
    right = oracle.recipe_vjp

    def wrong(*arguments, **options):
        results = right(*arguments, **options)
        results[which] = 1.001 * results[which]
        return results

    monkeypatch.setattr(oracle, "recipe_vjp", wrong)
    for name in ("linattn-favor", "linattn-pullback"):
        assert Worker(name, 1).check("causal gradient") > TOLERANCE


class Counted(np.ndarray):
    """An array that counts flops of products and exponentials made of it."""

    flops = 0
    exponentials = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [np.asarray(x) for x in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        if ufunc is np.matmul:
            Counted.flops += 2 * result.size * plain[0].shape[-1]
        if ufunc is np.exp:
            Counted.exponentials += result.size
        return np.asarray(result).view(Counted)


def blockwise(feature_map, x, is_causal, sizes):
    """Go through linear attention as the docstring of limits.py counts it."""
    d, m = sizes.dim, sizes.features
    rows = {"favor": m, "hyperbolic": m // 2, "elu": 0}[feature_map]

    def features(y):
        u = np.matmul(y, np.ones((d, rows)).view(Counted)) if rows else y
        weights = np.exp(u)
        if feature_map == "hyperbolic":
            weights = np.concatenate([weights, 1 / weights], axis=-1)
        return weights.view(Counted)

    state = np.zeros((m if rows else d, d + 1)).view(Counted)
    values_and_one = np.ones((CAUSAL_BLOCK, d + 1)).view(Counted)
    for block in np.split(x, len(x) // CAUSAL_BLOCK):
        phi_q, phi_k = features(block), features(block)
        np.matmul(phi_q, state)
        if is_causal:
            np.matmul(np.matmul(phi_q, phi_k.T), values_and_one)
        state = state + np.matmul(phi_k.T, values_and_one)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["favor", "hyperbolic", "elu"])
def test_work_is_what_an_instrumented_run_counts(feature_map, is_causal):
    sizes, length = Sizes(1, 1, 6, 10), 3 * CAUSAL_BLOCK
    Counted.flops = Counted.exponentials = 0
    blockwise(feature_map, np.zeros((length, sizes.dim)).view(Counted), is_causal, sizes)
    token = work(feature_map, sizes, is_causal=is_causal)
    assert (Counted.flops, Counted.exponentials) == (
        length * token.flops,
        length * token.exponentials,
    )


def test_every_peer_begins_a_round_in_turn():
    firsts = []
    for turn in range(6):
        places = order(6, turn)
        assert sorted(places) == list(range(6))
        firsts.append(places[0] if turn % 2 == 0 else places[-1])
    assert sorted(firsts) == list(range(6))
    assert [order(3, turn) for turn in range(2)] == [[0, 1, 2], [0, 2, 1]]


def test_what_is_compared_is_timed_side_by_side():
    able = {
        ("linattn-favor", 1): ["full", "causal", "decode"],
        ("linattn-elu", 1): ["causal"],
        ("numpy-loop", 1): ["causal"],
        ("linattn-favor", 2): ["full", "causal", "decode"],
        ("torch-favor", 2): ["causal"],
        ("torch-elu", 2): ["causal"],
    }
    cells = side_by_side(able, ["causal", "full", "decode"], 64)
    assert [(cell.kind, cell.peer, cell.threads) for cell in cells] == [
        ("causal", "linattn-favor", 1),
        ("causal", "numpy-loop", 1),
        ("causal", "linattn-favor", 2),
        ("causal", "torch-favor", 2),
        ("causal", "linattn-elu", 1),
        ("causal", "torch-elu", 2),
        ("full", "linattn-favor", 1),
        ("full", "linattn-favor", 2),
        ("decode", "linattn-favor", 1),
    ]


MACHINE = {
    **{"versions": {"numpy": "2.0"}, "cpu": "a CPU", "commit": "c0ffee", "date": "2026-01-02"},
    **{"cores": 2, "memory_gib": 8.0, "caches": [], "system": "Linux", "python": "3.11"},
    **{"removed_from_environment": {}, "libraries": []},
}


def record_of(curves, memory=()):
    """Make a record from ``{(peer, kind, threads): {length: rounds}}``."""
    record = Record(dict(MACHINE), Sizes(), {"exponentials": 1000, "rounds": 3})
    for (peer, kind, threads), curve in curves.items():
        for length, rounds in curve.items():
            record.timings.append(Timing(peer, kind, length, threads, rounds, (1.0,) * len(rounds)))
    record.memory.extend(memory)
    return record


def test_ratio_is_the_median_of_ratios_within_rounds():
    record = record_of(
        {
            ("linattn-favor", "full", 1): {64: (1.0, 2.0, 4.0)},
            ("torch-exact", "full", 1): {64: (3.0, 4.0, 4.0)},
        }
    )
    ours = Cell("linattn-favor", "full", 64, 1)
    assert record.ratio(ours._replace(peer="torch-exact"), ours) == 2.0
    assert record.ratio(ours, ours._replace(length=128)) is None


def test_gradients_are_tabulated_with_the_share_of_the_pullback():
    record = record_of(
        {
            ("linattn-favor", "causal gradient", 1): {64: (4.0, 5.0, 4.0)},
            ("linattn-pullback", "causal gradient", 1): {64: (3.0, 3.0, 3.0)},
            ("torch-chunks", "causal gradient", 1): {64: (8.0, 9.0, 8.0)},
        }
    )
    assert record.pullback_share("causal gradient", 64, 1) == 3.0
    assert record.pullback_share("full gradient", 64, 1) is None
    (table,) = (table for table in tables(record) if "gradients" in table.title)
    assert table.title == "Output and gradients, 64 tokens, 1 thread"
    assert ["torch autograd, chunk by chunk", "", "", "8.00 s", "2.00"] in table.rows
    assert table.notes[1] == "linattn's pullback takes 3.00 (causal) times the forward pass"


def test_crossover_and_growth_of_powers():
    lengths = (512, 1024, 4096, 65536)
    record = record_of(
        {
            ("linattn-favor", "full", 1): {n: (3000.0 * n,) for n in lengths},
            ("torch-exact", "full", 1): {n: (1.0 * n * n,) for n in lengths},
        }
    )
    found = record.crossover("linattn-favor", "torch-exact", "full", 1)
    assert found is not None
    assert found.length == pytest.approx(3000)
    growth = record.growth("torch-exact", "full", 1)
    assert growth is not None
    assert growth == (pytest.approx(2.0), 4096, 65536)
    assert record.growth("torch-exact", "causal", 1) is None


def test_limit_fraction_takes_the_fastest_product():
    seconds = {"project": 1.0, "sum": 0.1, "read": 1.0}
    rates = {("numpy-rates", kind, 1): {64: (s,)} for kind, s in seconds.items()}
    record = record_of(
        {
            **rates,
            ("numpy-rates", "exp", 1): {64: (0.5,)},
            ("linattn-favor", "full", 1): {64: (2.0,)},
        }
    )
    sgemm = 2 * 256 * 512 * 65 / 0.1
    wanted = limit_seconds("favor", Sizes(), 64, is_causal=False, sgemm=sgemm, exp=2000.0) / 2
    assert record.limit_fraction("linattn-favor", "full", 64) == pytest.approx(wanted)
    assert record.limit_fraction("torch-exact", "full", 64) is None


class FakeChild:
    """A child that answers from a script."""

    def __init__(self, name, threads, cores):
        self.name = name

    def ask(self, command, *arguments):
        if self.name == "linattn-elu" and command in ("check", "time"):
            if command == "check" and arguments == ("full",):
                return 0.5
            if command == "time":
                raise PeerError("it broke")
        if command == "time":
            return 20.0, 1.0
        return 1e-7

    def close(self):
        pass


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(rotation, "Child", FakeChild)
    budget = Budget(bytes=1e9, call_seconds=100.0, turn_seconds=0.1, rounds=2, length_seconds=60.0)
    names = ["linattn-favor", "linattn-elu", "torch-exact", "performer"]
    return Runner(record_of({}), names, [1], [0], budget, lambda text: None)


def test_what_is_wrong_or_breaks_is_left_out_and_the_rest_goes_on(runner):
    runner.check()
    runner.time(Sizes(), 512, ATTENTION)
    record = runner.record
    assert record.left_out == [
        LeftOut("linattn-elu", "full", None, 1, "error 5.0e-01 on the small input, wanted 1e-04"),
        LeftOut("linattn-elu", "causal", 512, 1, "it broke"),
    ]
    assert {timing.peer for timing in record.timings} == {
        "linattn-favor",
        "torch-exact",
        "performer",
    }
    assert all(timing.rounds == (20.0, 20.0) for timing in record.timings)


def test_what_would_take_too_long_or_too_much_is_left_out(runner):
    runner.check()
    runner.time(Sizes(), 512, ATTENTION)
    runner.time(Sizes(), 2048, ATTENTION)
    runner.time(Sizes(), 32768, ATTENTION)
    reasons = {(item.peer, item.length): item.reason for item in runner.record.left_out}
    assert reasons["torch-exact", 2048] == "a call would take about 320 of 100 s"
    assert ("linattn-favor", 2048) not in reasons
    assert reasons["performer", 32768] == "would need 3.5 of 0.9 GiB"


def test_a_peer_is_compared_with_turns_of_linattn_around_its_own(runner, monkeypatch):
    asked = []

    def ask(self, command, *arguments):
        if command != "time":
            return 1e-7
        # A machine that grows slower from turn to turn.
        asked.append(self.name)
        return (1 + 0.5 * len(asked)) * (30.0 if self.name == "torch-exact" else 20.0), 1.0

    monkeypatch.setattr(FakeChild, "ask", ask)
    runner.check()
    runner.time(Sizes(), 512, ["full"])
    first = ["linattn-favor", "torch-exact", "linattn-favor", "performer", "linattn-favor"]
    assert asked[:6] == [*first, "linattn-elu"]
    record = runner.record
    for name, wanted in (("torch-exact", 1.5), ("performer", 1.0), ("linattn-favor", 1.0)):
        cell, ours = (Cell(peer, "full", 512, 1) for peer in (name, "linattn-favor"))
        assert record.ratio(cell, ours) == pytest.approx(wanted)
        assert record.ratio(ours, cell) == pytest.approx(1 / wanted)
    assert record.timing("torch-exact", "full", 512, 1).beside[0] == 40.0


def run(out, *arguments, **environment):
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *SMALL, *arguments, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_command_runs_to_its_end(tmp_path):
    printed = run(
        tmp_path,
        *("--peers", "linattn-favor", "linattn-pullback"),
        *("linattn-decoder", "numpy-cache", "numpy-rates"),
        *("--lengths", "64", "96", "--gradients", "64", "--contexts", "64", "--memory", "64"),
        *("--texts", "--scales", "3", "0.5", "--scale-length", "70"),
    )
    assert max(map(len, printed.partition("\n\n")[2].split("\nwrote")[0].splitlines())) <= 80
    assert "64 tokens, 1 thread" in printed
    assert "left out" not in printed
    for case, (_, by, _) in numbers.CASES.items():
        assert printed.count(f"| {case} | ") == len(by)
    name = slug(describe([0])["cpu"])
    record = Record.read(tmp_path / f"{name}.json")
    assert record.lengths("causal") == [64, 96]
    assert {record.pullback_share(kind, 64, 1) is None for kind in GRADIENT} == {False}
    assert record.limit_fraction("linattn-favor", "causal", 96) is not None
    assert {item.kind for item in record.memory} == {"full", "causal"}
    kinds = [(item.case, item.dtype, item.path) for item in record.scaled]
    assert kinds == [(case, d, path) for d, path, case in product(DTYPES, PATHS, CASES)]
    assert {item.scales for item in record.scaled} == {(1, 0.5, 3)}
    assert {len(item.rounds) for item in record.scaled} == {2}
    for table in tables(record):
        assert as_text(table) in printed
        on_page = as_markdown(table, level=4) in page.render({name: record})
        assert on_page is not page._is_elsewhere(table)
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_cannot_start_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none here')", encoding="utf-8")
    (tmp_path / "jax.py").write_text("import os; os._exit(3)", encoding="utf-8")
    printed = run(
        tmp_path,
        *("--peers", "torch-exact", "jax-favor", "linattn-elu", "--lengths", "64", "--gradients"),
        *("--contexts", "--memory", "--texts", "--scales"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert "left out: torch SDPA, exact, full: ImportError: none here" in printed
    ended = "ended with exit code 3: it printed nothing"
    assert f"left out: Google's formula, JAX jit, full: {ended}" in printed
    assert "linattn elu+1" in printed


def test_the_page_shows_the_records_that_are_kept():
    shown = page.between_marks(page.PAGE.read_text(encoding="utf-8"))
    assert shown == page.render(page.records())
    for name in page.records():
        assert (page.PAGE.parent / "images" / f"peers-{name}.png").exists()


def test_the_page_of_dask_is_made_from_the_record(tmp_path):
    pytest.importorskip("dask.array", reason="dask is not installed")
    from benchmarks.distributed_page import replace_section, section

    record: dict[str, Any] = {"rounds": 2, "seconds to copy": 0.25}
    record |= json.loads((ROOT / "benchmarks/results/distributed.json").read_text())
    page = tmp_path / "dask.md"
    page.write_text("# Dask\n\n## What it costs\n\nold\n\n### More\n\nold\n\n## Errors\n")
    replace_section(page, record)
    assert page.read_text() == f"# Dask\n\n{section(record)}## Errors\n"
    before = page.read_text()
    replace_section(page, record)
    assert page.read_text() == before
    numpy = record["full"]["seconds"]["NumPy, 2 threads"]
    assert f"| NumPy in memory, two threads | {numpy:.2f} | 1.00 |" in before
    page.write_text("# Dask\n")
    with pytest.raises(ValueError, match="must have one section"):
        replace_section(page, record)


SMALL_RECURRENCES = recurrences.Sizes(length=64, heads=2, dim=8)


def test_recurrences_that_are_wrong_are_not_timed(monkeypatch):
    monkeypatch.setattr(recurrences, "installed", lambda peer: False)
    monkeypatch.setattr(recurrences, "ours", lambda case, given: lambda: 1.001 * given["value"])
    with pytest.raises(AssertionError, match=r"linattn, Case.*: off by"):
        recurrences.compare(recurrences.CASES["delta"], SMALL_RECURRENCES, 1)


def test_the_page_of_recurrences_is_made_from_the_record():
    out = ROOT / "benchmarks" / "results" / "recurrences.json"
    shown = (ROOT / "docs" / "recurrences.md").read_text(encoding="utf-8")
    record = json.loads(out.read_text(encoding="utf-8"))
    between = shown.split(recurrences.START)[1].split(recurrences.END)[0]
    assert between == recurrences.section(record)


def test_a_single_bit_is_a_difference():
    same: dict[str, Any] = {
        "full#0": np.zeros(3),
        "full#1": np.ones(3, np.float32),
        "window#0": np.array("TypeError"),
    }
    assert same_bits.compare(same, {name: array.copy() for name, array in same.items()}) == []
    for changed in (np.array([0.0, 0.0, -0.0]), np.zeros(3, np.float32), np.zeros((1, 3))):
        (line,) = same_bits.compare(same, {**same, "full#0": changed})
        assert line.startswith("full: ")
    after = np.nextafter(same["full#1"], np.float32(2))
    (line,) = same_bits.compare(same, {**same, "full#1": after})
    assert line == "full: largest relative difference 1.2e-07"
    (line,) = same_bits.compare(same, {**same, "window#0": np.array("ValueError")})
    assert line == "window: TypeError became ValueError"
    (line,) = same_bits.compare(same, {"full#0": np.zeros(3), "full#1": np.ones(3, np.float32)})
    assert line == "window: result 0 in one of them only"


def test_the_table_of_libraries_has_a_ratio_for_each_length():
    from benchmarks import libraries

    times = {"NumPy": 2.0, "torch": 3.0, "JAX, eager": 4.0, "torch's own": 1.5}
    rows = [{"call": "a", "tokens": n, "threads": 1, "milliseconds": times} for n in (512, 2048)]
    assert "| a; 2/2 | 1.50/1.50 | - | 2.00/2.00 | - | 0.50/0.50 | - |" in libraries.table(
        {"rows": rows}
    )
    page = libraries.PAGE.read_text()
    assert page.index(libraries.BEGIN) < page.index(libraries.END)
