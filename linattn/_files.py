"""Write files atomically, and read npz archives from untrusted sources."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from zipfile import ZipFile

Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Arrays: TypeAlias = dict[str, NDArray[Any]]

T = TypeVar("T")


class StateFileError(ValueError):
    """A file is not a state that linattn saved, or is the state of another feature map.

    Examples
    --------
    >>> import tempfile
    >>> import linattn
    >>> with tempfile.NamedTemporaryFile() as file:  # an empty one
    ...     try:
    ...         linattn.load_state(file.name, linattn.feature_maps.EluFeatures())
    ...     except linattn.files.StateFileError:
    ...         print("begin again")
    begin again
    """

    # Where callers import it from; tracebacks say so.
    __module__ = "linattn.files"


class Format(NamedTuple):
    """A kind of file: an uncompressed npz archive of exactly these arrays, with a version."""

    kind: str
    """The kind of file, for error messages."""
    version: int
    members: Mapping[str, tuple[str, int | None]]
    """Name of each array -> (dtype kind, number of axes or None)."""
    optional: Mapping[str, tuple[str, int | None]] = MappingProxyType({})
    """The same for arrays that may be missing."""
    remedy: str = "name another file, or save it again"
    """The end of error messages: what the user can do."""

    def write(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays to a file, which replaces an existing one in one step."""
        name = checked_path(path)
        # In memory first: a disk that is full or an interrupt meets no half of an archive.
        archive = BytesIO()
        try:
            np.savez(archive, format_version=np.int64(self.version), **arrays)
        except ValueError as error:
            # Of an interrupt zipfile may say only that a member is still open.
            raise error.__context__ or error from None
        write_bytes(name, archive.getvalue())

    def read(self, path: Path, build: Callable[[Arrays], T]) -> T:
        """Read an untrusted file of :meth:`write`, and return ``build(arrays)``.

        Every error of the parsers and of ``build`` becomes a :class:`StateFileError`.
        """
        import zipfile  # here and not at the top, for an import that costs little

        path = checked_path(path)
        with open(path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    found = {info.filename.removesuffix(".npy") for info in archive.infolist()}
                    optional = {n: kind for n, kind in self.optional.items() if n in found}
                    members = {"format_version": ("i", 0), **self.members, **optional}
                    arrays = _read_members(archive, os.path.getsize(path), members)
                version = int(arrays["format_version"])
                if version != self.version:
                    raise ValueError(
                        f"it has format version {version}, this linattn reads {self.version}"
                    )
                return build(arrays)
            # A hostile file makes the parsers below raise nearly anything.
            except Exception as error:
                raise StateFileError(
                    f"{path} is not a linattn {self.kind} file: {error}; {self.remedy}"
                ) from error


def checked_path(path: Path) -> str:
    """Return a path as text."""
    # A number would be taken for an open file.
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"path must be a str, bytes or path-like object, got {type(path).__name__}"
        ) from None


def check_target(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status of a regular file that would be replaced, or None if there is none.

    Raises
    ------
    FileExistsError
        The path is a folder, a symbolic link or a device. Its owner does not expect to see it
        replaced, and whoever made a link would choose where to write.
    OSError
        The status cannot be read.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise FileExistsError(errno.EEXIST, f"it is {kind}; name a regular file", os.fspath(path))
    return found


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, or replace a regular one in one step, keeping its permissions.

    After an interruption the old content or the new content is there, never a part. The temporary
    name is random and must be new, so that a file planted there is not followed.

    Raises
    ------
    OSError
        The target is no regular file, or cannot be written.
    """
    old = check_target(path)
    folder, base = os.path.split(os.fspath(path))
    # Not by tempfile, whose files nobody else may read: what is saved is for other processes.
    name = os.path.join(folder, f".{base}-{os.urandom(8).hex()}")
    # Closed to others until it has the permissions of the file that it replaces.
    mode = 0o666 if old is None else 0o600
    try:
        with open(name, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file:
            if old is not None:
                os.chmod(name, old.st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename == name:
            # The name that the caller gave.
            error.filename = os.fspath(path)
        raise


def _read_members(
    archive: ZipFile, size: int, members: Mapping[str, tuple[str, int | None]]
) -> Arrays:
    """Read the arrays of an uncompressed npz file of ``size`` bytes."""
    infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if set(infos) != set(members) or len(archive.infolist()) != len(members):
        raise ValueError(f"it must hold the arrays {sorted(members)}, got {sorted(infos)[:9]}")
    stored = all(info.compress_type == 0 for info in infos.values())
    if not stored or sum(info.file_size for info in infos.values()) > size:
        raise ValueError(f"its arrays claim more than the {size} bytes of the file")
    return {name: _parse(name, archive.read(info), *members[name]) for name, info in infos.items()}


def _parse(name: str, data: bytes, kind: str, ndim: int | None) -> NDArray[Any]:
    """Parse one npy member without trusting its header."""
    stream = BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{name} has an unknown npy version")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    body = data[stream.tell() :]
    count = 1
    for length in shape:
        count *= length
    if (
        dtype.kind != kind
        or dtype.hasobject
        or (kind == "f" and dtype.itemsize not in (4, 8))
        or (ndim is not None and len(shape) != ndim)
        or count * dtype.itemsize != len(body)
    ):
        raise ValueError(f"{name} has dtype {dtype} and shape {shape} in {len(body)} bytes")
    array = np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=True)
