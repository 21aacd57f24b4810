"""Where arrays are stored: an output must not overwrite rows that are still to be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, cast

import array_api_compat
import numpy as np

from linattn._files import Path, checked_path
from linattn.typing import State

FILE_MAPS = "/proc/self/maps"
"""Where Linux lists the files that are mapped into this process."""

MAX_WORK = 10_000
"""Steps in search of a number that two arrays have in common."""

MAX_BYTES = 2**60
"""What a file whose length is not told may have."""

ZARR_FILES = ("", "zarr.json", ".zarray", "c")
"""Files of a zarr array in a folder; a copy by hard links shares at least one of them."""


class Layout(NamedTuple):
    """Where the numbers of an array are, in memory or in a file."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    itemsize: int

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """An array there for NumPy to compare, which must not be read or printed."""
        return {
            "version": 3,
            "typestr": f"|V{self.itemsize}",
            "shape": self.shape,
            "strides": self.strides,
            # Not at address 0, which NumPy takes for none.
            "data": (self.start + 4096, True),
        }


class Part(NamedTuple):
    """A part of memory, of a file, or of a store."""

    storage: Hashable
    """Equal for two parts of one memory, file or store."""
    where: str
    """For messages; the real path of a file or folder."""
    layout: Layout | None = None
    """Which addresses or offsets; None: unknown, or all of it."""
    name: str | None = None
    """Name of a whole array within the file or store."""


class FileMap(NamedTuple):
    """Addresses in memory where bytes of a file are."""

    start: int
    stop: int
    offset: int
    storage: Hashable
    path: str


def check_storage(
    out: Any, arrays: dict[str, Any], initial_state: State | None, checkpoint: Path | None
) -> None:
    """Check that the output overlaps no input, and that the checkpoint is a file of its own.

    Raises
    ------
    ValueError
        They share memory, a file or a store. Nothing has been written.
    """
    given = [(name, array) for name, array in arrays.items() if hasattr(array, "shape")]
    if initial_state is not None:
        fields = (initial_state.kvz, initial_state.log_scale, initial_state.log_decay)
        given += [("initial_state", array) for array in fields if array is not None]
    maps = _file_maps([out, *(array for _, array in given)])
    found = [(name, list(_parts(array, maps))) for name, array in [("out", out), *given]]
    for (name, array), (_, parts) in zip(given, found[1:], strict=True):
        where = "one array" if out is array else _overlap(found[0][1], parts)
        if where:
            raise ValueError(
                f"out must not overlap {name}, got both in {where}: rows would be read after they "
                f"were overwritten; write to another array"
            )
    path = None if checkpoint is None else checked_path(checkpoint)
    if path is None or not os.path.exists(path):
        return
    for name, parts in found:
        if _overlap([_file(path)], parts):
            raise ValueError(
                f"checkpoint must be a file of its own, got {path}, which holds {name}; name "
                f"another"
            )


def _overlap(first: list[Part], second: list[Part]) -> str:
    """Say where two arrays share something; "" if they do not."""
    return next((a.where for a in first for b in second if _is_shared(a, b)), "")


def _is_shared(a: Part, b: Part) -> bool:
    if a.storage != b.storage:
        return _is_inside(a.where, b.where) or _is_inside(b.where, a.where)
    if a.name is not None and b.name is not None:
        return a.name == b.name
    if a.layout is None or b.layout is None:
        return True
    first, second = np.asarray(a.layout), np.asarray(b.layout)
    try:
        return np.shares_memory(first, second, max_work=cast("Any", MAX_WORK))
    except np.exceptions.TooHardError:
        return np.may_share_memory(first, second)


def _is_inside(path: str, folder: str) -> bool:
    """Whether a file belongs to an array in a folder."""
    return os.path.isabs(folder) and path.startswith(os.path.join(folder, ""))


def _parts(array: Any, maps: list[FileMap]) -> Iterator[Part]:
    """Yield the parts of memory and files that an array is made of, as far as can be told."""
    h5py = sys.modules.get("h5py")
    # What Dataset.astype returns reads that dataset.
    array = getattr(array, "_dset", array)
    if array_api_compat.is_dask_array(array):
        for source in _sources(dict(array.__dask_graph__())):
            yield from _parts(source, maps)
    elif hasattr(array, "store") and hasattr(array, "path"):
        yield from _zarr_parts(array)
    elif h5py is not None and isinstance(array, h5py.Dataset):
        yield from _hdf5_parts(array, maps)
    else:
        layout = _layout_of(array)
        if layout is not None and 0 not in layout.shape:
            yield _memory_part(layout, maps)


def _sources(task: Any) -> Iterator[Any]:
    """Yield the arrays in a graph of Dask."""
    if isinstance(task, dict):
        task = list(task.values())
    if isinstance(task, list | tuple | set):
        for each in task:
            yield from _sources(each)
    elif hasattr(task, "shape") and hasattr(task, "dtype"):
        yield task
    else:
        for name in ("args", "kwargs", "value", "dsk"):
            inside = getattr(task, name, None)
            if inside is not None and not callable(inside):
                yield from _sources(inside)


def _zarr_parts(array: Any) -> Iterator[Part]:
    store = array.store
    # Stores that log, cache or limit another one.
    while hasattr(store, "_store"):
        store = store._store
    root = getattr(store, "root", None) or getattr(store, "path", None)
    file_system = getattr(store, "fs", None)
    protocol = getattr(file_system, "protocol", "file")
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    if not names & {"file", "local"}:
        yield Part(("fsspec", *sorted(names)), str(store), name=f"{root}/{array.path}".strip("/"))
    elif root is not None and os.path.isfile(root):
        yield _file(os.fsdecode(root))._replace(name=array.path)
    elif root is not None and os.path.isdir(os.path.join(root, array.path)):
        folder = os.path.join(os.fsdecode(root), array.path)
        paths = [os.path.join(folder, name) for name in ZARR_FILES]
        where = os.path.realpath(folder)
        yield from (_file(path)._replace(where=where) for path in paths if os.path.exists(path))
    else:
        yield Part(("zarr", str(store)), str(store), name=array.path)


def _hdf5_parts(dataset: Any, maps: list[FileMap]) -> Iterator[Part]:
    info = sys.modules["h5py"].h5o.get_info(dataset.id)
    path = os.fsdecode(dataset.file.filename)
    # A file in memory has a name and is not there.
    part = _file(path) if os.path.isfile(path) else Part(("hdf5", info.fileno), path)
    offset = dataset.id.get_offset()
    layout = None if offset is None else Layout(offset, (dataset.id.get_storage_size(),), None, 1)
    yield part._replace(layout=layout, name=str(info.addr))
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if source.file_name == "." and source.dset_name in dataset.file:
            yield from _parts(dataset.file[source.dset_name], maps)
        yield from _beside(path, source.file_name)
    for name, start, size in dataset.external or ():
        for part in _beside(path, os.fsdecode(name)):
            yield part._replace(layout=Layout(start, (min(size, MAX_BYTES),), None, 1))


def _beside(path: str, name: str) -> Iterator[Part]:
    """Yield the files that a name in another file may mean."""
    for folder in {os.path.dirname(os.path.abspath(path)), os.getcwd()}:
        if os.path.isfile(os.path.join(folder, name)):
            yield _file(os.path.join(folder, name))


def _file(path: str) -> Part:
    """Return a whole file or folder."""
    status = os.stat(path)
    return Part(("file", status.st_dev, status.st_ino), os.path.realpath(path))


def _layout_of(array: Any) -> Layout | None:
    """Return the addresses of an array in memory, of a CPU or a GPU; None where there are none."""
    if array_api_compat.is_torch_array(array):
        size = array.element_size()
        strides = tuple(size * step for step in array.stride())
        return Layout(array.data_ptr(), tuple(array.shape), strides, size)
    if isinstance(array, np.ndarray):
        address: int = array.__array_interface__["data"][0]
        return Layout(address, array.shape, array.strides, array.itemsize)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        size = np.dtype(interface["typestr"]).itemsize
        return Layout(interface["data"][0], interface["shape"], interface.get("strides"), size)
    # JAX and others, whose arrays on the CPU are lent without a copy.
    with suppress(Exception):
        return _layout_of(np.from_dlpack(array))
    return None


def _memory_part(layout: Layout, maps: list[FileMap]) -> Part:
    """Return the part of memory, or of the file that is mapped there."""
    for file in maps:
        if file.start <= layout.start < file.stop:
            # Only of this one: a process maps hundreds of files, most of them libraries.
            file, offset = _identified(file), layout.start - file.start + file.offset
            return Part(file.storage, file.path, layout._replace(start=offset))
    return Part("memory", "memory", layout)


def _file_maps(arrays: list[Any]) -> list[FileMap]:
    """Return the mapped files; where the system does not list them, the files of NumPy's maps."""
    try:
        with open(FILE_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    except OSError:
        return [each for array in arrays if (each := _numpy_map(array)) is not None]
    found = []
    for addresses, _, offset, device, inode, *path in lines:
        if inode != "0":
            start, stop = (int(number, 16) for number in addresses.split("-"))
            storage = ("mapped", device, inode)
            found.append(FileMap(start, stop, int(offset, 16), storage, path[0] if path else ""))
    return found


def _identified(file: FileMap) -> FileMap:
    """Replace what a mapping calls its file by what a path leads to, if it does."""
    with suppress(OSError):
        part = _file(file.path)
        return file._replace(storage=part.storage, path=part.where)
    return file


def _numpy_map(array: Any) -> FileMap | None:
    """Return the map that an array is a view of, by the file name that NumPy keeps."""
    base = array
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    name = getattr(array, "filename", None)
    if name is None:
        return None
    start = array.__array_interface__["data"][0]
    return FileMap(
        start, start + max(1, prod(array.shape) * array.itemsize), array.offset, id(base), str(name)
    )
