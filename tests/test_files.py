"""States on disk: exact round trips, writes that are all or nothing, one error for bad files."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, call-arg"

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import (
    CoresetAttention,
    StateFileError,
    init_state,
    load_state,
    save_state,
    update_state,
)
from linattn.feature_maps import (
    ActivationFeatures,
    CalibratedFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    HyperbolicFeatures,
    LandmarkFeatures,
    PositiveFeatures,
    RandomFourierFeatures,
    RotatedFeatures,
)
from linattn.typing import Features
from tests.attentions import inputs
from tests.interrupted import is_interrupted_at

DIM, VALUE_DIM = 6, 3


def phi_of(seed=0):
    return PositiveFeatures(DIM, 2 * DIM, rng=seed)


def tokens(length, *lead, seed=0):
    return inputs(length, DIM, VALUE_DIM, lead=lead, seed=seed, dtype="float32")


def some_state(phi=None, length=5):
    _, key, value = tokens(length, 2)
    phi = phi_of() if phi is None else phi
    return update_state(init_state(phi, VALUE_DIM, batch_shape=(2,), like=key), key, value, phi)


def assert_same_bits(state, expected):
    assert state.length == expected.length
    assert state.fingerprint == expected.fingerprint
    for field in ("kvz", "log_scale"):
        actual, wanted = getattr(state, field), getattr(expected, field)
        assert actual.dtype == wanted.dtype
        assert_array_equal(actual, wanted)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.npz"


# Round trips ------------------------------------------------------------------------------------


def test_round_trip_in_every_library(xp, path):
    phi = phi_of()
    _, key, value = (xp.array(a) for a in tokens(5, 2))
    state = init_state(phi, VALUE_DIM, batch_shape=(2,), like=key)
    state = update_state(state, key, value, phi)
    save_state(path, state, phi)
    loaded = load_state(path, phi, like=key)
    xp.assert_like(loaded.kvz, state.kvz)
    xp.assert_like(loaded.log_scale, state.log_scale)
    assert type(loaded.length) is int
    assert loaded.length == 5
    host = load_state(path, phi)
    for field in ("kvz", "log_scale"):
        expected = xp.numpy(getattr(state, field))
        assert_array_equal(xp.numpy(getattr(loaded, field)), expected)
        assert type(getattr(host, field)) is np.ndarray
        assert_array_equal(getattr(host, field), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch_shape", [(), (0,), (2, 3)])
def test_round_trip_of_empty_states(path, batch_shape, dtype):
    phi = EluFeatures(DIM)
    state = init_state(phi, VALUE_DIM, batch_shape=batch_shape, like=np.ones(1, dtype=dtype))
    save_state(path, state, phi)
    assert_same_bits(load_state(path, phi), state)


def test_without_a_map_nothing_is_checked(path):
    state = some_state()
    save_state(path, state)
    assert_same_bits(load_state(path), state)
    save_state(path, state, phi_of())
    assert_same_bits(load_state(path), state)


def test_loaded_states_are_the_callers_own(path):
    state = some_state()
    save_state(path, state, phi_of())
    loaded = load_state(path, phi_of())
    path.unlink()
    assert loaded.kvz.flags.writeable
    assert loaded.log_scale.flags.writeable
    assert_same_bits(update_state(loaded, *tokens(3, 2)[1:], phi_of()), some_more(state))


def some_more(state):
    return update_state(state, *tokens(3, 2)[1:], phi_of())


def test_a_stream_may_be_saved_and_restored_at_any_token(path):
    phi = phi_of()
    query, key, value = tokens(20, 2)
    whole, last = linattn.linear_attention(
        query, key, value, phi, is_causal=True, return_state=True
    )
    stream = linattn.Decoder(phi, init_state(phi, VALUE_DIM, batch_shape=(2,), like=key))
    uninterrupted = linattn.Decoder(phi, stream.state)
    for t in range(20):
        save_state(path, stream.state, phi)
        # Another process has the map from its seed, not the object.
        stream = linattn.Decoder(phi_of(), load_state(path, phi_of()))
        token = (query[:, t], key[:, t], value[:, t])
        out = stream.step(*token)
        # Tokens that wait are added up in another order.
        assert_allclose(out, uninterrupted.step(*token), rtol=0, atol=1e-6)
        assert_allclose(out, whole[:, t], rtol=0, atol=3e-6)
    for one, other in zip(stream.state[:2], uninterrupted.state[:2], strict=True):
        assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert stream.state.length == last.length == 20


def test_values_that_are_not_finite_survive(path):
    state = some_state()._replace(length=2**40)
    state.kvz[0, 0] = np.nan
    state.kvz[0, 1] = np.inf
    save_state(path, state)
    assert_same_bits(load_state(path), state)


def test_fortran_order_and_big_endian_become_native(path):
    state = some_state()
    odd = linattn.State(
        np.asfortranarray(state.kvz).astype(">f4"), state.log_scale.astype(">f4"), *state[2:]
    )
    save_state(path, odd)
    loaded = load_state(path)
    assert loaded.kvz.dtype.isnative
    assert loaded.kvz.flags.c_contiguous
    assert_same_bits(loaded, state)


UNSEEDED = {
    "positive": lambda rng: PositiveFeatures(DIM, 2 * DIM, rng=rng),
    "redrawn": lambda rng: PositiveFeatures(DIM, 2 * DIM, rng=0).redraw(rng),
    "inside another": lambda rng: RotatedFeatures(PositiveFeatures(DIM, 2 * DIM, rng=rng)),
    "calibrated": lambda rng: DenseExponentialFeatures.calibrate(
        [tokens(40, 2)[:2]], num_features=2 * DIM, rng=rng
    ),
    "learned": lambda rng: CalibratedFeatures.calibrate(
        [tokens(40), tokens(30)], num_features=8, learn=True, num_steps=2, rng=rng
    ),
    "fitted": lambda rng: LandmarkFeatures.fit(*tokens(40)[:2], num_features=4, rng=rng),
    "Fourier": lambda rng: RandomFourierFeatures(DIM, 2 * DIM, rng=rng),
    "Matern": lambda rng: RandomFourierFeatures(DIM, 2 * DIM, kernel="matern32", rng=rng),
    "activation": lambda rng: ActivationFeatures(DIM, 2 * DIM, rng=rng),
}


@pytest.mark.parametrize("name", UNSEEDED)
def test_a_map_that_nobody_can_make_again_warns(path, name):
    phi = UNSEEDED[name](None)
    state = linattn.init_state(phi, 3, like=np.ones(DIM))
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(UserWarning, match="made with rng=None and cannot be made again"),
    ):
        save_state(path, state, phi)
    assert not path.exists()
    with pytest.warns(UserWarning, match="integer as rng, or pickle it"):
        save_state(path, state, phi)
    assert_same_bits(load_state(path, phi), state)
    kept = pickle.loads(pickle.dumps(phi))
    for repeatable in (kept, UNSEEDED[name](0)):
        state = linattn.init_state(repeatable, 3, like=np.ones(DIM))
        save_state(path, state, repeatable)
        assert_same_bits(load_state(path, repeatable), state)


def test_a_missing_folder_is_named_as_it_was_given(tmp_path):
    def stream():
        memory = CoresetAttention(4, block_size=4, rng=0)
        memory.extend(*(np.ones((1, 3, 2)) for _ in range(3)))
        return memory

    path = os.path.join(tmp_path, "none", "state.npz")
    savers = {
        "save_state": lambda: save_state(path, some_state()),
        "CoresetAttention.save": lambda: stream().save(path),
    }
    if importlib.util.find_spec("safetensors") is not None:
        savers["layers"] = lambda: linattn.layers.save_safetensors(path, {"a": np.ones(2)})
    for save in savers.values():
        with pytest.raises(FileNotFoundError) as caught:
            save()
        assert caught.value.filename == path
        assert str(caught.value) == f"[Errno 2] No such file or directory: {path!r}"


def test_paths_may_be_bytes(tmp_path):
    name = os.fsencode(tmp_path / "\xe9tat")
    save_state(name, some_state(), phi_of())
    assert os.listdir(os.fsencode(tmp_path)) == [os.path.basename(name)]
    assert_same_bits(load_state(name, phi_of()), some_state())
    with pytest.raises(StateFileError, match="\xe9tat holds the state of another feature map"):
        load_state(name, phi_of(1))


@pytest.mark.parametrize("name", [None, 0, 3.0, bytearray(b"state.npz")])
def test_what_is_no_path(name):
    """A number would be read from: 0 is the standard input."""
    message = f"path must be a str, bytes or path-like object, got {type(name).__name__}"
    with pytest.raises(TypeError, match=message):
        save_state(name, some_state())
    with pytest.raises(TypeError, match=message):
        load_state(name)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_the_file_is_what_the_user_has_set(path, mask):
    before = os.umask(mask)
    try:
        save_state(path, some_state())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_that_is_replaced_keeps_its_permissions(path, mode):
    before = os.umask(0o022)
    try:
        save_state(path, some_state())
        path.chmod(mode)
        save_state(path, some_state(length=9))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert_same_bits(load_state(path), some_state(length=9))


@pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX")
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_regular_files_are_replaced(path, kind):
    victim = path.parent / "victim"
    if kind == "link":
        path.symlink_to(victim)
    else:
        (os.mkdir if kind == "folder" else os.mkfifo)(path)
    wanted = "it is a symbolic link" if kind == "link" else "it is not a regular file"
    with pytest.raises(FileExistsError, match=f"{wanted}; name a regular file"):
        save_state(path, some_state())
    assert list(path.parent.iterdir()) == [path]
    assert path.is_symlink() == (kind == "link")


def test_numpy_reads_the_file_without_pickle(path):
    state = some_state()
    save_state(path, state, phi_of())
    with np.load(path, allow_pickle=False) as file:
        assert_array_equal(file["kvz"], state.kvz)
        assert file["format_version"] == 1
        assert str(file["fingerprint"]) == phi_of().fingerprint()


# Whose state it is ------------------------------------------------------------------------------


OTHERS = {
    "seed": phi_of(1),
    "class": HyperbolicFeatures(DIM, 2 * DIM, rng=0),
    "scale": PositiveFeatures(DIM, 2 * DIM, rng=0, scale=0.3),
    "size": PositiveFeatures(DIM, 3 * DIM, rng=0),
    "weights": PositiveFeatures.from_projection(
        phi_of().projection, log_weights=np.full(2 * DIM, 0.1)
    ),
    "elu": EluFeatures(),
    "activation": ActivationFeatures(DIM, 2 * DIM, rng=0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_map_is_refused(path, other):
    save_state(path, some_state(), phi_of())
    with pytest.raises(StateFileError, match="the state of another feature map"):
        load_state(path, OTHERS[other])


def test_the_same_map_is_accepted_wherever_it_came_from(path):
    phi = phi_of()
    save_state(path, some_state(), phi)
    for same in (
        phi,
        phi_of(),
        pickle.loads(pickle.dumps(phi)),
        PositiveFeatures.from_projection(phi.projection.tolist()),
    ):
        assert_same_bits(load_state(path, same), some_state())


def test_a_file_saved_without_a_map_cannot_be_checked(path):
    save_state(path, some_state()._replace(fingerprint=None))
    assert load_state(path).fingerprint is None
    with pytest.raises(StateFileError, match="saved without its feature map"):
        load_state(path, phi_of())


def test_a_file_keeps_what_the_state_knows_of_its_map(path):
    state = some_state()
    for arguments in ((), (phi_of(),)):
        save_state(path, state, *arguments)
        assert load_state(path).fingerprint == state.fingerprint
        assert load_state(path, phi_of(), like=state.kvz).fingerprint == state.fingerprint
        with pytest.raises(StateFileError, match=r"another feature map.*same integer as rng"):
            load_state(path, phi_of(1))
        with pytest.raises(ValueError, match="got one of another map"):
            linattn.read_state(tokens(1)[0], load_state(path), phi_of(1))
    foreign = state._replace(fingerprint=None)
    save_state(path, foreign, phi_of())
    assert load_state(path).fingerprint == state.fingerprint


def test_a_state_is_not_saved_as_that_of_another_map(path):
    with pytest.raises(ValueError, match=r"state must be a state of feature_map.*another map"):
        save_state(path, some_state(), phi_of(1))
    assert not path.exists()


@pytest.mark.parametrize("number", ["", "-1", "1.0", "x", str(2**31), "9" * 99, "\u0661", " 1"])
def test_fingerprints_that_are_none(path, number):
    np.savez(path, **members(fingerprint=np.str_("#" + number)))
    with pytest.raises(StateFileError, match="fingerprint must be # and an integer of 31 bits"):
        load_state(path)


def test_maps_that_cannot_be_recognized(path):
    class Nameless:
        num_features = DIM

        def query_features(self, x):
            return Features(x, None)

        key_features = query_features

    for call in (
        lambda: save_state(path, some_state(), Nameless()),
        lambda: load_state(path, Nameless()),
    ):
        with pytest.raises(TypeError, match=r"fingerprint\(\).*Nameless.*feature_map=None"):
            call()
    local = ActivationFeatures(DIM, 8, activation=lambda u: u, rng=0)
    with pytest.raises(ValueError, match="top of a module"):
        save_state(path, some_state(), local)
    with pytest.raises(TypeError, match="feature_map must have"):
        save_state(path, some_state(), PositiveFeatures)
    assert not path.exists()


@pytest.mark.parametrize("state", [None, (np.zeros((2, 3)), np.zeros(2), 0), b"npz"])
def test_only_states_are_saved(path, state):
    with pytest.raises(TypeError, match=r"state must be a linattn\.State"):
        save_state(path, state)
    assert not path.exists()


# All or nothing ---------------------------------------------------------------------------------


def fail_after_some_bytes(file, **arrays):
    file.write(b"half")
    raise KeyboardInterrupt


def fail_with_full_disk(file, **arrays):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("failure", "error"),
    [(fail_after_some_bytes, KeyboardInterrupt), (fail_with_full_disk, OSError)],
)
@pytest.mark.parametrize("existing", [True, False])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(
    path, monkeypatch, failure, error, existing
):
    old = some_state()
    if existing:
        save_state(path, old)
    monkeypatch.setattr(np, "savez", failure)
    with pytest.raises(error):
        save_state(path, some_state(length=9))
    assert [p.name for p in path.parent.iterdir()] == (["state.npz"] if existing else [])
    if existing:
        assert_same_bits(load_state(path), old)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_an_interrupt_wherever_it_falls(path):
    """In the middle of making an archive, zipfile complains of a member that is still open."""
    old, new = some_state(), some_state(length=9)
    save_state(path, old)

    step = 1
    while is_interrupted_at(step, lambda: save_state(path, new), (zipfile.__file__,)):
        assert [p.name for p in path.parent.iterdir()] == ["state.npz"]
        assert load_state(path).length in (5, 9)
        step += 2
    assert step > 100
    assert_same_bits(load_state(path), new)


def test_the_file_appears_only_when_it_is_complete(path, monkeypatch):
    seen = []
    savez = np.savez

    def watching(file, **arrays):
        savez(file, **arrays)
        seen.append(path.exists())

    monkeypatch.setattr(np, "savez", watching)
    save_state(path, some_state())
    assert seen == [False]
    assert [p.name for p in path.parent.iterdir()] == ["state.npz"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        save_state(tmp_path / "absent" / "state.npz", some_state())
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "absent.npz")


# Files that need not be trusted ------------------------------------------------------------------


def members(**changes):
    """Return the arrays of a good file, changed; None leaves one out."""
    state = some_state()
    arrays = {
        "format_version": np.int64(1),
        "fingerprint": np.str_(phi_of().fingerprint()),
        "kvz": state.kvz,
        "log_scale": state.log_scale,
        "length": np.int64(5),
    }
    return {name: a for name, a in (arrays | changes).items() if a is not None}


def npy(header, body=b""):
    """Return an npy member of a header written by hand."""
    text = header.encode("latin1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def write_members(path, replaced, compression=zipfile.ZIP_STORED):
    """Write a good file with some members replaced by bytes."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in members().items():
            if name in replaced:
                archive.writestr(f"{name}.npy", replaced[name])
            else:
                buffer = io.BytesIO()
                np.save(buffer, array)
                archive.writestr(f"{name}.npy", buffer.getvalue())


def assert_refused(path, match=None):
    """The one error, for little memory whatever the file claims."""
    tracemalloc.start()
    try:
        with pytest.raises(StateFileError, match=match):
            load_state(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4e6


def test_the_helpers_make_good_files(path):
    write_members(path, {})
    assert_same_bits(load_state(path, phi_of()), some_state())
    body = some_state().kvz.tobytes()
    write_members(path, {"kvz": npy(float_header(), body)})
    assert_same_bits(load_state(path, phi_of()), some_state())


EIGHT_TEBIBYTES = "{'descr': '<f8', 'fortran_order': False, 'shape': (1024, 1024, 1024, 1024)}"


def float_header(descr="'<f4'", order="False", shape="(2, 12, 4)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


LIES = {
    "8 TiB": npy(EIGHT_TEBIBYTES),
    "more than there is": npy(float_header(shape="(2, 12, 5)"), bytes(384)),
    "negative axis": npy(float_header(shape="(2, 12, -4)"), bytes(384)),
    "two negative axes": npy(float_header(shape="(-2, 12, -4)"), bytes(384)),
    "one axis": npy(float_header(shape="(96,)"), bytes(384)),
    "shape no tuple": npy(float_header(shape="96"), bytes(384)),
    "bool in shape": npy(float_header(shape="(True, 12, 8)"), bytes(384)),
    "Python 2 integers": npy(float_header(shape="(2L, 12L, 4L)"), bytes(384)),
    "integers": npy(float_header("'<i4'"), bytes(384)),
    "complex": npy(float_header("'<c8'"), bytes(768)),
    "float16": npy(float_header("'<f2'"), bytes(192)),
    "long double": npy(float_header("'<f16'"), bytes(1536)),
    "no dtype": npy(float_header("'<f9'"), bytes(384)),
    "deprecated dtype": npy(float_header("'|a4'"), bytes(384)),
    "objects": npy(float_header("'|O'"), bytes(768)),
    "records": npy(float_header("[('a', '<f4')]"), bytes(384)),
    "order no bool": npy(float_header(order="0"), bytes(384)),
    "no shape": npy("{'descr': '<f4', 'fortran_order': False}", bytes(384)),
    "unclosed": npy(float_header(shape="(2, 12, 4")),
    "nested": npy("(" * 300),
    "code": npy("__import__('os').getcwd()"),
    "huge header": npy("{" + "0:0," * 15000 + "}"),
    "npy 2.0": b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\xff",
    "no header": b"\x93NUMPY\x01\x00\xff\xff",
    "magic only": b"\x93NUMPY",
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["kvz", "log_scale", "length", "fingerprint", "format_version"])
def test_members_that_lie(path, name, lie):
    write_members(path, {name: LIES[lie]})
    assert_refused(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format_version": np.int64(2)}, "format version 2, this linattn reads 1"),
        ({"format_version": np.int64(0)}, "format version 0"),
        ({"format_version": np.float64(1)}, "format_version"),
        ({"length": np.int64(-1)}, "length must not be negative"),
        ({"length": np.arange(3)}, "length"),
        ({"length": np.str_("5")}, "length"),
        ({"fingerprint": np.bytes_(b"abc")}, "fingerprint"),
        ({"log_scale": np.zeros((2, 11), dtype=np.float32)}, "do not fit"),
        ({"log_scale": np.zeros((2, 12))}, "do not fit"),
        ({"kvz": np.zeros(4, dtype=np.float32)}, "do not fit"),
        ({"kvz": None}, "must hold the arrays"),
        ({"surplus": np.zeros(3)}, "must hold the arrays"),
    ],
)
def test_arrays_that_are_no_state(path, changes, match):
    np.savez(path, **members(**changes))
    assert_refused(path, match)


def test_a_pickle_is_not_run(path, monkeypatch):
    np.savez(path, **members(kvz=np.array([{"a": 1}], dtype=object)))
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("unpickled"))
    assert_refused(path)


def test_a_compressed_bomb_is_not_unpacked(path):
    bomb = npy(float_header(shape="(5000, 500, 4)"), bytes(40_000_000))
    write_members(path, {"kvz": bomb}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    assert_refused(path, "claim more than")
    # Not even one that fits.
    write_members(path, {}, zipfile.ZIP_DEFLATED)
    assert_refused(path, "claim more than")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_that_comes_twice(path):
    write_members(path, {})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kvz.npy", npy(EIGHT_TEBIBYTES))
    assert_refused(path, "must hold the arrays")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip",
        b"\x93NUMPY\x01\x00",
        b"PK\x05\x06" + bytes(18),
        b"PK\x05\x06" + b"\xff" * 18,
    ],
    ids=["empty", "text", "npy", "empty zip", "damaged zip"],
)
def test_files_of_another_kind(path, content):
    path.write_bytes(content)
    assert_refused(path)


def test_truncated_files(path):
    save_state(path, some_state(), phi_of())
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(StateFileError):
            load_state(path)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_flipped_bits(path):
    save_state(path, some_state(), phi_of())
    good = path.read_bytes()
    assert_same_bits(load_state(path, phi_of()), some_state())
    # Each field of the zip's own records; of the members, which checksums guard, some bytes.
    with zipfile.ZipFile(path) as archive:
        ends = [*[info.header_offset for info in archive.infolist()][1:], archive.start_dir]
        guarded = {
            position
            for info, end in zip(archive.infolist(), ends, strict=True)
            for position in range(end - info.file_size, end)
        }
    expected, phi = some_state(), phi_of()
    for position in range(0, len(good), 2):
        if position in guarded and position % 31:
            continue
        bad = bytearray(good)
        bad[position] ^= 1 << (0, 3, 7)[position % 3]
        path.write_bytes(bad)
        try:
            loaded = load_state(path, phi)
        except StateFileError:
            continue
        # Some bits mean nothing: dates, attributes.
        assert_same_bits(loaded, expected)


@pytest.mark.parametrize("name", ["kvz", "length"])
def test_flipped_bits_of_a_header_behind_a_right_checksum(path, name):
    buffer = io.BytesIO()
    np.save(buffer, members()[name])
    good = buffer.getvalue()
    for position in range(128):
        bad = bytearray(good)
        bad[position] ^= 1 << (0, 3, 6)[position % 3]
        write_members(path, {name: bytes(bad)})
        try:
            loaded = load_state(path)
        except StateFileError:
            continue
        # What still parses is a state of the size of the file: another byte order, say.
        assert loaded.kvz.shape == (2, 12, 4)
        assert loaded.length >= 0


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        load_state(tmp_path)
