"""`linattn attend`: from files to a file, and what goes wrong on the way."""

# Star arguments, and settings as words.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, func-returns-value, union-attr"

from __future__ import annotations

import errno
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

import linattn
from linattn import feature_maps as fm
from linattn.cli import attend as files_to_file
from linattn.cli import cluster, stores
from linattn.cli import exact as exact_blocks
from linattn.cli.errors import CommandError
from tests.command import assert_refused, call, passed

LENGTH, DIM, WIDTH = 300, 8, 4
FILES = ("q.npy", "k.npy", "v.npy")
NAMES = ("query", "key", "value")
PHI = fm.PositiveFeatures(DIM, num_features=16, rng=0)
OPTIONS = (
    "--map", "PositiveFeatures", "--num-features", "16", "--block-size", "70", "--tolerance", "inf"
)  # fmt: skip


def arrays(length=LENGTH):
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 2, length, DIM)).astype(np.float32) / 2
    return query, key, rng.standard_normal((2, length, WIDTH)).astype(np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, array in zip(FILES, arrays(), strict=True):
        np.save(name, array)
    return tmp_path


attend, attended = (partial(run, "attend") for run in (call, passed))


class TestResult:
    def test_causal_with_a_mask(self, folder):
        mask = np.random.default_rng(2).random(LENGTH) < 0.8
        np.save("m.npy", mask)
        result = attended(*FILES, "--out", "o.npy", *OPTIONS, "--causal", "--mask", "m.npy")
        assert result.stderr == ""
        line = (
            r"o.npy: 300 tokens by PositiveFeatures in [\d.]+ m?s \([\d,]+ a second\), peak memory "
            r"[\d.]+ [MG]iB; within the tolerance inf: error against exact attention on 64 rows: "
            r"([\d.]+), worst head [\d.]+\n"
        )
        assert re.fullmatch(line, result.stdout)
        wanted = linattn.linear_attention(*arrays(), PHI, is_causal=True, key_mask=mask)
        np.testing.assert_allclose(np.load("o.npy"), wanted, rtol=1e-4, atol=1e-5)
        assert sorted(p.name for p in folder.iterdir()) == sorted([*FILES, "m.npy", "o.npy"])

    def test_npz_is_mapped(self, folder):
        np.savez("data.npz", **dict(zip(NAMES, arrays(), strict=True)))
        attended("data.npz", "--out", "o.npy", *OPTIONS)
        wanted = linattn.linear_attention(*arrays(), PHI)
        np.testing.assert_allclose(np.load("o.npy"), wanted, rtol=1e-4, atol=1e-5)

    def test_zarr_landmarks_and_a_window(self, folder):
        zarr = pytest.importorskip("zarr", reason="zarr is not installed")
        group = zarr.open_group("data.zarr", mode="w")
        for name, array in zip(NAMES, arrays(), strict=True):
            group.create_array(name, data=array, chunks=(1, 64, array.shape[-1]))
        words = ("--map", "landmarks", "--num-features", "16", "--window", "8", "--check", "20")
        given = ("data.zarr", *words, "--tolerance", "0.9")
        result = attended(*given, "--out", "out.zarr")
        assert "error against exact attention on 20 rows: 0." in result.stdout
        q, k, v = arrays()
        # Fewer rows than a sample has: all are fitted to.
        phi = fm.LandmarkFeatures.fit(q, k, num_features=16, rng=0)
        wanted = linattn.linear_attention(q, k, v, phi, exact_window=8)
        found = zarr.open_group("out.zarr", mode="r")["output"]
        assert found.chunks == (1, 64, WIDTH)
        np.testing.assert_allclose(found[:], wanted, rtol=1e-4, atol=1e-5)
        again = attend(*given, "--out", "out.zarr")
        assert_refused(again, "--out out.zarr: is there already")

    def test_the_same_store_takes_the_output(self, folder):
        zarr = pytest.importorskip("zarr", reason="zarr is not installed")
        group = zarr.open_group("data.zarr", mode="w")
        for name, array in zip(NAMES, arrays(), strict=True):
            group.create_array(name, data=array, chunks=(1, 64, array.shape[-1]))
        attended("data.zarr", "--out", "data.zarr", *OPTIONS)
        wanted = linattn.linear_attention(*arrays(), PHI)
        np.testing.assert_allclose(group["output"][:], wanted, rtol=1e-4, atol=1e-5)

    def test_a_state_goes_on(self, folder):
        words = ("--causal", *OPTIONS)
        for number, rows in enumerate((slice(0, 200), slice(200, 300))):
            for name, array in zip(FILES, arrays(), strict=True):
                np.save(f"{number}{name}", array[:, rows])
        attended(*(f"0{n}" for n in FILES), "--out", "a.npy", "--save-state", "s.npz", *words)
        attended(*(f"1{n}" for n in FILES), "--out", "b.npy", "--start-state", "s.npz", *words)
        assert linattn.load_state("s.npz", PHI).length == 200
        wanted = linattn.linear_attention(*arrays(), PHI, is_causal=True)
        found = np.concatenate([np.load("a.npy"), np.load("b.npy")], axis=1)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("causal", [False, True])
    def test_check_is_the_error_on_exact_rows(self, folder, causal, monkeypatch):
        monkeypatch.setattr(files_to_file, "KEYS", 90)
        flag = ["--causal"] if causal else []
        np.save("m.npy", np.arange(LENGTH) % 5 > 0)
        words = (*OPTIONS, *flag, "--mask", "m.npy", "--check", "1000")
        result = attend(*FILES, "--out", "o.npy", *words)
        q, k, v = (array.astype(np.float64) for array in arrays())
        exact = linattn.softmax_attention(
            q, k, v, is_causal=causal, key_mask=np.arange(LENGTH) % 5 > 0
        )
        squares = (np.sum(x**2, axis=(1, 2)) for x in (np.load("o.npy") - exact, exact))
        errors = np.sqrt(np.divide(*squares))
        wanted = f"on 300 rows: {np.median(errors):.2g}, worst head {errors.max():.2g}\n"
        assert result.stdout.endswith(wanted)


LINE = re.compile(
    r"(?P<out>\S+): 300 tokens by (?P<map>\S+) in .*; (?P<judged>above|within) the tolerance "
    r"(?P<tolerance>\S+): error against exact attention on (?P<rows>\d+) rows: (?P<error>\S+), "
    r"worst head (?P<worst>\S+)\n"
)


def dense(query, key, value, *, causal, seen=None):
    """Softmax attention, written down in float64."""
    q, k, v = (array.astype(np.float64) for array in (query, key, value))
    logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    hidden = np.zeros(logits.shape[-2:], bool)
    if causal:
        hidden |= np.arange(hidden.shape[1]) > np.arange(hidden.shape[0])[:, None]
    if seen is not None:
        hidden |= ~seen
    logits = np.where(hidden, -np.inf, logits)
    most = np.max(logits, axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(most), most, 0))
    return weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def judged(result, exact, found):
    """Check the last line, the exit code and stderr against the errors of all rows."""
    line = LINE.fullmatch(result.stdout)
    assert line, result.output
    errors = np.linalg.norm(found - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
    worst = float(errors.max())
    if line["rows"] == "300":
        assert float(line["error"]) == pytest.approx(np.median(errors), rel=0.06, abs=1e-6)
        assert float(line["worst"]) == pytest.approx(worst, rel=0.06, abs=1e-6)
    is_above = worst > float(line["tolerance"])
    assert line["judged"] == ("above" if is_above else "within")
    assert result.exit_code == (3 if is_above else 0)
    assert len(result.stderr.splitlines()) == is_above
    if is_above:
        said = f"linattn: error: {line['out']}: the error of {line['map']}, {line['worst']}, is"
        assert result.stderr.startswith(f"{said} above the tolerance {line['tolerance']}; the file")
    return line


class TestJudged:
    """No output without its error on rows of exact attention, held against a tolerance."""

    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["--causal"],
            ["--map", "exact"],
            ["--map", "EXACT", "--causal", "--block-size", "70"],
            ["--map", "ReluFeatures", "--mask", "m.npy"],
            ["--map", "landmarks", "--num-features", "290", "--window", "8"],
            ["--map", "favor+", "--tolerance", "0.9"],
            ["--map", "maps_to_judge:make", "--causal", "--tolerance", "1e-3"],
        ],
        ids=" ".join,
    )
    def test_the_last_line(self, folder, words):
        (folder / "maps_to_judge.py").write_text(
            "from linattn.feature_maps import PositiveFeatures\n"
            f"def make(rng): return PositiveFeatures({DIM}, num_features=16, rng=rng)\n"
        )
        seen = np.arange(LENGTH) % 5 > 0
        np.save("m.npy", seen)
        is_causal = "--causal" in words
        exact = dense(*arrays(), causal=is_causal, seen=seen if "--mask" in words else None)
        for check in ([], ["--check", "1000"]):
            result = attend(*FILES, "--out", f"o{len(check)}.npy", *words, *check)
            line = judged(result, exact, np.load(f"o{len(check)}.npy"))
            name = words[words.index("--map") + 1] if "--map" in words else None
            assert line["map"] == (name or ("favor+" if is_causal else "landmarks"))
            assert (line["out"], line["rows"]) == (
                f"o{len(check)}.npy", "300" if check else "64"
            )  # fmt: skip

    def test_keys_of_a_state_are_not_checked(self, folder):
        attended(*FILES, "--out", "a.npy", *OPTIONS, "--save-state", "s.npz")
        words = (*FILES, *OPTIONS[:6], "--start-state", "s.npz")
        result = attend(*words, "--out", "o.npy")
        assert result.stdout.endswith("; not checked: the keys of s.npz are in no file\n")
        assert result.exit_code == 3
        assert result.stderr.startswith("linattn: error: o.npy: its error is not known; ")
        result = attend(*words, "--out", "p.npy", "--tolerance", "inf")
        assert (result.exit_code, result.stderr) == (0, "")
        assert np.load("o.npy").tobytes() == np.load("p.npy").tobytes()


class TestExact:
    """``--map exact``, against a formula that shares no code."""

    @pytest.mark.parametrize("flag", [[], ["--causal"]], ids=["full", "causal"])
    @pytest.mark.parametrize(
        ("dtype", "bound"), [("f2", 2e-3), ("f4", 2e-6), ("f8", 1e-13), (">f4", 2e-6)]
    )
    def test_blocks_of_queries_and_keys(self, folder, monkeypatch, flag, dtype, bound):
        monkeypatch.setattr(exact_blocks.attend_exactly, "__defaults__", (90,))
        given = [array.astype(dtype) for array in arrays()]
        for name, array in zip(FILES, given, strict=True):
            np.save(name, array)
        seen = np.arange(LENGTH) % 7 > 1
        np.save("m.npy", seen)
        words = (*FILES, "--map", "exact", "--block-size", "80", *flag)
        for mask in ([], ["--mask", "m.npy"]):
            attended(*words, "--out", f"o{len(mask)}.npy", *mask)
            found = np.load(f"o{len(mask)}.npy")
            assert found.dtype == np.dtype(dtype).newbyteorder("=")
            wanted = dense(*given, causal=bool(flag), seen=seen if mask else None)
            np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound)

    @pytest.mark.parametrize(
        "words",
        [["--num-features", "8"], ["--window", "4"], ["--save-state", "s.npz"], ["--workers", "1"]],
    )
    def test_what_it_has_no_use_for(self, folder, words):
        result = attend(*FILES, "--out", "o.npy", "--map", "exact", *words)
        assert_refused(result, f"{words[0]}: not with --map exact")
        assert not (folder / "o.npy").exists()


class TestNotFinite:
    @pytest.mark.parametrize(
        ("file", "number", "where"),
        [
            ("q.npy", np.nan, (1, 299, 7)),
            ("k.npy", np.nan, (0, 0, 0)),
            ("k.npy", -np.inf, (1, 150, 3)),
            ("v.npy", np.inf, (0, 71, 2)),
        ],
    )
    @pytest.mark.parametrize("name", ["landmarks", "PositiveFeatures", "exact"])
    def test_the_first_one_is_named(self, folder, monkeypatch, name, file, number, where):
        monkeypatch.setattr(files_to_file, "MAX_BLOCK_ROWS", 64)
        array = np.load(file)
        array[where] = number
        np.save(file, array)
        result = attend(*FILES, "--out", "o.npy", "--map", name)
        which = dict(zip(FILES, NAMES, strict=True))[file]
        assert_refused(result, f"error: {file}: {which} must be finite, got {number} at")
        assert f"{list(where)}; mend it" in result.stderr
        assert not (folder / "o.npy").exists()
        if file == "q.npy":
            return
        np.save("m.npy", np.arange(LENGTH) != where[1])
        result = attend(*FILES, "--out", "o.npy", *OPTIONS[2:], "--map", name, "--mask", "m.npy")
        if name == "exact":
            assert_refused(result, "--num-features: not with --map exact")
        else:
            assert result.exit_code == 0, result.output
            np.testing.assert_array_less(np.abs(np.load("o.npy")), 10)

    def test_a_mask_of_each_head(self, folder):
        key = np.load("k.npy")
        key[1, 150] = np.nan
        np.save("k.npy", key)
        seen = np.ones((2, LENGTH), bool)
        seen[0, 150] = False
        np.save("m.npy", seen)
        words = (*FILES, "--out", "o.npy", *OPTIONS, "--mask", "m.npy")
        assert_refused(attend(*words), "k.npy: key must be finite, got nan at [1, 150, 0]")
        np.save("m.npy", seen[::-1])
        attended(*words)


BAD = {
    "columns": (lambda: None, ["--num-features", "0"], "--num-features: want a whole number >= 1"),
    "causal landmarks": (lambda: None, ["--map", "landmarks", "--causal"], "is_causal needs a"),
    "window": (lambda: None, ["--map", "relu", "--window", "4"], "exact_window needs a"),
    "no state": (lambda: None, ["--start-state", "s.npz"], "s.npz: No such file"),
    "bad state": (
        lambda: Path("s.npz").write_text("no"), ["--start-state", "s.npz"], "not a linattn state"
    ),
    "check": (
        lambda: None, ["--start-state", "s.npz", "--check", "3"], "--check: not with --start-state"
    ),
    "save": (
        lambda: None, ["--save-state", "/dev/full"], "--save-state /dev/full: cannot be written"
    ),
    "seed": (lambda: None, ["--seed", "-1"], "--seed: want a whole number >= 0"),
    "two dtypes": (
        lambda: np.save("v.npy", np.ones((2, LENGTH, 4))), [], "q.npy, v.npy: query and value must"
    ),
    "no tokens": (
        lambda: [np.save(n, np.load(n)[:, :0]) for n in FILES], ["--map", "landmarks"],
        "q.npy, k.npy: LandmarkFeatures cannot be made",
    ),
    "mask of heads": (
        lambda: np.save("m.npy", np.ones((3, LENGTH), bool)), ["--mask", "m.npy"],
        "error: m.npy: key_mask must have shape (300,), or (2, 300) with axes of 1, got (3, 300)",
    ),
    "tolerance": (lambda: None, ["--tolerance", "nan"], "--tolerance: want a number > 0, got nan"),
    "factory": (lambda: None, ["--map", "math:sqrt"], "--map math:sqrt: it raised TypeError"),
    "columns that do not fit": (
        lambda: None, ["--num-features", "99999999999"], "or fewer --num-features"
    ),
}  # fmt: skip


class TestErrors:
    """One line on stderr, exit code 2, nothing written."""

    @pytest.mark.parametrize("name", BAD)
    def test_bad_input(self, folder, name):
        prepare, words, text = BAD[name]
        prepare()
        before = sorted(folder.iterdir())
        defaults = dict(zip(OPTIONS[:4:2], OPTIONS[1:4:2], strict=True)) | {"--out": "o.npy"}
        given = [word for pair in defaults.items() if pair[0] not in words for word in pair]
        if name in ("causal landmarks", "window"):
            given = ["--out", "o.npy"]
        assert_refused(attend(*FILES, *given, *words), text)
        assert sorted(folder.iterdir()) == before

    def test_a_compressed_file(self, folder):
        np.savez_compressed("data.npz", **dict(zip(NAMES, arrays(), strict=True)))
        result = attend("data.npz", "--out", "o.npy", *OPTIONS)
        assert_refused(result, "data.npz: query is compressed, and cannot be read in parts")
        assert not (folder / "o.npy").exists()

    def test_what_is_there_is_not_replaced(self, folder):
        (folder / "o.npy").write_text("mine")
        for words in ([], ["--resume"]):
            result = attend(*FILES, "--out", "o.npy", *OPTIONS, *words)
            assert_refused(result, "--out o.npy: is there already")
        assert (folder / "o.npy").read_text() == "mine"

    def test_a_file_larger_than_allowed(self, folder):
        """RLIMIT_FSIZE is as a full disk is."""
        resource = pytest.importorskip("resource", reason="resource: not on this system")
        words = [sys.executable, "-m", "linattn", "attend", *FILES, "--out", "o.npy", *OPTIONS]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr == "linattn: error: o.npy: cannot be opened: File too large\n"
        assert done.stdout == ""


class TestGoingOn:
    def _break_off(self, monkeypatch, error, blocks=3):
        """Let the run raise after some blocks."""
        real, seen = files_to_file.run_blocks, []

        def run_some_blocks(inputs, out, state, how):
            def count(done, total):
                seen.append(done)
                if len(seen) == blocks:
                    raise error
                how.progress(done, total)

            return real(inputs, out, state, how._replace(progress=count))

        monkeypatch.setattr(files_to_file, "run_blocks", run_some_blocks)

    def _undisturbed(self, *words):
        attended(*FILES, "--out", "whole.npy", *words)
        return np.load("whole.npy").tobytes()

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (KeyboardInterrupt(), 130, "interrupted"),
            (OSError(errno.ENOSPC, "No space left on device", "o.npy"), 1, "o.npy: No space left"),
            (MemoryError(), 1, "not enough memory: try a smaller --block-size"),
        ],
    )
    def test_what_broke_off_goes_on(self, folder, monkeypatch, error, code, said):
        words = ("--causal", *OPTIONS, "--seed", "3")
        wanted = self._undisturbed(*words)
        with monkeypatch.context() as patch:
            self._break_off(patch, error)
            result = attend(*FILES, "--out", "o.npy", *words)
        assert result.exit_code == code
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"linattn: error: {said}")
        assert result.stdout == ""
        assert (folder / "o.npy.checkpoint").exists()
        # Not without being asked: the work would be lost.
        again = attend(*FILES, "--out", "o.npy", *words)
        assert_refused(again, "o.npy.checkpoint is there, of a run that broke off: --resume")
        command = shlex.split(line.partition("go on with: ")[2])
        assert command[:2] == ["linattn", "attend"]
        seen: list[int] = []
        monkeypatch.setattr("linattn.cli.app._rows_progress", lambda: Recorded(seen))
        result = passed(*command[1:])
        assert seen == [280, 300]
        assert np.load("o.npy").tobytes() == wanted
        assert not (folder / "o.npy.checkpoint").exists()

    def test_resume_begins_where_nothing_is(self, folder):
        wanted = self._undisturbed(*OPTIONS)
        attended(*FILES, "--out", "o.npy", *OPTIONS, "--resume")
        assert np.load("o.npy").tobytes() == wanted

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (["--seed", "1"], "is the checkpoint of another call, which differs in feature_map"),
            (["--causal"], "is the checkpoint of another call"),
            (["--block-size", "50"], "differs in block_size"),
        ],
    )
    def test_another_call_does_not_go_on(self, folder, monkeypatch, change, text):
        with monkeypatch.context() as patch:
            self._break_off(patch, KeyboardInterrupt())
            attend(*FILES, "--out", "o.npy", *OPTIONS)
        before = (folder / "o.npy.checkpoint").read_bytes()
        assert_refused(attend(*FILES, "--out", "o.npy", *OPTIONS, *change, "--resume"), text)
        assert (folder / "o.npy.checkpoint").read_bytes() == before

    @pytest.mark.skipif(os.name == "nt", reason="SIGINT: not as a terminal sends it")
    def test_ctrl_c(self, folder):
        for name, array in zip(FILES, arrays(40_000), strict=True):
            np.save(name, array)
        words = ["attend", *FILES, "--out", "o.npy", *OPTIONS[:4], "--block-size", "10"]
        with subprocess.Popen(
            [sys.executable, "-m", "linattn", *words],
            stderr=subprocess.PIPE,
            text=True,
            # Whoever ran these tests in the background of a shell has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            while not (folder / "o.npy.checkpoint").exists():
                assert process.poll() is None
            # The first block still imports: Python may lose an interrupt in the locks of modules.
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        (line,) = said.splitlines()
        assert line.startswith("linattn: error: interrupted; go on with: linattn attend q.npy")
        assert (folder / "o.npy.checkpoint").exists()


class TestCluster:
    def test_workers_share_a_run_that_goes_on(self, folder, monkeypatch):
        pytest.importorskip("distributed", reason="distributed is not installed")
        for module in (cluster, files_to_file):
            monkeypatch.setattr(module, "BLOCKS_AT_ONCE", 2)
        np.save("m.npy", np.arange(LENGTH) % 5 > 0)
        options = ("--causal", *OPTIONS[:4], *OPTIONS[6:], "--mask", "m.npy")
        words = (*FILES, "--out", "o.npy", *options, "--block-size", "60", "--workers", "1")
        with monkeypatch.context() as patch:
            TestGoingOn._break_off(None, patch, KeyboardInterrupt(), blocks=1)
            result = attend(*words)
        assert result.exit_code == 130
        (line,) = result.stderr.splitlines()
        assert line.endswith("--workers 1 --resume")
        result = attend(*words, "--resume")
        assert (result.exit_code, result.stderr) == (0, "")
        attended(*FILES, "--out", "here.npy", *options)
        np.testing.assert_allclose(np.load("o.npy"), np.load("here.npy"), rtol=1e-4, atol=2e-6)

    def test_a_state_keeps_all_that_it_carries(self, folder):
        pytest.importorskip("distributed", reason="distributed is not installed")
        _, before = linattn.linear_attention(
            *arrays(20), PHI, is_causal=True, log_decay=-0.1, return_state=True
        )
        linattn.save_state("before.npz", before, PHI)
        words = (*FILES, *OPTIONS, "--causal", "--start-state", "before.npz")
        attended(*words, "--out", "a.npy", "--save-state", "a.npz")
        attended(*words, "--workers", "1", "--out", "b.npy", "--save-state", "b.npz")
        here, there = (linattn.load_state(name, PHI) for name in ("a.npz", "b.npz"))
        np.testing.assert_allclose(np.load("b.npy"), np.load("a.npy"), rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(there.log_decay, before.log_decay, rtol=1e-6)
        np.testing.assert_allclose(here.log_decay, before.log_decay, rtol=1e-6)
        assert there[2:4] + there[5:] == here[2:4] + here[5:]

    def test_stores_are_those_of_this_folder(self, folder, monkeypatch):
        """A worker in another folder, which may have a store of the same name."""
        zarr = pytest.importorskip("zarr", reason="zarr is not installed")
        host = dict(zip(NAMES, arrays(), strict=True))
        for place, factor in ((folder, 1), (folder / "other", 2)):
            group = zarr.open_group(store=place / "a.zarr", mode="w")
            for name, array in host.items():
                group.create_array(name, data=factor * array)
        output = stores.Output(Path("a.zarr"))
        output.check(resume=False)
        given = stores.open_inputs([Path("a.zarr")])
        given["output"] = output.open(host["value"].shape, given["query"])
        sent = pickle.dumps(given)
        monkeypatch.chdir(folder / "other")
        there = pickle.loads(sent)
        there["output"][...] = 3.0
        for name, array in host.items():
            np.testing.assert_array_equal(there[name][...], array)
        np.testing.assert_array_equal(given["output"][...], 3.0)

    def test_errors(self, folder, monkeypatch):
        pytest.importorskip("distributed", reason="distributed is not installed")
        monkeypatch.setattr(cluster, "PATIENCE", "0.2s")
        words = (*FILES, "--out", "o.npy", *OPTIONS)
        for address, text in {
            "tcp://127.0.0.1:1": "--scheduler tcp://127.0.0.1:1: no scheduler answers there",
            "nobody": "--scheduler nobody: no scheduler answers there",
        }.items():
            assert_refused(attend(*words, "--scheduler", address), text)
        assert_refused(attend(*words, "--workers", "0"), "--workers: want a whole number >= 1")
        both = attend(*words, "--workers", "1", "--scheduler", "tcp://127.0.0.1:1")
        assert_refused(both, "--workers: not with --scheduler")
        window = attend(*words, "--workers", "1", "--window", "4")
        assert_refused(window, "--window: not on a cluster")
        assert not (folder / "o.npy").exists()

    def test_without_distributed(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "distributed", None)
        result = attend(*FILES, "--out", "o.npy", *OPTIONS, "--workers", "1")
        assert_refused(result, "--workers and --scheduler need dask.distributed: pip install")


class Recorded:
    """In the place of the progress bar."""

    def __init__(self, seen):
        self.seen = seen

    def __enter__(self):
        return lambda done, total: self.seen.append(done)

    def __exit__(self, *error: Any) -> None:
        pass


def test_the_command_that_goes_on_has_every_option():
    settings = files_to_file.Settings(
        files=("a b.npy", "k", "v"), out="o.npy", map="favor+", num_features=8, causal=True,
        window=4, check=3, block_size=9, seed=5,
    )  # fmt: skip
    assert settings.command() == (
        "linattn attend 'a b.npy' k v --out o.npy --map favor+ --num-features 8 --causal "
        "--window 4 --check 3 --block-size 9 --seed 5 --resume"
    )
    with pytest.raises(CommandError, match="--window: want a whole number >= 1, got 0"):
        files_to_file.Settings(files=(), out="o.npy", map="favor+", window=0)


@pytest.mark.parametrize("name", [*FILES, "m.npy", "o.npy", "o.npy.checkpoint", "link.npy"])
def test_a_state_replaces_no_other_file(folder, name):
    np.save("m.npy", np.ones(LENGTH, bool))
    os.link("q.npy", "link.npy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ("--out", "o.npy", *OPTIONS, "--mask", "m.npy", "--save-state", folder / name)
    assert_refused(attend(*FILES, *words), "is the file of")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
