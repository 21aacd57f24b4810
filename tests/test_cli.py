"""The `linattn` command: its files, its errors, `info` and the help."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

import linattn
from linattn.cli import (
    compare,
    info,
    inputs,
    report,
    run,
)
from linattn_cupy import hardware
from tests.command import SMALL, assert_refused, call, passed, python, save


@pytest.fixture
def file(tmp_path):
    return save(tmp_path / "mine.npz")


@pytest.fixture
def small(file):
    return inputs.load(file)


def _corrupt(path):
    content = bytearray(save(path).read_bytes())
    content[400:600] = bytes(200)
    path.write_bytes(content)


BAD_FILES = {
    "empty": (lambda path: path.write_bytes(b""), "want an .npz file"),
    "corrupt": (_corrupt, "query cannot be read"),
    "no heads": (lambda path: save(path, query=np.ones((0, 20, 8))), "at least one head"),
    "no tokens": (lambda path: save(path, value=np.ones((0, 8))), "at least one head, one token"),
    "inf": (lambda path: save(path, query=np.full((20, 8), np.inf)), "query: want finite numbers"),
    "overflow": (
        lambda path: save(path, query=np.full((20, 8), 1e200), key=np.full((20, 8), 1e200)),
        "exact softmax attention overflows",
    ),
}


class TestErrors:
    """One line on stderr, exit code 2, no traceback."""

    @pytest.mark.parametrize("name", BAD_FILES)
    def test_bad_file(self, tmp_path, name):
        path = tmp_path / "bad.npz"
        make, text = BAD_FILES[name]
        make(path)
        out = tmp_path / "out"
        result = call("compare", "--input", path, *SMALL, "--out", out)
        assert_refused(result, text)
        assert "bad.npz" in result.stderr
        assert not (out / "compare.json").exists()

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (["--lengths", "0"], "--lengths: want whole numbers from 1 to 4194304, got '0'"),
            (["--lengths", "64,many"], "got 'many'"),
            (["--lengths", "1e3"], "got '1e3'"),
            (["--lengths", "-5"], "got '-5'"),
            (["--lengths", "99999999"], "got '99999999'"),
            (["--lengths", ","], "--lengths: want at least one whole number, got none"),
            (
                ["--lengths", "64,,128"],
                "--lengths: want a whole number between any two commas, got '64,,128'",
            ),
            (["--num-features", "64,"], "want a whole number between any two commas, got '64,'"),
            (["--maps="], "--maps: want at least one name, got none"),
            (["--maps", "relu,,elu+1"], "want a name between any two commas, got 'relu,,elu+1'"),
            (
                ["--maps", "landmarks", "--num-features", "64"],
                "--num-features: want at most 19 for landmarks on 20 keys, got 64 or more",
            ),
            (["--num-features", "0"], "--num-features: want whole numbers from 1 to 65536"),
            (["--num-features", "65"], "hyperbolic with 65 columns: num_features"),
            (["--maps", "favour"], "--maps: want names out of favor+, hyperbolic"),
            (["--seed", "-1"], "--seed: want a whole number >= 0, got -1"),
            (["--time-budget", "-1"], "--time-budget: want seconds >= 0, got -1"),
            (["--time-budget", "nan"], "--time-budget: want seconds >= 0, got nan"),
            (["--draws", "0"], "--draws: want a whole number >= 1, got 0"),
            (["--max-heads", "0"], "--max-heads: want a whole number >= 1, got 0"),
            (["--max-tokens", "0"], "--max-tokens: want a whole number >= 1, got 0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_bad_option(self, file, tmp_path, options, text):
        result = call("compare", "--input", file, *options, "--out", tmp_path)
        assert_refused(result, text)

    def test_causal_needs_equal_lengths(self, tmp_path):
        path = save(tmp_path / "cross.npz", query=np.ones((7, 8)))
        result = call("compare", "--input", path, "--causal", *SMALL, "--out", tmp_path)
        assert_refused(result, "--causal: want query and key of one length, got 7 and 20")

    @pytest.mark.parametrize("below", ["", "folder"])
    def test_unwritable_out(self, file, tmp_path, below):
        (tmp_path / "out").write_text("a file")
        out = tmp_path / "out" / below
        result = call("compare", "--input", file, *SMALL, "--out", out)
        assert_refused(result, "cannot be written to")

    def test_out_is_tried_before_anything_is_measured(self, file, tmp_path, monkeypatch):
        def fail(*arguments):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", fail)
        monkeypatch.setattr(run, "exact_output", None)
        result = call("compare", "--input", file, *SMALL, "--out", tmp_path)
        assert_refused(result, "cannot be written to: Permission denied")

    def test_not_enough_memory(self, file, tmp_path, monkeypatch):
        def fail(*arguments, **options):
            raise MemoryError

        monkeypatch.setattr(compare, "linattn", types.SimpleNamespace(softmax_attention=fail))
        result = call("compare", "--input", file, *SMALL, "--out", tmp_path)
        assert_refused(result, "not enough memory")

    @pytest.mark.parametrize("words", [["--nonsense"], ["--time-budget", "soon"]])
    def test_usage(self, words):
        result = call("compare", *words)
        assert result.exit_code == 2
        assert "Traceback" not in result.output
        assert_refused(result, "; see linattn compare --help")

    def test_a_pickle_is_never_loaded(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return Path.touch, (tmp_path / "sprung",)

        path = save(tmp_path / "bad.npz", query=np.array([Trap()], dtype=object))
        assert_refused(call("compare", "--input", path, "--out", tmp_path / "o"), "query cannot be")
        assert not (tmp_path / "sprung").exists()


class TestInputs:
    def test_leading_axes_broadcast_to_heads(self, tmp_path):
        shared = np.arange(2 * 20 * 8, dtype=np.float64).reshape(2, 1, 20, 8) / 100
        loaded = inputs.load(save(tmp_path / "grouped.npz", key=shared))
        assert loaded.query.shape == loaded.key.shape == (6, 20, 8)
        assert loaded.query.dtype == loaded.key.dtype == loaded.value.dtype == np.float64
        np.testing.assert_array_equal(loaded.key[4], shared[1, 0])

    def test_heads_kept_are_spread_evenly(self, small):
        kept = inputs.limited(small, max_heads=3, max_tokens=5, is_causal=False)
        np.testing.assert_array_equal(kept.query, small.query[[0, 2, 5], :5])
        np.testing.assert_array_equal(kept.value, small.value[[0, 2, 5], :5])

    def test_continued_repeats_the_head_with_noise(self):
        sample = inputs.sample()
        *arrays, bias = inputs.continued(sample, 4000, np.random.default_rng(0))
        *again, _ = inputs.continued(sample, 4000, np.random.default_rng(0))
        assert bias is None
        source = []
        for ours, theirs, same in zip(
            arrays, (sample.query[0], sample.key[0], sample.value[0]), again, strict=True
        ):
            assert ours.shape == (4000, 32)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, same)
            np.testing.assert_array_equal(ours[:256], theirs)
            distance = np.linalg.norm(ours[256:, None] - theirs, axis=-1)
            nearest = distance.argmin(axis=1)
            source.append(nearest)
            noise = (ours[256:] - theirs[nearest]) / theirs.std(axis=0)
            assert noise.std() == pytest.approx(0.1, rel=0.02)
        np.testing.assert_array_equal(source[1], source[2])
        np.testing.assert_array_equal(source[0], source[1])

    def test_continued_cross_attention(self, tmp_path):
        loaded = inputs.load(save(tmp_path / "cross.npz", query=np.ones((3, 8))))
        *arrays, _ = inputs.continued(loaded, 50, np.random.default_rng(0))
        assert [array.shape for array in arrays] == [(50, 8), (50, 8), (50, 4)]


class TestReport:
    def test_json_has_null_for_what_json_cannot_say(self):
        record = {"a": (1.5, math.inf), "b": {"c": [math.nan, True, None, "x"]}}
        assert json.loads(report.as_json(record)) == {
            "a": [1.5, None],
            "b": {"c": [None, True, None, "x"]},
        }

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "compare.json"
        report.write(path, b"old")

        def fail(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(Exception, match=r"compare\.json: cannot be written: No space left"):
            report.write(path, b"new")
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_what_is_planted_beside_a_file_is_not_followed(self, file, tmp_path):
        """A link under a name that could be guessed: the file's own, and the process id."""
        out, victim = tmp_path / "out", tmp_path / "victim"
        out.mkdir()
        victim.write_text("mine")
        for name in report.FILES:
            (out / f".{name}.{os.getpid()}").symlink_to(victim)
        passed("compare", "--input", file, "--maps", "relu", *SMALL, "--out", out)
        assert victim.read_text() == "mine"

    @pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
    def test_only_regular_files_are_replaced(self, file, tmp_path, monkeypatch, kind):
        out, victim = tmp_path / "out", tmp_path / "victim"
        out.mkdir()
        target = out / "time.png"
        if kind == "link":
            target.symlink_to(victim)
        else:
            (Path.mkdir if kind == "folder" else os.mkfifo)(target)
        monkeypatch.setattr(run, "exact_output", None)  # known before anything is measured
        result = call("compare", "--input", file, *SMALL, "--out", out)
        wanted = "it is a symbolic link" if kind == "link" else "it is not a regular file"
        assert_refused(result, f"time.png: cannot be written: {wanted}; name a regular file")
        assert not victim.exists()
        assert list(out.iterdir()) == [target]


TILE = "cuTile kernels never run on hardware, not used"


class TestInfo:
    def fake(self, monkeypatch, *, count):
        cupy: Any = types.ModuleType("cupy")
        cupy.__spec__ = types.SimpleNamespace()
        cupy.__version__ = "14"

        class Error(Exception):
            pass

        def device_count():
            if count is None:
                raise Error("cudaErrorInsufficientDriver:\nsecond line")
            return count

        cupy.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(
                getDeviceCount=device_count,
                getDeviceProperties=lambda index: {"name": f"Device {index}".encode()},
            )
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(linattn, "registered_backends", lambda: {"cupy": "json"})
        return info.backends()[0]

    def test_command(self):
        result = python("-m", "linattn", "info")
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert max(map(len, result.stdout.splitlines())) <= 80
        for text in (linattn.__version__, np.__version__, "linattn_numpy", "BLAS", "GPU"):
            assert text in result.stdout
        assert f"kernels: {hardware.kernel_status()}" in " ".join(
            result.stdout.replace("│", " ").split()
        )

    @pytest.fixture
    def measured(self, monkeypatch, tmp_path):
        """Write what a benchmark leaves in the CuPy backend; return what info says of it."""
        path = tmp_path / "measured.json"
        monkeypatch.setattr(hardware, "MEASURED", path)
        monkeypatch.setattr(linattn, "registered_backends", lambda: {"cupy": "linattn_cupy"})

        def status(run):
            if run is not None:
                path.write_text(run if isinstance(run, str) else json.dumps(run))
            return info.backends()[0].kernels

        return status

    def test_kernels_that_never_ran(self, measured):
        assert measured(None) == f"never run on hardware; {TILE}"

    @pytest.mark.parametrize("failures", [[], ["parity: one"]])
    def test_kernels_that_ran(self, measured, failures):
        run = {"device": "NVIDIA X", "date": "2026-01-02", "checks": 9, "failures": failures}
        assert measured(run | {"kernels": hardware.kernel_hashes()}) == (
            f"run on NVIDIA X on 2026-01-02, {len(failures)} of 9 checks failed; {TILE}"
        )

    @pytest.mark.parametrize("how", ["changed", "added"])
    def test_kernels_that_changed_since(self, measured, how):
        kernels = hardware.kernel_hashes()
        if how == "changed":
            kernels["fused.cu"] = "0" * 64
        else:
            del kernels["device.cuh"]
        run = {"device": "NVIDIA X", "date": "2026-01-02", "checks": 9, "failures": []}
        said = "run on NVIDIA X on 2026-01-02, 0 of 9 checks failed, kernels changed since"
        said = f"{said}; {TILE}"
        assert measured(run | {"kernels": kernels}) == said

    @pytest.mark.parametrize("text", ["{", "{}", "[]"])
    def test_a_file_that_says_nothing(self, measured, text):
        assert measured(text).startswith("unknown: ")

    def test_devices(self, monkeypatch):
        status = self.fake(monkeypatch, count=2)
        assert status.runs
        assert status.detail == "2 devices: Device 0, Device 1"
        assert status.kernels == ""  # of a backend that does not say

    def test_no_driver(self, monkeypatch):
        status = self.fake(monkeypatch, count=None)
        assert not status.runs
        assert status.detail == (
            "cupy 14 is installed, but no usable NVIDIA driver: Error: cudaErrorInsufficientDriver:"
        )

    def test_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        monkeypatch.setattr(linattn, "registered_backends", lambda: {"cupy": "json"})
        status = info.backends()[0]
        assert not status.runs
        assert "cupy is not installed (pip install '.[cuda13]' or" in status.detail

    def test_broken_backend(self, monkeypatch):
        backends = {"numpy": "no_such_backend", "json": "json"}
        monkeypatch.setattr(linattn, "registered_backends", lambda: backends)
        found = {entry.library: entry for entry in info.backends()}
        assert not found["numpy"].runs
        assert "No module named 'no_such_backend'" in found["numpy"].detail
        assert found["numpy"].kernels == ""
        assert found["json"].runs

    def test_threads_without_threadpoolctl(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "threadpoolctl", None)
        assert "pip install '.[threads]'" in info.threads()[-1]


class TestEntry:
    BARE = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from linattn.cli import main; main()"
    )

    def test_missing_extra(self):
        code = "import sys; sys.modules['rich'] = None; from linattn.cli import main; main()"
        result = python("-c", code)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.splitlines() == [
            "linattn: error: the command needs rich: pip install '.[cli]' in a clone of linattn; "
            "without, there are --version and info"
        ]

    def test_version_and_info_need_no_extra(self):
        result = python("-c", self.BARE, "--version")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == f"linattn {linattn.__version__}\n"
        result = python("-c", self.BARE, "info")
        assert (result.returncode, result.stderr) == (0, "")
        assert f"numpy (linattn_numpy)  yes: numpy {np.__version__}" in result.stdout
        assert python("-c", self.BARE, "compare").returncode == 2

    @pytest.mark.parametrize("columns", [60, 80])
    def test_summaries_are_not_cut(self, columns):
        text = call("--help", COLUMNS=str(columns)).stdout
        assert text.count("\n  compare  ") == 1
        assert "..." not in text[text.index("Commands:") :]

    @pytest.mark.parametrize(
        "words", [["compare", "--maps", "nonsense"], ["compare", "--nonsense"]]
    )
    def test_errors_on_a_terminal_break_between_words(self, words):
        ours, theirs = pty.openpty()
        subprocess.run(
            [sys.executable, "-m", "linattn", *words],
            stderr=theirs,
            env=os.environ | {"COLUMNS": "60"},
            timeout=60,
        )
        os.close(theirs)
        text = os.read(ours, 10**5).decode()
        os.close(ours)
        lines = text.splitlines()
        assert len(lines) > 1
        assert max(map(len, lines)) <= 60
        assert " ".join(lines) + "\n" == call(*words).stderr

    def test_help_is_light(self):
        code = (
            "import sys; sys.argv = ['linattn', 'compare', '--help']\n"
            "from linattn.cli import main\n"
            "try: main()\n"
            "finally: print({'matplotlib', 'rich', 'linattn_numpy'} & set(sys.modules))"
        )
        result = python("-c", code)
        assert result.returncode == 0, result.stderr
        assert "--time-budget" in result.stdout
        assert result.stdout.splitlines()[-1] == "set()"
