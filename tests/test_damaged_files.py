"""State files: interrupted while they are written, damaged, or made to do harm."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

import linattn
from linattn.feature_maps import (
    EluFeatures,
)
from tests.attentions import PHI, assert_equal_and_native, filled_state
from tests.entries import saying


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "numpy.savez"])
def test_interrupted_saving_leaves_the_old_file_alone(place, tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    old = filled_state(PHI, 1)
    linattn.save_state(path, old, PHI)
    monkeypatch.setattr(place, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        linattn.save_state(path, filled_state(PHI, 2), PHI)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.npz"]
    assert_equal_and_native(linattn.load_state(path, PHI), old)


# An interruption between two instructions may leave the temporary file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_line_the_file_is_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "state.npz"
    old, new = filled_state(PHI, 1), filled_state(PHI, 2)
    tracer = sys.gettrace()
    finished = False
    lines = 0
    while not finished:
        linattn.save_state(path, old, PHI)
        countdown = iter(range(lines, -1, -1))

        def interrupt(frame, event, arg, countdown=countdown):
            if frame.f_code.co_filename != linattn.save_state.__code__.co_filename:
                return None
            if event == "line" and next(countdown, None) == 0:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            linattn.save_state(path, new, PHI)
            finished = True
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(tracer)
        found = linattn.load_state(path, PHI)
        expected = new if np.array_equal(found.kvz, new.kvz) else old
        assert_equal_and_native(found, expected)
    assert lines > 10


def state_bytes(tmp_path):
    path = tmp_path / "good.npz"
    phi = EluFeatures(1)
    linattn.save_state(path, filled_state(phi, lead=(), dim=1, value_dim=1), phi)
    return path.read_bytes()


def load_or_refuse(path, data):
    """Load; whatever is wrong must be one type of error."""
    path.write_bytes(data)
    try:
        state = linattn.load_state(path)
    except linattn.StateFileError:
        return None
    assert state.kvz.shape[:-1] == state.log_scale.shape
    assert state.kvz.dtype == state.log_scale.dtype
    return state


def test_truncated_files(tmp_path):
    good = state_bytes(tmp_path)
    for length in range(0, len(good), 3):
        assert load_or_refuse(tmp_path / "bad.npz", good[:length]) is None


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_flipped_bytes(tmp_path, flip):
    good = state_bytes(tmp_path)
    refused = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= flip
        refused += load_or_refuse(tmp_path / "bad.npz", bytes(bad)) is None
    assert refused > len(good) // 2


def npy(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + body


def npz(path, **members: bytes):
    good = {
        "format_version": npy(
            "{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\1" + bytes(7)
        ),
        "fingerprint": npy("{'descr': '<U1', 'fortran_order': False, 'shape': ()}", bytes(4)),
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24)),
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(8)),
        "length": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", bytes(8)),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (good | members).items():
            archive.writestr(f"{name}.npy", data)


def test_a_file_made_by_hand_loads(tmp_path):
    npz(tmp_path / "state.npz")
    assert linattn.load_state(tmp_path / "state.npz").kvz.shape == (2, 3)


BAD_MEMBERS = {
    "8 TiB": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2199023255552,)}")},
    "overflowing": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}")
    },
    "negative": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3)}", bytes(24))
    },
    "pickle": {
        "kvz": npy("{'descr': '|O', 'fortran_order': False, 'shape': ()}", pickle.dumps([1]))
    },
    "bare pickle": {"kvz": pickle.dumps(np.zeros(3))},
    "code": {"kvz": npy("{'descr': __import__('os').getpid(), 'fortran_order': False}")},
    "not a header": {"kvz": npy("(((((((((")},
    "nested": {"kvz": npy("(" * 5000)},
    "boolean shape": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (True, True)}", bytes(4))
    },
    "empty": {"kvz": b""},
    "npy 2.0": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24), b"\2\0")
    },
    "integers": {
        "kvz": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3)}", bytes(24))
    },
    "float16": {"kvz": npy("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3)}", bytes(12))},
    "structured": {
        "kvz": npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3)}", bytes(24))
    },
    "no width": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 0)}")},
    "no columns": {
        "kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3)}"),
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}"),
    },
    "one axis": {"kvz": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}", bytes(24))},
    "misfit": {
        "log_scale": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", bytes(12))
    },
    "other dtype": {
        "log_scale": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(16))
    },
    "newer": {
        "format_version": npy(
            "{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\2" + bytes(7)
        )
    },
    "negative length": {
        "length": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", b"\xff" * 8)
    },
    "unpaired surrogate": {
        "fingerprint": npy("{'descr': '<U1', 'fortran_order': False, 'shape': ()}", b"\xff" * 4)
    },
    "another member": {
        "more": npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", bytes(8))
    },
}


@pytest.mark.parametrize("kind", BAD_MEMBERS)
def test_hostile_members(tmp_path, kind):
    path = tmp_path / "bad.npz"
    npz(path, **BAD_MEMBERS[kind])
    with pytest.raises(linattn.StateFileError, match=saying("bad.npz")):
        linattn.load_state(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"text", b"PK\x05\x06" + bytes(18), bytes(1000), None],
    ids=["empty", "text", "empty zip", "zeros", "npy"],
)
def test_no_state_file(tmp_path, data):
    path = tmp_path / "bad.npz"
    if data is None:
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(data)
    with pytest.raises(linattn.StateFileError, match=saying("bad.npz", "not a linattn state file")):
        linattn.load_state(path)


def test_compressed_bomb(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(
        path,
        format_version=np.int64(1),
        fingerprint=np.str_(""),
        kvz=np.zeros((4, 2_000_000)),
        log_scale=np.zeros(4),
        length=np.int64(0),
    )
    tracemalloc.start()
    try:
        with pytest.raises(linattn.StateFileError, match="more than"):
            linattn.load_state(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        linattn.load_state(tmp_path / "none.npz")
    with pytest.raises(OSError, match="none"):
        linattn.save_state(tmp_path / "none" / "state.npz", filled_state(PHI))


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_foreign_layouts_are_read_right(tmp_path, fortran, order):
    path = tmp_path / "state.npz"
    numbers = np.arange(6).reshape(2, 3)
    body = numbers.astype(f"{order}f4").tobytes(order="F" if fortran else "C")
    header = f"{{'descr': '{order}f4', 'fortran_order': {fortran}, 'shape': (2, 3)}}"
    npz(path, kvz=npy(header, body))
    state = linattn.load_state(path)
    assert state.kvz.dtype.isnative
    np.testing.assert_array_equal(state.kvz, numbers)
