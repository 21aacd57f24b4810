"""`linattn.stream.attend` never overwrites what it has still to read, however that was opened."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps as fm
from linattn.stream import _storage, attend
from tests.attentions import inputs

LENGTH, DIM = 48, 4
PHI = fm.PositiveFeatures(DIM, num_features=8, rng=0)
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"exact_window": 16},
    "causal window": {"exact_window": 16, "is_causal": True},
}


def tokens(seed=1, dtype=np.float64):
    return inputs(LENGTH, DIM, lead=(2,), seed=seed, dtype=dtype)


@pytest.fixture(params=["as the system tells", "as NumPy tells"])
def maps(request, monkeypatch):
    """Both ways to find the file of a memory map."""
    if request.param == "as NumPy tells":
        monkeypatch.setattr(_storage, "FILE_MAPS", "/none")
    elif not os.path.exists(_storage.FILE_MAPS):
        pytest.skip("this system does not list the files that a process has mapped")


def refused(name, value, out, read=np.asarray, **options):
    """Each argument in turn is refused, and the storage keeps its numbers."""
    q, k, v = tokens(2)
    before = np.array(read(out))
    arguments: dict[str, Any] = {"query": q, "key": k, "value": v, name: value, **options}
    with pytest.raises(ValueError, match=rf"out must not overlap {name}, got both in "):
        attend(**arguments, out=out, feature_map=PHI, block_size=16)
    np.testing.assert_array_equal(read(out), before)


def accepted(value, out, read=np.asarray):
    q, k, _ = tokens(2)
    wanted = linattn.linear_attention(q, k, np.array(read(value)), PHI)
    attend(q, k, value, out, PHI, block_size=16)
    np.testing.assert_allclose(read(out), wanted, rtol=1e-9)


class TestMemoryMaps:
    @pytest.fixture
    def path(self, tmp_path):
        np.save(tmp_path / "v.npy", tokens()[2])
        return tmp_path / "v.npy"

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("mode", ["r", "r+", "c"])
    def test_one_file_twice(self, maps, path, name, mode):
        value, out = (np.load(path, mmap_mode=m) for m in (mode, "r+"))
        refused(name, value, out)
        refused(name, value[:], out)
        refused(name, np.asarray(value), out[:])

    @pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
    def test_one_file_by_two_names(self, maps, path, link):
        other = path.with_name("w.npy")
        link(path, other)
        refused("value", np.load(path, mmap_mode="r"), np.load(other, mmap_mode="r+"))

    def test_one_file_by_a_relative_path(self, maps, path, monkeypatch):
        monkeypatch.chdir(path.parent)
        refused("value", np.load("v.npy", mmap_mode="r"), np.load(path, mmap_mode="r+"))

    def test_other_offsets_dtypes_and_orders(self, maps, path):
        """Raw maps of one file, whose bytes overlap."""
        raw, offset = tokens()[2], 64
        path.write_bytes(bytes(offset) + raw.tobytes() * 4)
        out = np.memmap(path, np.float64, "r+", offset, raw.shape)
        for start in (0, 8, raw.nbytes, offset + raw.nbytes - 8):
            refused("value", np.memmap(path, np.float64, "r", start, raw.shape), out)
        words = np.memmap(path, np.uint8, "r", offset + 24, raw.nbytes)
        refused("value", words.view(np.float64).reshape(raw.shape), out)
        refused("value", np.memmap(path, np.float64, "r", offset, raw.shape, "F"), out)

    def test_parts_that_do_not_overlap(self, maps, path):
        raw = tokens()[2]
        path.write_bytes(raw.tobytes() * 3)
        value = np.memmap(path, np.float64, "r", raw.nbytes, raw.shape)
        for start in (0, 2 * raw.nbytes):
            accepted(value, np.memmap(path, np.float64, "r+", start, raw.shape))
        # Heads between heads, of two maps of the whole file.
        first, second = (
            np.memmap(path, np.float64, mode, 0, (2, LENGTH, 3, DIM)) for mode in ("r", "r+")
        )
        accepted(first[:, :, 0], second[:, :, 2])
        refused("value", first[:, :, 0], second[:, :, 0])
        refused("value", first[:, :, 0, ::-1], second[:, :, 0])

    def test_a_file_that_was_replaced(self, path):
        if not os.path.exists(_storage.FILE_MAPS):
            pytest.skip("this system does not list the files that a process has mapped")
        value = np.load(path, mmap_mode="r")
        np.save(path.with_name("w.npy"), tokens()[2])
        os.replace(path.with_name("w.npy"), path)
        accepted(value, np.load(path, mmap_mode="r+"))

    def test_maps_that_numpy_did_not_make(self, path):
        if not os.path.exists(_storage.FILE_MAPS):
            pytest.skip("this system does not list the files that a process has mapped")
        raw = tokens()[2]
        path.write_bytes(raw.tobytes())
        with path.open("r+b") as file:
            first, second = (mmap.mmap(file.fileno(), 0) for _ in range(2))
        value, out = (np.frombuffer(m, np.float64).reshape(raw.shape) for m in (first, second))
        refused("value", value, out)
        refused("value", np.memmap(path, np.float64, "r", 0, raw.shape), out)

    @pytest.mark.parametrize("name", ["key_mask", "key_bias", "log_decay"])
    def test_weights_of_keys(self, maps, path, name):
        numbers = np.load(path, mmap_mode="r")[:, :, 0]
        if name == "key_mask":
            numbers = np.load(path, mmap_mode="r").view(bool)[:, :, 0]
        refused(name, numbers, np.load(path, mmap_mode="r+"), is_causal=True)

    def test_initial_state(self, maps):
        q, k, v = tokens(2)
        out = np.zeros((2, LENGTH, 4 + 8 * 5))
        before = linattn.update_state(
            linattn.init_state(PHI, DIM, batch_shape=(2,), like=k), k, v, PHI
        )
        kvz = out.reshape(2, -1)[:, : 8 * 5].reshape(2, 8, 5)
        kvz[:] = before.kvz
        with pytest.raises(ValueError, match="out must not overlap initial_state"):
            attend(q, k, v, out[..., :4], PHI, initial_state=before._replace(kvz=kvz))


class TestArrays:
    def test_views_of_one_array(self):
        whole = np.random.default_rng(0).standard_normal((2, LENGTH, 2 * DIM))
        refused("value", whole[..., :DIM], whole[..., 2 : DIM + 2])
        refused("key", whole[..., :DIM][:, ::-1], whole[..., :DIM])
        accepted(whole[..., :DIM], whole[..., DIM:])

    def test_broadcast(self):
        whole = np.zeros((2, LENGTH, DIM))
        refused("value", np.broadcast_to(whole[0], whole.shape), whole)

    def test_another_library(self, xp):
        """Arrays that one library has lent to another, or views of one."""
        numbers = np.array(tokens()[2])
        value = xp.array(numbers)
        if xp.name in ("jax", "numpy") or not hasattr(value, "__setitem__"):
            pytest.skip(f"{xp.name}: arrays cannot be written to")
        q, k, _ = (xp.array(a) for a in tokens(2))
        for name, arrays in {"value": (q, k, value[...]), "key": (q, value[...], k)}.items():
            with pytest.raises(ValueError, match=f"out must not overlap {name}"):
                attend(*arrays, value, PHI)
        np.testing.assert_array_equal(xp.numpy(value), numbers)

    @pytest.mark.frameworks
    def test_lent_by_numpy(self, tmp_path):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        numbers = np.array(tokens()[2])
        np.save(tmp_path / "v.npy", numbers)
        maps = [np.load(tmp_path / "v.npy", mmap_mode="r+") for _ in range(2)]
        out = torch.from_numpy(maps[0])
        q, k = (torch.from_numpy(a) for a in tokens(2)[:2])
        lent = torch.from_numpy(maps[1])
        for value in (lent, lent.view(out.shape), lent.detach().requires_grad_()):
            for where in (out, maps[0]):
                with pytest.raises(ValueError, match="out must not overlap value"):
                    attend(q, k, value, where, PHI)
        whole = torch.zeros(2, LENGTH, 2 * DIM, dtype=torch.float64)
        attend(q, k, whole[..., :DIM], whole[..., DIM:], PHI)

    @pytest.mark.frameworks
    def test_lent_to_jax(self):
        jax = pytest.importorskip("jax", reason="jax is not installed")
        size = 2 * LENGTH * DIM * 4
        room = np.zeros(size + 64, np.uint8)
        start = -room.ctypes.data % 64  # JAX copies what is not aligned.
        numbers = room[start : start + size].view(np.float32).reshape(2, LENGTH, DIM)
        lent = jax.dlpack.from_dlpack(numbers)
        if lent.unsafe_buffer_pointer() != numbers.ctypes.data:
            pytest.skip("jax: this version copied the array")
        q, k, _ = (jax.numpy.asarray(a, np.float32) for a in tokens(2))
        with pytest.raises(ValueError, match="out must not overlap value"):
            attend(q, k, lent, numbers, PHI)


class TestZarr:
    @pytest.fixture
    def zarr(self):
        return pytest.importorskip("zarr", reason="zarr is not installed")

    def _folder(self, zarr, path, **options):
        value = tokens()[2]
        made = zarr.create_array(
            path, shape=value.shape, chunks=(1, 16, DIM), dtype=value.dtype, **options
        )
        made[:] = value

    @pytest.mark.parametrize("mode", MODES)
    def test_opened_twice(self, zarr, tmp_path, mode):
        self._folder(zarr, tmp_path / "v.zarr")
        value, out = (zarr.open_array(tmp_path / "v.zarr", mode=m) for m in ("r", "r+"))
        for name in ("query", "key", "value"):
            refused(name, value, out, np.array, **MODES[mode])

    @pytest.mark.parametrize("zarr_format", [2, 3])
    def test_a_folder_in_other_words(self, zarr, tmp_path, monkeypatch, zarr_format):
        path = tmp_path / "v.zarr"
        self._folder(zarr, path, zarr_format=zarr_format)
        os.symlink(path, tmp_path / "w.zarr")
        os.symlink(tmp_path, tmp_path / "here")
        monkeypatch.chdir(tmp_path)
        value = zarr.open_array(path, mode="r")
        for other in (
            str(path),
            "v.zarr",
            "./w.zarr",
            "here/v.zarr",
            zarr.storage.LocalStore(path),
            zarr.storage.LocalStore("v.zarr"),
            zarr.storage.LoggingStore(zarr.storage.LocalStore("v.zarr"), log_level="CRITICAL"),
            f"file://{path}",
        ):
            refused("value", value, zarr.open_array(other, mode="r+"), np.array)
        group = zarr.open_group(tmp_path, mode="a", zarr_format=zarr_format)
        refused("value", value, group["v.zarr"], np.array)

    def test_a_file_of_its_chunks(self, zarr, tmp_path):
        self._folder(zarr, tmp_path / "v.zarr", compressors=None)
        chunk = next(file for file in (tmp_path / "v.zarr" / "c").rglob("*") if file.is_file())
        value = np.broadcast_to(np.memmap(chunk, np.float64, "r")[:DIM], (2, LENGTH, DIM))
        refused("value", value, zarr.open_array(tmp_path / "v.zarr", mode="r+"), np.array)

    def test_arrays_of_one_group(self, zarr, tmp_path):
        memory: dict[str, Any] = {}
        stores = {
            "folder": lambda: str(tmp_path / "g.zarr"),
            "memory": lambda: zarr.storage.MemoryStore(memory),
        }
        for store in stores.values():
            group = zarr.open_group(store(), mode="w")
            for name in ("value", "output"):
                group.create_array(name, data=tokens()[2], chunks=(1, 16, DIM))
            again = zarr.open_group(store(), mode="r+")
            refused("value", group["value"], again["value"], np.array)
            accepted(group["value"], again["output"], np.array)

    def test_zip(self, zarr, tmp_path):
        with zarr.storage.ZipStore(tmp_path / "v.zip", mode="w") as store:
            self._folder(zarr, store)
        stores = [zarr.storage.ZipStore(tmp_path / "v.zip", mode=mode) for mode in ("r", "a")]
        value, out = (
            zarr.open_array(store, mode=mode)
            for store, mode in zip(stores, ("r", "r+"), strict=True)
        )
        refused("value", value, out, np.array)
        for store in stores:
            store.close()

    def test_fsspec(self, zarr):
        pytest.importorskip("fsspec", reason="fsspec is not installed")
        self._folder(zarr, "memory://v.zarr")
        value, out = (zarr.open_array("memory://v.zarr", mode=mode) for mode in ("r", "r+"))
        refused("value", value, out, np.array)

    def test_dask_arrays_of_it(self, zarr, tmp_path):
        da = pytest.importorskip("dask.array", reason="dask is not installed")
        self._folder(zarr, tmp_path / "v.zarr")
        out = zarr.open_array(tmp_path / "v.zarr", mode="r+")
        value = da.from_zarr(str(tmp_path / "v.zarr"))
        others = [da.from_array(a, (1, 16, DIM)) for a in tokens(2)[:2]]

        def refused_with_others(value, out):
            with pytest.raises(ValueError, match="out must not overlap value"):
                attend(*others, value, out, PHI)

        for each in (value, value + 1, (value * 2).rechunk((1, 10, DIM))[:, ::-1]):
            refused_with_others(each, out)


class TestHdf5:
    @pytest.fixture
    def h5py(self):
        return pytest.importorskip("h5py", reason="h5py is not installed")

    @pytest.mark.parametrize("chunks", [None, (1, 16, DIM)], ids=["contiguous", "chunked"])
    def test_one_dataset(self, h5py, tmp_path, chunks):
        value = tokens()[2]
        with h5py.File(tmp_path / "v.h5", "w") as file:
            for name in ("value", "output"):
                file.create_dataset(name, data=value, chunks=chunks)
            file["again"] = file["value"]
            file["soft"] = h5py.SoftLink("/value")
            layout = h5py.VirtualLayout(value.shape, value.dtype)
            layout[:] = h5py.VirtualSource(file["value"])
            file.create_virtual_dataset("virtual", layout)
        os.symlink(tmp_path / "v.h5", tmp_path / "w.h5")
        with h5py.File(tmp_path / "v.h5", "r+") as file, h5py.File(tmp_path / "w.h5", "r+") as two:
            for name in ("value", "again", "soft", "virtual"):
                refused("value", two[name], file["value"], np.array)
            refused("value", two["value"].astype("f8"), file["value"], np.array)
            accepted(two["value"], file["output"], np.array)
            accepted(two["virtual"], file["output"], np.array)

    def test_virtual_and_external_files(self, h5py, tmp_path):
        value = tokens()[2]
        with h5py.File(tmp_path / "v.h5", "w") as file:
            file["value"] = value
        layout = h5py.VirtualLayout(value.shape, value.dtype)
        layout[:] = h5py.VirtualSource("v.h5", "value", value.shape)
        with h5py.File(tmp_path / "w.h5", "w") as file:
            file.create_virtual_dataset("value", layout)
            file["link"] = h5py.ExternalLink("v.h5", "/value")
            raw = [(str(tmp_path / "raw"), 0, value.nbytes)]
            file.create_dataset("outside", value.shape, value.dtype, external=raw)[:] = value
        with h5py.File(tmp_path / "v.h5", "r+") as file, h5py.File(tmp_path / "w.h5", "r") as two:
            for name in ("value", "link"):
                refused("value", two[name], file["value"], np.array)
            out = np.memmap(tmp_path / "raw", value.dtype, "r+", 0, value.shape)
            refused("value", two["outside"], out)

    def test_a_map_of_its_file(self, h5py, tmp_path):
        value = tokens()[2]
        with h5py.File(tmp_path / "v.h5", "w") as file:
            offsets = []
            for name in ("value", "output"):
                file[name] = value
                offsets.append(file[name].id.get_offset())
        value, output = (
            np.memmap(tmp_path / "v.h5", np.float64, "r", offset, value.shape) for offset in offsets
        )
        with h5py.File(tmp_path / "v.h5", "r+") as file:
            refused("value", value, file["value"], np.array)
            refused("value", output, file["output"], np.array)
            accepted(value, file["output"], np.array)

    def test_files_in_memory(self, h5py):
        value = tokens()[2]
        with (
            h5py.File("v.h5", "w", driver="core", backing_store=False) as first,
            h5py.File("w.h5", "w", driver="core", backing_store=False) as second,
        ):
            for file in (first, second):
                file["value"] = value
            refused("value", first["value"], first["value"], np.array)
            accepted(first["value"], second["value"], np.array)


class TestCheckpoint:
    @pytest.mark.parametrize("name", ["query", "key", "value", "out", "key_bias"])
    def test_the_file_of_an_array(self, maps, tmp_path, name):
        arguments: dict[str, Any] = dict(zip(("query", "key", "value"), tokens(), strict=True))
        arguments |= {"out": np.zeros((2, LENGTH, DIM)), "key_bias": np.zeros(LENGTH)}
        np.save(tmp_path / "a.npy", arguments[name])
        before = (tmp_path / "a.npy").read_bytes()
        arguments[name] = np.load(tmp_path / "a.npy", mmap_mode="r+")
        for path in (tmp_path / "a.npy", os.fsencode(tmp_path / "a.npy")):
            with pytest.raises(ValueError, match=f"must be a file of its own.* which holds {name}"):
                attend(**arguments, feature_map=PHI, checkpoint=path)
        assert (tmp_path / "a.npy").read_bytes() == before
