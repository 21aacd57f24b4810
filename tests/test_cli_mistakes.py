"""Mistakes that people make with `linattn`: one right line, exit code 2, the file named.

And what programs read: JSON, and the completion of names.
"""

# Star arguments.
# mypy: disable-error-code="arg-type, assignment, attr-defined"

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

import linattn
from tests.command import assert_refused, call, passed
from tests.test_cli_attend import dense

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((2, 40, dim)).astype(np.float32) for dim in (8, 8, 4))
GOOD = {"query": QUERY, "key": KEY, "value": VALUE}
THREE = ("q.npy", "k.npy", "v.npy")
OBJECTS = np.array([{}], dtype=object)
ENDS = {
    "attend": ["--out", "o.npy"],
    "compare": [
        "--out", "out", "--maps", "relu", "--num-features", "8", "--lengths", "64",
        "--time-budget", "0",
    ],
}  # fmt: skip


def _cut(name):
    content = Path("q.npy" if name.endswith("y") else "all.npz").read_bytes()
    Path(name).write_bytes(content[: len(content) // 2])


def _save(array):
    return lambda name: np.save(name, array, allow_pickle=True)


def _savez(**arrays):
    return lambda name: np.savez(name, **(GOOD | arrays))


def _bytes(content):
    return lambda name: Path(name).write_bytes(content)


WANT = "want three .npy files, or one .npz file or .zarr store with query, key, value, got"

# The file that is wrong, how it is made, and what the line says in both commands.
FILES = {
    "a name that is not there": ("x.npy", lambda name: None, "cannot be opened: No such file"),
    "a link to nowhere": ("x.npy", lambda name: os.symlink("none", name), "cannot be opened: No"),
    "a folder": ("x.npy", lambda name: os.mkdir(name), "cannot be opened: Is a directory"),
    "an empty file": ("x.npy", _bytes(b""), "want an .npy file of an array"),
    "text": ("x.npy", _bytes(b"1 2 3\n"), "(numpy.save), got something else"),
    "half a file": ("x.npy", _cut, "got one that is cut off or damaged"),
    "a pickle with that name": ("x.npy", _bytes(pickle.dumps([1])), "got something else"),
    "an .npz with that name": (
        "x.npy",
        lambda name: os.link("all.npz", name),
        "got something else",
    ),
    "objects": ("x.npy", _save(OBJECTS), "got Python objects, which are never unpickled"),
    "integers": ("x.npy", _save(KEY.astype(int)), "float16"),
    "complex numbers": ("x.npy", _save(KEY.astype(complex)), "got complex128"),
    "booleans": ("x.npy", _save(KEY > 0), "got bool"),
    "long doubles": ("x.npy", _save(KEY.astype(np.longdouble)), "float16"),
    "strings": ("x.npy", _save(np.array([["a"] * 8] * 40)), "float16"),
    "one number": ("x.npy", _save(np.float32(3)), "(..., length, dim), got"),
    "one axis": ("x.npy", _save(np.ones(8)), "(..., length, dim), got"),
    "another dim": ("x.npy", _save(KEY[..., :3]), "query and key"),
    "another length": ("x.npy", _save(KEY[:, :9]), "key and value"),
    "other heads": ("x.npy", _save(np.concatenate([KEY, KEY[:1]])), "leading axes"),
    "NaN": ("x.npy", _save(np.where(KEY > 2, np.nan, KEY)), "finite"),
    "a table of text": ("x.csv", _bytes(b"1,2\n"), "numpy.loadtxt reads text"),
    "a tensor": ("x.pt", _bytes(b"PK"), "save x.numpy()"),
    "safetensors": ("x.safetensors", _bytes(b"{"), "save x.numpy()"),
    "HDF5": ("x.h5", _bytes(b"\x89HDF"), "load it by h5py"),
    "a data frame": ("x.parquet", _bytes(b"PAR1"), "save frame.to_numpy()"),
    "packed": ("x.npy.gz", _bytes(gzip.compress(b"1")), "unpack it first"),
    "pickled": ("x.pkl", _bytes(pickle.dumps(1)), "nothing is unpickled here"),
}
ONE = {
    "one array": ("x.npy", _save(QUERY), f"{WANT} x.npy"),
    "a folder": ("x", lambda name: os.mkdir(name), f"{WANT} x"),
    "a table of text": ("x.csv", _bytes(b"1,2\n"), f"{WANT} x.csv; numpy.loadtxt reads text"),
    "no archive": ("x.npz", _bytes(b"hello"), "x.npz: want an .npz file of NumPy arrays"),
    "half an archive": ("x.npz", _cut, "got one that is cut off or damaged"),
    "names of torch": (
        "x.npz",
        lambda name: np.savez(name, q=QUERY, k=KEY, v=VALUE),
        "x.npz: want arrays query, key, value; missing: query, key, value; found: q, k, v",
    ),
    "no names": ("x.npz", lambda name: np.savez(name, QUERY, KEY, VALUE), "found: arr_0, arr_1"),
    "nothing": ("x.npz", lambda name: np.savez(name), "found: nothing"),
    "objects inside": ("x.npz", _savez(query=OBJECTS), "Python objects, which are never unpickled"),
    "integers inside": ("x.npz", _savez(value=VALUE.astype(int)), "x.npz: value"),
    "NaN inside": ("x.npz", _savez(key=np.full_like(KEY, np.nan)), "x.npz: key"),
    "a bias of another length": ("x.npz", _savez(key_bias=np.ones(9, "f4")), "x.npz: key_bias"),
    "no store": ("x.zarr", lambda name: None, "x.zarr: cannot be opened: No such file"),
    "a folder that is no store": ("x.zarr", lambda name: os.mkdir(name), "want a .zarr store"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, array in zip(THREE, GOOD.values(), strict=True):
        np.save(name, array)
    np.savez("all.npz", **GOOD)
    return tmp_path


@pytest.mark.parametrize("command", ENDS)
class TestFiles:
    """One reader: both commands take the same files, and refuse the others in one way."""

    @pytest.mark.parametrize("mistake", FILES)
    def test_one_of_three(self, folder, command, mistake):
        name, make, text = FILES[mistake]
        make(name)
        result = call(command, "q.npy", name, "v.npy", *ENDS[command])
        assert_refused(result, text)
        assert name in result.stderr
        assert "unsafe" not in result.stderr
        assert "allow_pickle" not in result.stderr
        assert not (folder / "o.npy").exists()

    @pytest.mark.parametrize("mistake", ONE)
    def test_one_of_one(self, folder, command, mistake):
        name, make, text = ONE[mistake]
        if name.endswith("zarr"):
            pytest.importorskip("zarr", reason="zarr is not installed")
        make(name)
        result = call(command, name, *ENDS[command])
        assert_refused(result, text)
        assert name in result.stderr
        assert not (folder / "o.npy").exists()

    def test_numbers_of_files(self, folder, command):
        for names in (THREE[:2], (*THREE, "v.npy")):
            assert_refused(call(command, *names, *ENDS[command]), f"{WANT} {' '.join(names)}")
        for names in (("all.npz",) * 3, ("q.npy", "k.npy", "all.npz")):
            assert_refused(call(command, *names, *ENDS[command]), "all.npz: want an .npy file")


OPTIONS = {
    "attend": {
        "a label with other letters": (["--map", "ReLU-Performr"], "did you mean relu-performer"),
        "a map of compare only": (["--map", "coreset"], "want one of"),
        "a mask of numbers": (["--mask", "int.npy"], "int.npy: key_mask must"),
        "a mask of another length": (["--mask", "short.npy"], "short.npy: key_mask must have"),
        "a mask that is not there": (["--mask", "none.npy"], "none.npy: cannot be opened"),
        "an output without a kind": (["--out", "o"], "--out o: want a name that ends in .npy"),
        "an output that is an input": (["--out", "q.npy"], "--out q.npy: is the file of q.npy too"),
        "a folder that is not there": (["--out", "no/o.npy"], "no/o.npy: cannot be opened"),
        "a tolerance of 0": (["--tolerance", "0"], "--tolerance: want a number > 0, got 0"),
        "a tolerance in words": (["--tolerance", "ten"], "--tolerance"),
        "a block of no rows": (["--block-size", "0"], "--block-size: want a whole number >= 1"),
        "an option of compare": (["--maps", "relu"], "No such option: --maps"),
        "an option without a value": (["--num-features"], "requires an argument"),
    },
    "compare": {
        "a map twice, once wrong": (["--maps", "relu,rleu"], "got rleu; did you mean"),
        "columns in words": (["--num-features", "many"], "--num-features: want whole numbers"),
        "a file in the place of a folder": (["--out", "q.npy"], "--out q.npy: cannot be written"),
        "both ways to give files": (["--input", "all.npz"], "--input all.npz: not with FILES"),
        "an option of attend": (["--window", "8"], "No such option: --window"),
    },
}


@pytest.mark.parametrize(
    ("command", "mistake"), [(command, each) for command in OPTIONS for each in OPTIONS[command]]
)
def test_options(folder, command, mistake):
    np.save("int.npy", np.ones(40, int))
    np.save("short.npy", np.ones(9, bool))
    words, text = OPTIONS[command][mistake]
    ends = ENDS[command]
    pairs = dict(zip(ends[::2], ends[1::2], strict=True))
    rest = [word for name, value in pairs.items() if name not in words for word in (name, value)]
    assert_refused(call(command, *THREE, *rest, *words), text)
    np.testing.assert_array_equal(np.load("q.npy"), QUERY)


@pytest.mark.parametrize("words", [["comapre"], ["attend"], ["verify"], ["--verison"]])
def test_commands(folder, words):
    assert_refused(call(*words), "see linattn")


@pytest.mark.parametrize(
    ("option", "label"),
    [
        ("--maps", "landmarks, window 32,ELU + 1"),
        ("--maps", "Landmarks, Window 32,relu performer"),
        ("--map", "elu + 1"),
        ("--map", "ReLU-Performer"),
    ],
)
def test_names_as_the_tables_have_them(folder, option, label):
    command = "compare" if option == "--maps" else "attend"
    ends = [*ENDS[command][:2], *ENDS[command][4:]]
    result = call(command, *THREE, *ends, option, label)
    assert result.exit_code in (0, 3), result.output
    assert "did you mean" not in result.stderr


def test_a_bias_beside_the_arrays_counts_in_both(folder):
    """`linattn attend` once left it out, without a word."""
    bias = RNG.standard_normal((2, 40)).astype(np.float32) * 3
    bias[:, 5] = -np.inf
    np.savez("biased.npz", **GOOD, key_bias=bias)
    exact = dense(QUERY, KEY, VALUE, causal=False)
    q, k, v = (array.astype(np.float64) for array in GOOD.values())
    logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(8) + bias[:, None].astype(np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    biased = weights @ v / weights.sum(axis=-1, keepdims=True)
    assert np.linalg.norm(biased - exact) > 0.3 * np.linalg.norm(exact)
    passed("attend", "biased.npz", "--out", "o.npy", "--map", "exact", "--block-size", "7")
    np.testing.assert_allclose(np.load("o.npy"), biased, rtol=1e-4, atol=1e-5)
    landmarks = ["--map", "landmarks", "--num-features", "39", "--tolerance", "inf"]
    passed("attend", "biased.npz", "--out", "p.npy", *landmarks)
    error = np.linalg.norm(np.load("p.npy") - biased) / np.linalg.norm(biased)
    assert error < 0.1


class TestPrograms:
    def test_compare(self, folder):
        result = call("compare", *THREE, *ENDS["compare"], "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        found = json.loads(result.stdout)
        assert found == json.loads((folder / "out" / "compare.json").read_text())
        assert "attention" in {row["method"] for row in found["errors"]}
        sentence = found["verdict"]["sentence"]
        assert sentence.endswith(" Judged on all of them: 2 heads, 40 tokens, dim 8.")
        result = call("compare", *THREE, *ENDS["compare"], "--brief")
        assert result.stdout.startswith("Verdict: ")
        assert len(result.stdout.splitlines()) == 1

    def test_attend(self, folder):
        words = ("--map", "favor+", "--num-features", "4", "--mask", "m.npy")
        np.save("m.npy", np.arange(40) > 1)
        result = call("attend", *THREE, "--out", "o.npy", *words, "--json")
        found = json.loads(result.stdout)
        assert result.exit_code == 3
        assert found["within_tolerance"] is False
        assert (found["tokens"], found["checked_rows"], len(found["errors"])) == (40, 40, 2)
        assert found["settings"]["files"] == [*THREE]
        assert found["settings"]["mask"] == "m.npy"
        assert "above the tolerance 0.1" in result.stderr

    def test_verify_and_info(self):
        words = ("--dim", "2", "--num-features", "4", "--draws", "600", "--json")
        result = call("verify", "PositiveFeatures", *words)
        found = json.loads(result.stdout)
        assert result.exit_code == (0 if found["passed"] else 1)
        assert {row["check"] for row in found["rows"]} >= {"mean", "variance", "causal"}
        found = json.loads(call("info", "--json").stdout)
        assert found["versions"]["linattn"] == linattn.__version__
        assert {entry["library"] for entry in found["backends"]} >= {"numpy"}

    def test_an_error_is_a_line_all_the_same(self, folder):
        assert_refused(call("compare", "none.npz", "--json"), "none.npz: cannot be opened")

    def test_completion(self):
        """The shell asks the command itself, and gets options, commands and names of maps."""
        given = {
            "_LINATTN_COMPLETE": "complete_bash",
            "COMP_CWORD": "1",
            "COMP_WORDS": "linattn co",
        }
        assert call(**given).stdout.split() == ["compare"]
        for words, last, wanted in (
            ("linattn attend --map fav", "3", ["favor+"]),
            ("linattn compare --maps relu,longf", "3", ["relu,longformer"]),
            ("linattn verify Posit", "2", ["PositiveFeatures"]),
        ):
            given |= {"COMP_WORDS": words, "COMP_CWORD": last}
            found = call(**given).stdout.split()
            assert [name for name in found if name.startswith(words.split()[-1])] == wanted


def test_a_terminal_says_the_time_left(folder):
    """Steps, time passed, time left, and what is being measured."""
    result = call("compare", *THREE, *ENDS["compare"], TTY_COMPATIBLE="1", FORCE_COLOR="1")
    assert result.exit_code == 0
    assert "passed, about" in result.stderr
    assert "left:" in result.stderr
