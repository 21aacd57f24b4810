"""States on disk: one npz file, never pickle, checked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _atomic, _checks
from linattn._driver.problem import check_feature_map, check_map_of_state, short_fingerprint
from linattn.typing import Array, FeatureMap, State

if TYPE_CHECKING:
    from zipfile import ZipFile

__all__ = ["StateFileError", "load_state", "save_state"]

Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Arrays: TypeAlias = dict[str, NDArray[Any]]

T = TypeVar("T")

SHORT = "#"
"""What stands before the fingerprint of a state whose map was not given."""


class StateFileError(ValueError):
    """A file is not a state that linattn saved, or is the state of another feature map."""


class Format(NamedTuple):
    """A kind of file: an uncompressed npz archive of exactly these arrays and of the version."""

    kind: str
    """For messages."""
    version: int
    members: Mapping[str, tuple[str, int | None]]
    """Name of each array -> (dtype kind, number of axes or None)."""

    def write(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays to a file, which replaces an existing one in one step."""
        name = _checked_path(path)
        # In memory first: a disk that is full or an interrupt meets no half of an archive.
        archive = BytesIO()
        try:
            np.savez(archive, format_version=np.int64(self.version), **arrays)
        except ValueError as error:
            # Of an interrupt zipfile may say only that a member is still open.
            raise error.__context__ or error from None
        _atomic.write_bytes(name, archive.getvalue())

    def read(self, path: Path, build: Callable[[Arrays], T]) -> T:
        """Read a file of :meth:`write` that need not be trusted, and make something of it.

        Whatever the parsers and ``build`` raise becomes a :class:`StateFileError`.
        """
        import zipfile  # here and not at the top, for an import that costs little

        path = _checked_path(path)
        with open(path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    members = {"format_version": ("i", 0), **self.members}
                    arrays = _read_members(archive, os.path.getsize(path), members)
                found = int(arrays["format_version"])
                if found != self.version:
                    message = f"it has format version {found}, this linattn reads {self.version}"
                    raise ValueError(message)
                return build(arrays)
            # A hostile file makes the parsers below raise nearly anything.
            except Exception as error:
                message = f"{path} is not a linattn {self.kind} file: {error}"
                raise StateFileError(message) from error


STATE_FORMAT = Format(
    "state",
    1,
    {
        "fingerprint": ("U", 0),
        "kvz": ("f", None),
        "log_scale": ("f", None),
        "length": ("i", 0),
    },
)


def _fingerprint(feature_map: Any) -> str:
    check_feature_map(feature_map)
    if not hasattr(feature_map, "fingerprint"):
        message = (
            f"feature_map must have a method fingerprint() for its states to be recognized, which "
            f"{type(feature_map).__name__} has not; pass feature_map=None to do without"
        )
        raise TypeError(message)
    return str(feature_map.fingerprint())


@_arrays.on_array_device
def save_state(path: Path, state: State, feature_map: FeatureMap | None = None) -> None:
    """Save a state to a file.

    Parameters
    ----------
    path : str, bytes or path-like
        Where to; the name is used as it is. An existing file is replaced in one step, so that
        an interruption leaves the old file or the new one, and keeps its permissions.
    state : State
        Of any library and device.
    feature_map : FeatureMap, optional
        The map of the state; its fingerprint is saved, and :func:`load_state` checks it. Without
        it the 31 bits are that the state carries. The map itself is not saved: make it again with
        the same arguments and the same integer as ``rng``, or pickle it. One drawn with
        ``rng=None`` cannot be drawn again.

    Raises
    ------
    TypeError
        Not a state, or a map without ``fingerprint()``.
    ValueError
        The state of another map, or a map whose fingerprint cannot be made.
    OSError
        The file cannot be written, or the path is that of something else than a regular file: a
        folder, a symbolic link, a device.

    Notes
    -----
    An uncompressed npz file of ``m (e + 2)`` numbers a head, in the state's dtype. It is made in
    memory first, which takes as much again.
    """
    if not isinstance(state, State):
        message = f"state must be a linattn.State, got {type(state).__name__}"
        raise TypeError(message)
    if feature_map is not None:
        fingerprint = _fingerprint(feature_map)
        check_map_of_state("state", state, feature_map)
    else:
        known = _checks.known_fingerprint(state)
        fingerprint = "" if known is None else f"{SHORT}{known}"
    arrays = {
        "fingerprint": np.str_(fingerprint),
        "kvz": _arrays.to_numpy(state.kvz),
        "log_scale": _arrays.to_numpy(state.log_scale),
        "length": np.int64(int(state.length)),
    }
    STATE_FORMAT.write(path, arrays)


def _checked_path(path: Path) -> str:
    # A number would be taken for an open file.
    try:
        return os.fsdecode(path)
    except TypeError:
        message = f"path must be a str, bytes or path-like object, got {type(path).__name__}"
        raise TypeError(message) from None


@_arrays.on_array_device
def load_state(
    path: Path,
    feature_map: FeatureMap | None = None,
    like: Array | None = None,
) -> State:
    """Load a state saved by :func:`save_state`.

    Parameters
    ----------
    path : str, bytes or path-like
        The file; it need not be trusted.
    feature_map : FeatureMap, optional
        The map that the state must belong to. None does not check; the state then still carries
        the fingerprint, and is not read with another map.
    like : array, optional
        Gives the library and device of the state. Default NumPy.

    Returns
    -------
    State
        In the dtype in which it was saved.

    Raises
    ------
    StateFileError
        Not such a file, damaged, of a newer format, or the state of another feature map.
    OSError
        The file cannot be read.

    Notes
    -----
    Nothing is unpickled, and no more is read than the file holds.
    """
    path = _checked_path(path)
    wanted = None if feature_map is None else _fingerprint(feature_map)
    saved, state = STATE_FORMAT.read(path, _build_state)
    _check_fingerprint(saved, wanted, path)
    if like is None:
        return state
    xp, _ = _checks.check_arrays(1, like=like)
    device = array_api_compat.device(like)
    kvz, log_scale = (xp.asarray(a, device=device) for a in (state.kvz, state.log_scale))
    return State(kvz, log_scale, state.length, state.fingerprint)


def _check_fingerprint(saved: str, wanted: str | None, path: Any) -> None:
    if wanted is None or saved in (wanted, f"{SHORT}{short_fingerprint(wanted)}"):
        return
    if not saved:
        message = (
            f"{path} was saved without its feature map and cannot be checked; pass "
            f"feature_map=None to load it unchecked"
        )
    else:
        message = (
            f"{path} holds the state of another feature map than the one given; make the map with "
            f"the same arguments and the same integer as rng"
        )
    raise StateFileError(message)


def _build_state(arrays: Arrays) -> tuple[str, State]:
    kvz, log_scale = arrays["kvz"], arrays["log_scale"]
    fits = kvz.ndim >= 2 and kvz.shape[-2] >= 1 and kvz.shape[-1] >= 2
    if not fits or log_scale.shape != kvz.shape[:-1] or log_scale.dtype != kvz.dtype:
        message = (
            f"kvz and log_scale do not fit: {kvz.dtype} {kvz.shape} and {log_scale.dtype} "
            f"{log_scale.shape}"
        )
        raise ValueError(message)
    length = int(arrays["length"])
    if length < 0:
        message = f"length must not be negative, got {length}"
        raise ValueError(message)
    saved = str(arrays["fingerprint"])
    return saved, State(kvz, log_scale, length, _short(saved))


def _short(saved: str) -> int | None:
    """Return the fingerprint of a state from what its file says."""
    if not saved.startswith(SHORT):
        return short_fingerprint(saved) if saved else None
    number = saved.removeprefix(SHORT)
    if not (number.isascii() and number.isdecimal() and len(number) <= 10 and int(number) < 2**31):
        message = f"fingerprint must be {SHORT} and an integer of 31 bits, got {saved[:20]!r}"
        raise ValueError(message)
    return int(number)


def _read_members(
    archive: ZipFile, size: int, members: Mapping[str, tuple[str, int | None]]
) -> Arrays:
    """Read the arrays of an npz file of this size, all of it uncompressed."""
    infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if set(infos) != set(members) or len(archive.infolist()) != len(members):
        message = f"it must hold the arrays {sorted(members)}, got {sorted(infos)[:9]}"
        raise ValueError(message)
    stored = all(info.compress_type == 0 for info in infos.values())
    if not stored or sum(info.file_size for info in infos.values()) > size:
        message = f"its arrays claim more than the {size} bytes of the file"
        raise ValueError(message)
    return {name: _parse(name, archive.read(info), *members[name]) for name, info in infos.items()}


def _parse(name: str, data: bytes, kind: str, ndim: int | None) -> NDArray[Any]:
    """Parse one npy member without trusting its header."""
    stream = BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        message = f"{name} has an unknown npy version"
        raise ValueError(message)
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
        message = f"{name} has dtype {dtype} and shape {shape} in {len(body)} bytes"
        raise ValueError(message)
    array = np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=True)
