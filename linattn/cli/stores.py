"""Arrays on disk as the command takes them: .npy, .npz and zarr, opened and not read."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from linattn._extras import remedy
from linattn.cli.errors import CommandError
from linattn.cli.text import reason

__all__ = ["BIAS", "NAMES", "OUTPUT", "Output", "open_array", "open_inputs"]

NAMES = ("query", "key", "value")

BIAS = "key_bias"
"""An array that one file may hold beside them: log weights of keys."""

OUTPUT = "output"
"""Name of the array in a zarr store that is written."""

CHUNK_ROWS = 16384
"""Rows of a chunk that is written, where the query has no chunks."""

KINDS = {
    ".npy": (b"\x93NUMPY", "an .npy file of an array (numpy.save)"),
    ".npz": (b"PK", "an .npz file of NumPy arrays (numpy.savez)"),
    ".zarr": (b"", "a .zarr store of arrays (zarr.open_group)"),
}
"""How the files of a kind begin, and what they are."""

REMEDIES = {
    **dict.fromkeys((".csv", ".txt", ".tsv"), "numpy.loadtxt reads text"),
    **dict.fromkeys((".pt", ".pth", ".bin", ".safetensors"), "load it, and save x.numpy()"),
    **dict.fromkeys((".h5", ".hdf5"), "load it by h5py, and save dataset[...]"),
    **dict.fromkeys((".parquet", ".feather"), "load it by pandas, and save frame.to_numpy()"),
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz"), "unpack it first"),
    **dict.fromkeys((".pkl", ".pickle"), "nothing is unpickled here; save the array itself"),
}
"""How to get from files of other kinds to one of these."""


def open_inputs(paths: Sequence[Path], *, whole: bool = False) -> dict[str, Any]:
    """Open query, key, value and key_bias: three .npy files, or one .npz file or zarr store.

    Members of an .npz file that are compressed are read if `whole`, and rejected otherwise. Only
    one file with all arrays can have a key_bias.

    Raises
    ------
    CommandError
        They cannot be opened, or are something else.
    """
    if len(paths) == len(NAMES):
        return dict(zip(NAMES, map(open_array, paths), strict=True))
    path = paths[0]
    if len(paths) != 1 or path.suffix not in (".npz", ".zarr"):
        raise CommandError(
            f"want three .npy files, or one .npz file or .zarr store with {', '.join(NAMES)}, got "
            f"{' '.join(map(str, paths))}{_remedy_of(path)}"
        )
    if path.suffix == ".npz":
        return dict(_named(path, partial(_members, path, whole)))
    group = _named(path, lambda: _group(path, "r"))
    wanted = _wanted(path, sorted(group.array_keys()))
    return {name: group[name] for name in wanted}


def open_array(path: Path, mode: Any = "r") -> Any:
    """Map the array of an .npy file.

    Raises
    ------
    CommandError
        It cannot be mapped.
    """
    if path.suffix != ".npy":
        raise CommandError(f"{path}: want an .npy file (numpy.save){_remedy_of(path)}")
    return _named(path, lambda: np.lib.format.open_memmap(path, mode))


def _remedy_of(path: Path) -> str:
    return f"; {REMEDIES[path.suffix]}" if path.suffix in REMEDIES else ""


def _wanted(path: Path, found: Sequence[str]) -> list[str]:
    """Return the names of the arrays to open, out of those that are there."""
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise CommandError(
            f"{path}: want arrays {', '.join(NAMES)}; missing: {', '.join(missing)}; found: "
            f"{', '.join(found) or 'nothing'}"
        )
    return [*NAMES, *({BIAS} & set(found))]


def _named(path: Path, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (CommandError, MemoryError):
        raise
    except Exception as error:  # damaged files make the parsers raise nearly anything
        if isinstance(error, OSError) and error.strerror:
            raise CommandError(f"{path}: cannot be opened: {error.strerror}") from None
        if not path.exists():
            raise CommandError(f"{path}: cannot be opened: No such file or directory") from None
        begin, kind = KINDS[path.suffix]
        found = "something else"
        if path.is_file():
            with path.open("rb") as file:
                is_kind = file.read(len(begin)) == begin
            found = "one that is cut off or damaged" if is_kind else found
        if "Python objects" in str(error):
            found = "Python objects, which are never unpickled"
        raise CommandError(f"{path}: want {kind}, got {found}") from None


def _members(path: Path, whole: bool) -> dict[str, Any]:
    """Map arrays of an .npz file where they lie, or read them if they are compressed."""
    with zipfile.ZipFile(path) as archive:
        infos = {Path(info.filename).stem: info for info in archive.infolist()}
        wanted = _wanted(path, list(infos))
        if whole:
            return {name: _read_member(path, name, archive, infos[name]) for name in wanted}
    with path.open("rb") as file:
        return {name: _map_member(path, file, infos[name]) for name in wanted}


def _read_member(path: Path, name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    try:
        with archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make zipfile and NumPy raise nearly anything
        is_object = "Object arrays" in str(error)
        why = "it holds Python objects, which are never unpickled" if is_object else reason(error)
        raise CommandError(f"{path}: {name} cannot be read: {why}") from None


def _map_member(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> Any:
    if info.compress_type != zipfile.ZIP_STORED:
        raise CommandError(
            f"{path}: {Path(info.filename).stem} is compressed, and cannot be read in parts; save "
            f"it with numpy.savez or numpy.save"
        )
    # The local header: 30 bytes, of which the last four are lengths of what follows it.
    file.seek(info.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    file.seek(int(lengths.sum()), os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    read: Any = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Python objects")
    order: Any = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)


def _group(path: Path, mode: str) -> Any:
    """Open a zarr store by its whole path: workers may run in other folders."""
    try:
        zarr = importlib.import_module("zarr")
    except ImportError:
        raise CommandError(f"a .zarr store needs zarr: {remedy('dask')}") from None
    return zarr.open_group(os.path.abspath(path), mode=mode)


class Output:
    """Where a run writes: an .npy file, or the array ``output`` of a zarr store."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".npy", ".zarr"):
            raise CommandError(f"--out {path}: want a name that ends in .npy or .zarr")
        self.path = path
        self.is_zarr = path.suffix == ".zarr"
        self.checkpoint = path.with_name(f"{path.name}.checkpoint")
        self.begins = False
        """Whether the array is made by this run."""

    def check(self, *, resume: bool) -> None:
        """Check that a run may begin here, or resume.

        Raises
        ------
        CommandError
            Something is in the way, or missing.
        """
        exists, saved = self._exists(), os.path.lexists(self.checkpoint)
        if saved and not resume:
            raise CommandError(
                f"{self.checkpoint} is there, of a run that broke off: --resume goes on with it"
            )
        if exists and not saved:
            raise CommandError(f"--out {self.path}: is there already; remove it, or name another")
        if saved and not exists:
            raise CommandError(
                f"{self.checkpoint} is there, but not {self.path}: remove it to begin anew"
            )
        self.begins = not exists

    def _exists(self) -> bool:
        if not self.is_zarr or not os.path.lexists(self.path):
            return os.path.lexists(self.path)
        return OUTPUT in _named(self.path, lambda: _group(self.path, "r"))

    def open(self, shape: tuple[int, ...], query: Any) -> Any:
        """Open the array, made now if this run begins.

        Raises
        ------
        CommandError
            It cannot be made or opened.
        """
        if self.is_zarr:
            return _named(self.path, lambda: self._zarr_array(shape, query))
        if not self.begins:
            return open_array(self.path, "r+")
        make = np.lib.format.open_memmap
        dtype = query.dtype.newbyteorder("=")
        return _named(self.path, lambda: make(self.path, mode="w+", dtype=dtype, shape=shape))

    def _zarr_array(self, shape: tuple[int, ...], query: Any) -> Any:
        group = _group(self.path, "a" if self.begins else "r+")
        if not self.begins:
            return group[OUTPUT]
        chunks = getattr(query, "chunks", None)
        rows = min(shape[-2], chunks[-2] if isinstance(chunks, tuple) else CHUNK_ROWS)
        whole = (1,) * (len(shape) - 2) + (max(1, rows), shape[-1])
        dtype = query.dtype.newbyteorder("=")
        return group.create_array(OUTPUT, shape=shape, chunks=whole, dtype=dtype)

    def discard(self) -> None:
        """Remove what was made for a run that did not begin."""
        with suppress(Exception):
            self.checkpoint.unlink(missing_ok=True)
            if self.is_zarr:
                del _group(self.path, "r+")[OUTPUT]
            else:
                self.path.unlink()
