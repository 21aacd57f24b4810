"""`linattn.stream.attend`: a block at a time is the whole, and a run that was killed goes on."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import linattn
from linattn import feature_maps as fm
from linattn.stream import attend

LENGTH, DIM, WIDTH, WINDOW = 101, 8, 5, 4
PHI = fm.PositiveFeatures(DIM, num_features=16, rng=0)

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"exact_window": WINDOW},
    "causal window": {"exact_window": WINDOW, "is_causal": True},
    "decay": {"is_causal": True, "log_decay": -0.02},
    "causal window with decay": {"exact_window": WINDOW, "is_causal": True, "log_decay": -0.02},
}


def tokens(length=LENGTH, dtype=np.float64, seed=1):
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2, length, DIM)).astype(dtype)
    return query, key, rng.standard_normal((2, length, WIDTH)).astype(dtype)


def assert_states_agree(ours, theirs, to_numpy=np.asarray):
    """What two states stand for, whatever their scales."""
    assert int(ours.length) == int(theirs.length)
    assert ours.fingerprint == theirs.fingerprint
    logs = [to_numpy(state.log_scale) for state in (ours, theirs)]
    shift = np.max(logs[1], initial=-1e3)
    found, wanted = (
        to_numpy(state.kvz) * np.exp(log - shift)[..., None]
        for state, log in zip((ours, theirs), logs, strict=True)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-9)


def whole(q, k, v, phi, **options):
    return linattn.linear_attention(q, k, v, phi, return_state=True, **options)


class TestBlocks:
    @given(data=st.data())
    @settings(max_examples=15)
    def test_equal_the_whole(self, xp_any_shape, draws, data):
        xp = xp_any_shape
        mode = data.draw(st.sampled_from(list(MODES)))
        options = dict(MODES[mode])
        case = data.draw(draws.cases(is_causal="window" in mode or "is_causal" in options))
        phi = fm.PositiveFeatures(case.query.shape[-1], num_features=6, rng=case.seed)
        arrays = [xp.array(a) for a in (case.query, case.key, case.value)]
        if case.key_mask is not None:
            options["key_mask"] = xp.array(case.key_mask)
        rng, shape = np.random.default_rng(case.seed), case.key.shape[:-1]
        if data.draw(st.booleans()):
            options["key_bias"] = xp.array(rng.standard_normal(shape))
        if mode == "decay" and data.draw(st.booleans()):
            options["log_decay"] = xp.array(-rng.random(shape))
        if data.draw(st.booleans()):
            keys, values = (np.ones((3, a.shape[-1])) for a in (case.key, case.value))
            nothing = linattn.init_state(phi, values.shape[-1], like=arrays[1])
            options["initial_state"] = linattn.update_state(
                nothing, xp.array(keys), xp.array(values), phi
            )
        wanted, state = whole(*arrays, phi, **options)
        out = xp.array(np.full(case.output_shape, np.nan))
        size = data.draw(st.integers(1, 80))
        after = attend(*arrays, out, phi, block_size=size, **options)
        np.testing.assert_allclose(xp.numpy(out), xp.numpy(wanted), rtol=1e-7, atol=1e-9)
        xp.assert_like(after.kvz, state.kvz)
        assert_states_agree(after, state, xp.numpy)
        if "log_decay" in options:
            decays = [xp.numpy(each.log_decay) for each in (after, state)]
            np.testing.assert_allclose(*decays, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("mode", [mode for mode in MODES if "window" in mode])
    def test_positions_beside_a_window(self, mode):
        """A map of the caller's whose far features depend on where a token stands."""

        class Positioned(fm.CosformerFeatures):
            softmax_kernel = True

        (q, k, v), phi = tokens(), Positioned(DIM, max_length=200)
        before = linattn.update_state(
            linattn.init_state(phi, WIDTH, batch_shape=(2,), like=k), k[:, :9], v[:, :9], phi
        )
        options = {**MODES[mode], "initial_state": before}
        wanted, state = whole(q, k, v, phi, **options)
        out = np.empty_like(v)
        after = attend(q, k, v, out, phi, block_size=30, **options)
        np.testing.assert_allclose(out, wanted, rtol=1e-9)
        assert_states_agree(after, state)

    @pytest.mark.parametrize("name", ["landmarks", "cosformer", "rotated", "elu"])
    @pytest.mark.parametrize("mode", MODES)
    def test_of_other_maps(self, name, mode):
        """Fitted to the sequence, or with features that depend on the position."""
        q, k, v = tokens()
        phi: Any = {
            "landmarks": lambda: fm.LandmarkFeatures.fit(q, k, num_features=8, rng=0),
            "cosformer": lambda: fm.CosformerFeatures(DIM, max_length=200),
            "rotated": lambda: fm.RotatedFeatures(PHI),
            "elu": fm.EluFeatures,
        }[name]()
        before = linattn.update_state(
            linattn.init_state(phi, WIDTH, batch_shape=(2,), like=k), k[:, :9], v[:, :9], phi
        )
        options = {**MODES[mode], "initial_state": before}
        out = np.empty_like(v)
        not_served = {"landmarks": {"is_causal"}, "rotated": {"exact_window", "log_decay"}}
        if options.keys() & not_served.get(name, {"exact_window"}):
            with pytest.raises(ValueError, match=r"_(causal|window|decay) needs a feature"):
                attend(q, k, v, out, phi, **options)
            return
        wanted, state = whole(q, k, v, phi, **options)
        after = attend(q, k, v, out, phi, block_size=30, **options)
        np.testing.assert_allclose(out, wanted, rtol=1e-9, atol=1e-12)
        assert_states_agree(after, state)

    @pytest.mark.parametrize("options", [{}, {"exact_window": WINDOW}], ids=str)
    @pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1)])
    def test_as_many_heads_as_tokens(self, options, shape):
        """A decay for each head and one for each token differ in their axes alone."""
        q, k, v = (np.stack([a[0, :6]] * 6) for a in tokens())
        options = {**options, "is_causal": True, "log_decay": -np.arange(6.0).reshape(shape) / 5}
        wanted, state = whole(q, k, v, PHI, **options)
        out = np.empty_like(v)
        after = attend(q, k, v, out, PHI, block_size=4, **options)
        np.testing.assert_allclose(out, wanted, rtol=1e-9)
        assert_states_agree(after, state)

    def test_many_groups_of_later_keys(self):
        q, k, v = tokens(300)
        out = np.empty_like(v)
        attend(q, k, v, out, PHI, block_size=2, exact_window=WINDOW)  # 150 blocks, groups of 3
        wanted = linattn.linear_attention(q, k, v, PHI, exact_window=WINDOW)
        np.testing.assert_allclose(out, wanted, rtol=1e-9)

    def test_progress_counts_rows(self):
        q, k, v = tokens()
        for mode, passes in {"full": 2, "causal": 1, "window": 2}.items():
            seen: list[tuple[int, int]] = []
            attend(
                *(q, k, v, np.empty_like(v), PHI),
                block_size=40,
                progress=lambda *numbers, seen=seen: seen.append(numbers),
                **MODES[mode],
            )
            assert {total for _, total in seen} == {passes * LENGTH}
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)
            assert seen[-1] == (passes * LENGTH, passes * LENGTH)


class TestStorage:
    @pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "float64"])
    def test_memory_maps(self, tmp_path, dtype):
        arrays = tokens()
        for name, array in zip("qkv", arrays, strict=True):
            np.save(tmp_path / f"{name}.npy", array.astype(dtype))
        q, k, v = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv")
        shape = v.shape
        out = np.lib.format.open_memmap(tmp_path / "o.npy", "w+", np.dtype(dtype), shape)
        attend(q, k, v, out, PHI, is_causal=True, block_size=30)
        del out
        wanted = linattn.linear_attention(q, k, v, PHI, is_causal=True)
        found = np.load(tmp_path / "o.npy")
        assert found.dtype == np.dtype(dtype)
        tolerance = {"float16": 2e-3, "float64": 1e-10}.get(dtype, 2e-5)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)

    def test_zarr_gets_whole_chunks(self, tmp_path):
        zarr = pytest.importorskip("zarr", reason="zarr is not installed")
        q, k, v = tokens()
        group = zarr.open_group(tmp_path / "data.zarr", mode="w")
        names = {"query": q, "key": k, "value": v}
        for name, array in names.items():
            group.create_array(name, data=array, chunks=(1, 16, array.shape[-1]))
        out = group.create_array("output", shape=v.shape, chunks=(1, 12, WIDTH), dtype=v.dtype)
        written = []

        class Recorded:
            shape, dtype, chunks = out.shape, out.dtype, out.chunks

            def __getitem__(self, rows):
                return out[rows]

            def __setitem__(self, rows, block):
                written.append((rows[-2].start, rows[-2].stop))
                out[rows] = block

        arrays = [group[name] for name in names]
        attend(*arrays, Recorded(), PHI, is_causal=True, block_size=17)
        assert written == [(start, min(start + 24, LENGTH)) for start in range(0, LENGTH, 24)]
        wanted = linattn.linear_attention(q, k, v, PHI, is_causal=True)
        np.testing.assert_allclose(out[:], wanted, rtol=1e-10)

    def test_h5py(self, tmp_path):
        h5py = pytest.importorskip("h5py", reason="h5py is not installed")
        q, k, v = tokens()
        with h5py.File(tmp_path / "data.h5", "w") as file:
            arrays = [file.create_dataset(n, data=a) for n, a in zip("qkv", (q, k, v), strict=True)]
            out = file.create_dataset("o", v.shape, v.dtype, chunks=(1, 10, WIDTH))
            attend(*arrays, out, PHI, block_size=17, checkpoint=tmp_path / "c")
            np.testing.assert_allclose(out[:], linattn.linear_attention(q, k, v, PHI), rtol=1e-10)

    @pytest.mark.parametrize("mode", ["full", "causal"])
    def test_memory_does_not_grow_with_the_length(self, mode):
        # States of all blocks would be as much as one block takes.
        phi, peaks = fm.PositiveFeatures(DIM, num_features=256, rng=0), []
        for length in (2000, 2000, 16000):
            q, k, v = tokens(length, np.float32)
            out = np.empty_like(v)
            tracemalloc.start()
            attend(q, k, v, out, phi, block_size=1000, **MODES[mode])
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[2] < 1.1 * peaks[1] + 20_000


CAUSAL: dict[str, Any] = {"is_causal": True, "block_size": 20}


class Stop(BaseException):
    """Ends a run from within, as Ctrl-C does."""


def stop_after(steps):
    count = 0

    def progress(done, total):
        nonlocal count
        count += 1
        if count == steps:
            raise Stop

    return progress


class TestCheckpoints:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("size", [30, 1])
    def test_a_run_that_was_stopped_ends_in_the_same_bits(self, tmp_path, mode, size):
        q, k, v = tokens(dtype=np.float32)
        arguments: dict[str, Any] = {"block_size": size, **MODES[mode]}
        if size > 1:
            # More heads than the keys have, and more tokens than all blocks together.
            nothing = linattn.init_state(PHI, WIDTH, batch_shape=(3, 2), like=k)
            before = linattn.update_state(nothing, k, v, PHI)
            arguments["initial_state"] = before._replace(length=10**6)
            q = np.stack([q] * 3)
        wanted = np.empty((*q.shape[:-1], WIDTH), q.dtype)
        out = np.full_like(wanted, np.nan)
        undisturbed = attend(q, k, v, wanted, PHI, **arguments)
        arguments["checkpoint"] = tmp_path / "run"
        for steps in (1, 2, 3, 90):
            try:
                after = attend(q, k, v, out, PHI, progress=stop_after(steps), **arguments)
            except Stop:
                continue
            break
        else:
            after = attend(q, k, v, out, PHI, **arguments)
        assert out.tobytes() == wanted.tobytes()
        assert after.kvz.tobytes() == undisturbed.kvz.tobytes()
        assert after.length == undisturbed.length
        assert after.fingerprint == undisturbed.fingerprint
        assert list(tmp_path.iterdir()) == []

    def test_rows_behind_a_checkpoint_are_not_read_again(self, tmp_path):
        q, k, v = tokens()
        out = np.empty_like(v)
        options: dict[str, Any] = {
            "is_causal": True,
            "block_size": 20,
            "checkpoint": tmp_path / "run",
        }
        with pytest.raises(Stop):
            attend(q, k, v, out, PHI, progress=stop_after(3), **options)
        seen: list[int] = []
        attend(q, k, v, out, PHI, progress=lambda done, total: seen.append(done), **options)
        assert seen == [80, 100, 101]

    def test_a_checkpoint_is_saved_now_and_then(self, tmp_path):
        """What a SIGKILL leaves: the file as it was written on the way."""
        q, k, v = tokens()
        path = tmp_path / "run"
        sizes = []

        def progress(done, total):
            sizes.append(path.read_bytes())

        options: dict[str, Any] = {**CAUSAL, "checkpoint": path, "progress": progress}
        attend(q, k, v, np.empty_like(v), PHI, **options)
        assert len(set(sizes)) == 1
        sizes.clear()
        attend(q, k, v, np.empty_like(v), PHI, checkpoint_seconds=0, **options)
        assert len(set(sizes)) == len(sizes) == 6

    def _stopped(self, path, **options):
        q, k, v = tokens()
        with pytest.raises(Stop):
            attend(
                *(q, k, v, np.empty_like(v), PHI),
                **{"block_size": 20, "checkpoint": path, "progress": stop_after(2), **options},
            )
        return q, k, v

    @pytest.mark.parametrize(
        ("named", "change"),
        [
            ("key", {"key": tokens(LENGTH - 1)[1], "value": tokens(LENGTH - 1)[2]}),
            ("value", {"key": tokens(LENGTH + 1)[1], "value": tokens(LENGTH + 1)[2]}),
            ("query", {"dtype": np.float32, "feature_map": fm.EluFeatures()}),
            ("block_size", {"block_size": 30}),
            ("feature_map", {"feature_map": fm.PositiveFeatures(DIM, num_features=16, rng=1)}),
            ("is_causal", {"is_causal": True}),
            ("exact_window", {"exact_window": 4}),
            ("weights of keys", {"key_mask": np.ones(LENGTH, bool)}),
        ],
    )
    def test_of_another_call_is_refused(self, tmp_path, named, change):
        q, k, v = self._stopped(tmp_path / "run")
        before = (tmp_path / "run").read_bytes()
        change = dict(change)
        if "dtype" in change:
            # The same bytes, twice the numbers.
            dtype = change.pop("dtype")
            q, k, v = (a.view(dtype) for a in (q, k, v))
        arguments = {"query": q, "key": k, "value": v, "out": np.empty_like(v)}
        arguments |= {"block_size": 20, "feature_map": PHI, "checkpoint": tmp_path / "run"}
        with pytest.raises(linattn.StateFileError, match=f"differs in .*{named}"):
            attend(**{**arguments, **change})
        assert (tmp_path / "run").read_bytes() == before

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("steps", [2, 8])
    @pytest.mark.parametrize("name", ["query", "key", "value", "out"])
    def test_of_other_rows_is_refused(self, tmp_path, mode, steps, name):
        """One number in the middle, in rows that were read or written; later rows may differ."""
        q, k, v = tokens()
        arguments = {"query": q, "key": k, "value": v, "out": np.zeros_like(v)}
        options = {"block_size": 20, **MODES[mode], "checkpoint": tmp_path / "run"}
        read: dict[str, set[int]] = {"out": set(), "query": set(), "key": set(), "value": set()}

        class Watched:
            def __init__(self, name):
                self.name, self.array = name, arguments[name]
                self.shape, self.dtype = self.array.shape, self.array.dtype

            def __getitem__(self, index):
                read[self.name] |= set(range(*index[-2].indices(LENGTH)))
                return self.array[index]

            def __setitem__(self, index, rows):
                self.array[index] = rows

        watched = {each: Watched(each) for each in arguments}
        try:
            attend(**watched, feature_map=PHI, progress=stop_after(steps), **options)
        except Stop:
            pass
        else:
            return
        before = (tmp_path / "run").read_bytes()
        for row in (0, 30, 70, LENGTH - 1):
            changed = arguments[name].copy()
            changed[1, row, 2] += 1
            call = {**arguments, name: changed, "feature_map": PHI, **options}
            if row in read[name]:
                what = "out does not hold the rows" if name == "out" else f"{name} has changed in"
                with pytest.raises(linattn.StateFileError, match=what):
                    attend(**call)
                assert (tmp_path / "run").read_bytes() == before
            else:
                attend(**call)
                (tmp_path / "run").write_bytes(before)

    @pytest.mark.parametrize("order", ["C", "F", "reversed"])
    def test_of_other_bytes_with_the_same_numbers_goes_on(self, tmp_path, order):
        q, k, v = tokens()
        out = np.zeros_like(v)
        with pytest.raises(Stop):
            attend(q, k, v, out, PHI, checkpoint=tmp_path / "run", progress=stop_after(3), **CAUSAL)
        if order == "reversed":
            q, k, v = (a.byteswap().view(a.dtype.newbyteorder()) for a in (q, k, v))
        else:
            q, k, v = (np.array(a, order=order) for a in (q, k, v))
        attend(q, k, v, out, PHI, checkpoint=tmp_path / "run", **CAUSAL)
        wanted = linattn.linear_attention(q, k, v, PHI, is_causal=True)
        np.testing.assert_allclose(out, wanted, rtol=1e-10)

    def test_of_the_same_bytes_in_another_order_is_refused(self, tmp_path):
        q, k, v = self._stopped(tmp_path / "run", is_causal=True, key_bias=np.full(LENGTH, -0.5))
        options = {"checkpoint": tmp_path / "run", **CAUSAL}
        small = np.full(LENGTH, -0.5).view(">f8")
        with pytest.raises(linattn.StateFileError, match="differs in weights of keys"):
            attend(q, k, v, np.empty_like(v), PHI, key_bias=small, **options)

    def test_rows_of_a_step_that_failed_may_change(self, tmp_path):
        """They were read, but no state holds them."""
        q, k, v = tokens()
        out = np.zeros_like(v)

        class Broken:
            shape, dtype = v.shape, v.dtype

            def __getitem__(self, index):
                if index[-2].start >= 40:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return v[index]

        options = {"checkpoint": tmp_path / "run", **CAUSAL}
        with pytest.raises(OSError, match="Input/output"):
            attend(q, k, Broken(), out, PHI, **options)
        q[:, 50], k[:, 50] = 1, 1
        attend(q, k, v, out, PHI, **options)
        wanted = linattn.linear_attention(q, k, v, PHI, is_causal=True)
        np.testing.assert_allclose(out, wanted, rtol=1e-10)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "change", ["mask", "bias", "decay", "decays", "keys", "values", "scale", "length", "none"]
    )
    def test_of_other_numbers_is_refused(self, tmp_path, mode, change):
        """Weights of keys and states of the same shapes, whose ends are alike."""
        rng = np.random.default_rng(4)
        bias, mask, decay = rng.standard_normal(LENGTH), np.ones((2, LENGTH), bool), -rng.random(2)
        _, k0, v0 = tokens(seed=5)

        def state(key=k0, value=v0, **fields):
            nothing = linattn.init_state(PHI, WIDTH, batch_shape=(2,), like=bias)
            return linattn.update_state(nothing, key, value, PHI)._replace(**fields)

        def other(array, row):
            array = array.copy()
            array[..., row, :] += 1
            return array

        bias_2, mask_2 = bias.copy(), mask.copy()
        bias_2[50], mask_2[1, 50] = 0, False
        before = state()
        pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "mask": ({"key_mask": mask}, {"key_mask": mask_2}),
            "bias": ({"key_bias": bias}, {"key_bias": bias_2}),
            "decay": ({"log_decay": np.float64(-0.1)}, {"log_decay": np.float64(-0.2)}),
            "decays": ({"log_decay": decay}, {"log_decay": decay * [1, 2]}),
            "keys": ({}, {"initial_state": state(other(k0, 50))}),
            "values": ({}, {"initial_state": state(value=other(v0, 50))}),
            "scale": ({}, {"initial_state": state(log_scale=before.log_scale + 1)}),
            "length": ({}, {"initial_state": state(length=before.length + 1)}),
            "none": ({}, {"initial_state": None}),
        }
        first, second = ({**MODES[mode], "initial_state": before, **each} for each in pairs[change])
        if "log_decay" in pairs[change][0] and "is_causal" not in MODES[mode]:
            return
        q, k, v = self._stopped(tmp_path / "run", **first)
        with pytest.raises(linattn.StateFileError, match=r"differs in (weights|initial_state)"):
            attend(
                *(q, k, v, np.empty_like(v), PHI),
                **{"block_size": 20, "checkpoint": tmp_path / "run", **second},
            )

    @pytest.mark.parametrize("mode", MODES)
    def test_an_output_that_lost_its_rows_is_refused(self, tmp_path, mode):
        """As a script leaves it that makes the output anew whenever it runs."""
        q, k, v = tokens()
        arguments = {"block_size": 20, **MODES[mode], "checkpoint": tmp_path / "run"}
        out, steps = np.zeros_like(v), 2 if "causal" in mode or mode == "decay" else 8
        with pytest.raises(Stop):
            attend(q, k, v, out, PHI, progress=stop_after(steps), **arguments)
        for kept in (0, 20):
            lost = out.copy()
            lost[:, kept:] = 0
            with pytest.raises(linattn.StateFileError, match="out does not hold the rows"):
                attend(q, k, v, lost, PHI, **arguments)
        attend(q, k, v, out, PHI, **arguments)
        del arguments["checkpoint"]
        attend(q, k, v, lost, PHI, **arguments)
        assert out.tobytes() == lost.tobytes()

    def test_damaged_is_refused(self, tmp_path):
        q, k, v = self._stopped(tmp_path / "run")
        content = (tmp_path / "run").read_bytes()
        cut = [content[:length] for length in range(0, len(content), 97)]
        for bad in (*cut, b"hello", content[:300] + bytes(40) + content[340:]):
            (tmp_path / "run").write_bytes(bad)
            with pytest.raises(linattn.StateFileError, match=r"run is not a .*; name another file"):
                attend(q, k, v, np.empty_like(v), PHI, block_size=20, checkpoint=tmp_path / "run")

    @pytest.mark.parametrize(
        ("field", "forged"),
        [
            *(("step", n) for n in (-1, 13, 10**9, -(2**63), np.float64(np.nan), [1], "two")),
            *(("length", n) for n in (-1, -(2**63), 10**9, np.float64(np.nan), [1])),
            *(("call", text) for text in ("", "[]", "null", "1", '"a"', "{}", "[" * 99999, 5)),
            *(("numerics", n) for n in (1, ["a"])),
            *(("kvz", a) for a in (0.5, np.zeros(3), np.zeros((2, 16, 6), "f4"), "a")),
            *(("kvz", a) for a in (np.zeros((2, 17, 6)), np.zeros((2, 16, 6), complex))),
            *(("log_scale", a) for a in (0.5, np.zeros((2, 17)), np.zeros((2, 16), "f4"))),
            *(("log_decay", a) for a in (0.5, np.zeros(3), np.zeros((2, 16)))),
            *(("later_kvz", a) for a in (0.5, np.zeros((9, 2, 16, 6)))),
            *(("later_log_scale", a) for a in (0.5, np.zeros((9, 2, 16)))),
            *(("later_length", a) for a in (1, [1] * 9, [-1, -1], [])),
            *(("checksums", a) for a in (1, [[1]], [[9, 0, 20, 1]], [[-1, 0, 20, 1]])),
            *(("checksums", a) for a in ([[3, 0, 20, -1]], [[3, 20, 0, 1]], [[3, 0, 999, 1]])),
            ("checksums", np.zeros((0, 4), int)),
            *(("format_version", n) for n in (0, 2, 99, [1])),
            *((name, None) for name in ("step", "length", "call", "numerics", "kvz", "checksums")),
            ("another", 1),
        ],
        ids=lambda value: str(value)[:20].replace("\n", ""),
    )
    def test_forged_is_refused(self, tmp_path, field, forged):
        """Whatever the fields say: one error, which names the file and says what to do."""
        mode = "window" if field.startswith("later") else "decay"
        path = tmp_path / "run"
        options = {"block_size": 20, **MODES[mode], "checkpoint": path}
        q, k, v = self._stopped(path, progress=stop_after(8 if mode == "window" else 2), **options)
        with np.load(path) as archive:
            fields = dict(archive)
        if forged is None:
            del fields[field]
        else:
            fields[field] = np.asarray(forged)
        with path.open("wb") as file:
            np.savez(file, **fields)
        out = np.full_like(v, np.nan)
        with pytest.raises(linattn.StateFileError) as refused:
            attend(q, k, v, out, PHI, **options)
        assert str(refused.value).startswith(str(path))
        assert re.search(r"; (name another file, or )?remove it to begin anew$", str(refused.value))
        assert_array_equal(out, np.nan)

    def test_other_threads_are_warned_of(self, tmp_path):
        q, k, v = self._stopped(tmp_path / "run")
        with (
            linattn.config(num_threads=37),
            pytest.warns(UserWarning, match="goes on with 37 threads.*last bits may differ"),
        ):
            attend(q, k, v, np.empty_like(v), PHI, block_size=20, checkpoint=tmp_path / "run")

    def test_a_folder_that_is_not_there_is_an_error_before_any_work(self, tmp_path):
        q, k, v = tokens()
        out = np.full_like(v, np.nan)
        name = tmp_path / "none" / "run"
        with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{name}'$"):
            attend(q, k, v, out, PHI, checkpoint=name)
        assert_array_equal(out, np.nan)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"out": np.empty((2, LENGTH, 4))}, r"out must have shape \(2, 101, 5\)"),
            ({"out": np.empty((2, LENGTH, WIDTH), "f4")}, "out must have the dtype of query"),
            ({"out": [1]}, "out must have a shape, a dtype and rows to slice"),
            ({"query": [[1.0]]}, "query must have a shape, a dtype and rows to slice"),
            ({"query": np.ones(3)}, "query must have at least 2 axes"),
            ({"query": np.ones((2, 50, DIM)), "is_causal": True}, "under is_causal query and key"),
            ({"query": np.ones((2, 50, DIM)), "exact_window": 4}, "under exact_window query"),
            ({"value": np.ones((2, 50, WIDTH))}, "key and value must have one length"),
            ({"key": np.ones((2, LENGTH, 3))}, "query and key must have one last axis"),
            ({"key": np.ones((3, LENGTH, DIM))}, "leading axes must broadcast"),
            ({"key": np.ones((2, LENGTH, DIM), "f4")}, "must have one dtype"),
            ({"query": np.ones((2, LENGTH, DIM), int)}, "must have dtype float16"),
            ({"key_mask": np.ones(50, bool)}, "key_mask must have a last axis of 101"),
            ({"key_mask": np.ones(LENGTH)}, "key_mask must be boolean"),
            ({"log_decay": -0.1}, "log_decay must be None unless is_causal"),
            ({"feature_map": fm.EluFeatures}, "feature_map must have"),
            ({"exact_window": 0}, "exact_window must be at least 1"),
            ({"block_size": 0}, "block_size must be at least 1"),
            ({"is_causal": "lower_right"}, "is_causal must be True or False"),
            ({"checkpoint_seconds": "often"}, "checkpoint_seconds must be a real number"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_bad_input_is_named_before_any_work(self, tmp_path, change, message):
        q, k, v = tokens()
        out = np.full_like(v, np.nan)
        arguments = {"query": q, "key": k, "value": v, "out": out, "feature_map": PHI}
        arguments |= {"checkpoint": tmp_path / "run", **change}
        with pytest.raises((TypeError, ValueError), match=message):
            attend(**arguments)
        assert_array_equal(out, np.nan)
        assert list(tmp_path.iterdir()) == []

    def test_read_only(self, tmp_path):
        q, k, v = tokens()
        np.save(tmp_path / "o.npy", v)
        for out in (np.load(tmp_path / "o.npy", mmap_mode="r"), np.broadcast_to(0.0, v.shape)):
            with pytest.raises(ValueError, match="out must be writable, got a read-only one"):
                attend(q, k, v, out, PHI)

    def test_an_output_in_the_place_of_an_input(self, tmp_path):
        """Rows that are read again, by a window or by a run that goes on, would be outputs."""
        q, k, _ = tokens()
        packed = np.stack([q, k, q, k], axis=1)
        with pytest.raises(ValueError, match="out must not overlap value"):
            attend(*packed.swapaxes(0, 1)[:3], packed[:, 2], PHI, is_causal=True)
        attend(*packed.swapaxes(0, 1), PHI, is_causal=True)
        np.save(tmp_path / "q.npy", q)
        query, out = (np.load(tmp_path / "q.npy", mmap_mode=mode) for mode in ("r", "r+"))
        with pytest.raises(ValueError, match="out must not overlap query"):
            attend(query, k, k, out, PHI, is_causal=True)
        np.testing.assert_array_equal(np.load(tmp_path / "q.npy"), q)

    def test_a_disk_that_fills_up(self, tmp_path):
        """What was written stays; with space again the run goes on."""
        q, k, v = tokens()
        free = 40

        class Disk:
            shape, dtype, rows = v.shape, v.dtype, np.full_like(v, np.nan)

            def __getitem__(self, index):
                return self.rows[index]

            def __setitem__(self, index, block):
                if index[-2].stop > free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.rows[index] = block

        options: dict[str, Any] = {
            "is_causal": True,
            "block_size": 20,
            "checkpoint": tmp_path / "run",
        }
        disk = Disk()
        with pytest.raises(OSError, match="No space left"):
            attend(q, k, v, disk, PHI, **options)
        assert_array_equal(np.isfinite(disk.rows[:, :40]), True)
        assert_array_equal(disk.rows[:, 40:], np.nan)
        free = 1000
        attend(q, k, v, disk, PHI, **options)
        wanted = linattn.linear_attention(q, k, v, PHI, is_causal=True)
        np.testing.assert_allclose(disk.rows, wanted, rtol=1e-10)

    @pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="posix_fallocate: not here")
    def test_space_is_reserved_before_any_work(self, tmp_path, monkeypatch):
        """A sparse file on a full disk: an error, where a write would end the process."""
        q, k, v = tokens()
        name = tmp_path / "o.npy"
        out = np.lib.format.open_memmap(name, "w+", v.dtype, v.shape)
        size = name.stat().st_size

        def full(file, offset, length):
            assert (offset, length) == (0, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=f"No space left .*, {size} bytes are needed: '{name}'"):
            attend(q, k, v, out, PHI)
        assert_array_equal(out, 0)


PROGRAM = """
import sys
import numpy as np
from linattn.feature_maps import PositiveFeatures
from linattn.stream import attend

q, k, v = (np.load(f"{name}.npy", mmap_mode="r") for name in "qkv")
out = np.load("o.npy", mmap_mode="r+")
phi = PositiveFeatures(q.shape[-1], num_features=64, rng=0)
attend(q, k, v, out, phi, block_size=1500, checkpoint="run", checkpoint_seconds=0,
       progress=lambda done, total: print(done, total, flush=True))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="SIGKILL: this system has none")
def test_killed_in_both_passes_it_ends_in_the_same_bytes(tmp_path):
    length = 30_000
    rng = np.random.default_rng(7)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((length, 32), np.float32))
    out = tmp_path / "o.npy"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(kill_at=None):
        """Run the program, and kill it when it has done so many rows: what it did, and its code."""
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            done = []
            for line in process.stdout:
                done.append(int(line.split()[0]))
                if kill_at is not None and done[-1] >= kill_at:
                    process.kill()
                    break
        return done, process.returncode

    def fresh():
        np.lib.format.open_memmap(out, "w+", np.float32, (length, 32))

    fresh()
    assert run()[1] == 0
    wanted = out.read_bytes()
    fresh()
    begun_at = []
    for kill_at in (length // 3, length * 3 // 2):
        done, code = run(kill_at)
        assert code == -signal.SIGKILL
        begun_at.append(done[0])
    done, code = run()
    assert code == 0
    assert 1500 == begun_at[0] < begun_at[1] < length < done[0]
    assert out.read_bytes() == wanted
    assert not (tmp_path / "run").exists()
