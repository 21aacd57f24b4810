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

__all__ = ["NAMES", "OUTPUT", "Output", "open_array", "open_inputs"]

NAMES = ("query", "key", "value")

OUTPUT = "output"
"""Name of the array in a zarr store that is written."""

CHUNK_ROWS = 16384
"""Rows of a chunk that is written, where the query has no chunks."""


def open_inputs(paths: Sequence[Path]) -> list[Any]:
    """Open query, key and value: three .npy files, or one .npz file or zarr store with all.

    Raises
    ------
    CommandError
        They cannot be opened, or are something else.
    """
    if len(paths) == len(NAMES):
        return [open_array(path) for path in paths]
    path = paths[0]
    if len(paths) != 1 or path.suffix not in (".npz", ".zarr"):
        raise CommandError(
            f"want three .npy files, or one .npz file or .zarr store with {', '.join(NAMES)}, got "
            f"{' '.join(map(str, paths))}"
        )
    if path.suffix == ".npz":
        return [_named(path, partial(_member, path, name)) for name in NAMES]
    group = _named(path, lambda: _zarr().open_group(path, mode="r"))
    missing = [name for name in NAMES if name not in group]
    if missing:
        found = ", ".join(sorted(group.array_keys())) or "nothing"
        raise CommandError(f"{path}: missing: {', '.join(missing)}; found: {found}")
    return [group[name] for name in NAMES]


def open_array(path: Path, mode: Any = "r") -> Any:
    """Map the array of an .npy file.

    Raises
    ------
    CommandError
        It cannot be mapped.
    """
    if path.suffix != ".npy":
        raise CommandError(f"{path}: want an .npy file (numpy.save)")
    return _named(path, lambda: np.load(path, mmap_mode=mode, allow_pickle=False))


def _named(path: Path, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        raise CommandError(f"{path}: cannot be opened: {error.strerror or error}") from None
    except CommandError:
        raise
    except Exception as error:  # damaged files make the parsers raise nearly anything
        raise CommandError(f"{path}: cut off, damaged or something else: {reason(error)}") from None


def _member(path: Path, name: str) -> Any:
    """Map an array of an uncompressed .npz file where it lies."""
    with path.open("rb") as file:
        with zipfile.ZipFile(file) as archive:
            found = {Path(info.filename).stem: info for info in archive.infolist()}
        info = found.get(name)
        if info is None:
            raise CommandError(f"{path}: missing: {name}; found: {', '.join(found) or 'nothing'}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CommandError(
                f"{path}: {name} is compressed, and cannot be read in parts; save it with "
                f"numpy.savez or numpy.save"
            )
        # The local header: 30 bytes, of which the last four are lengths of what follows it.
        file.seek(info.header_offset + 26)
        lengths = np.frombuffer(file.read(4), "<u2")
        file.seek(int(lengths.sum()), os.SEEK_CUR)
        return _map_member(path, file)


def _map_member(path: Path, file: BinaryIO) -> Any:
    version = np.lib.format.read_magic(file)
    read: Any = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    order: Any = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)


def _zarr() -> Any:
    try:
        return importlib.import_module("zarr")
    except ImportError:
        raise CommandError(f"a .zarr store needs zarr: {remedy('dask')}") from None


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
        return OUTPUT in _named(self.path, lambda: _zarr().open_group(self.path, mode="r"))

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
        group = _zarr().open_group(self.path, mode="a" if self.begins else "r+")
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
                del _zarr().open_group(self.path, mode="r+")[OUTPUT]
            else:
                self.path.unlink()
