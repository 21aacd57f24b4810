"""Save states to npz files and load them: no pickle, and checks before any allocation."""

from __future__ import annotations

import warnings
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn._driver.problem import check_feature_map
from linattn._driver.stamps import check_map_of_state
from linattn._files import Arrays, Format, Path, StateFileError, checked_path
from linattn._fingerprints import known_integer, short_fingerprint
from linattn.typing import Array, FeatureMap, State

__all__ = ["StateFileError", "load_state", "save_state"]

SHORT = "#"
"""What stands before the fingerprint of a state whose map was not given."""


STATE_FORMAT = Format(
    "state",
    1,
    {
        "fingerprint": ("U", 0),
        "kvz": ("f", None),
        "log_scale": ("f", None),
        "length": ("i", 0),
    },
    {"log_decay": ("f", None), "num_sequences": ("i", 0)},
)


def _fingerprint(feature_map: Any) -> str:
    check_feature_map(feature_map)
    if not hasattr(feature_map, "fingerprint"):
        raise TypeError(
            f"feature_map must have a method fingerprint() for its states to be recognized, which "
            f"{type(feature_map).__name__} has not; pass feature_map=None to do without"
        )
    return str(feature_map.fingerprint())


@_arrays.on_array_device
def save_state(path: Path, state: State, feature_map: FeatureMap | None = None) -> None:
    """Save a state to a file.

    Parameters
    ----------
    path : str, bytes or path-like
        Where to write; no ending is added to the name. An existing file is replaced in one step
        and keeps its permissions: an interruption leaves the old file or the new one.
    state : State
        Of any library and device.
    feature_map : FeatureMap, optional
        The map of the state. Its fingerprint is saved, and :func:`load_state` checks it. Without a
        map the 31-bit fingerprint of the state is saved. The map itself is not saved: make it again
        with the same arguments and the same integer as ``rng``, or pickle it.

    Raises
    ------
    TypeError
        Not a state, or a map without ``fingerprint()``.
    ValueError
        The state of another map, or a map whose fingerprint cannot be made.
    OSError
        The file cannot be written, or the path names a folder, a symbolic link or a device.

    Warns
    -----
    UserWarning
        The map was made with ``rng=None`` and cannot be made again. The warning comes first, so
        that nothing is written if it is raised as an error.

    Notes
    -----
    The file is an uncompressed npz archive of ``m (e + 2)`` numbers a head, in the state's dtype.
    It is made in memory first, which takes as much memory again.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> state = linattn.init_state(phi, 64, like=np.ones(64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     linattn.save_state(Path(folder) / "state.npz", state, phi)
    ...     loaded = linattn.load_state(Path(folder) / "state.npz", phi)
    >>> bool(np.array_equal(loaded.kvz, state.kvz))
    True
    """
    if not isinstance(state, State):
        raise TypeError(f"state must be a linattn.State, got {type(state).__name__}")
    if feature_map is not None:
        fingerprint = _fingerprint(feature_map)
        check_map_of_state("state", state, feature_map)
        _warn_of_lost_map(feature_map)
    else:
        known = known_integer(state.fingerprint)
        fingerprint = "" if known is None else f"{SHORT}{known}"
    arrays = {
        "fingerprint": np.str_(fingerprint),
        "kvz": _arrays.to_numpy(state.kvz),
        "log_scale": _arrays.to_numpy(state.log_scale),
        "length": np.int64(int(state.length)),
    }
    if state.log_decay is not None:
        arrays["log_decay"] = _arrays.to_numpy(state.log_decay)
    number = known_integer(state.num_sequences)
    if number is not None:
        arrays["num_sequences"] = np.int64(number)
    STATE_FORMAT.write(path, arrays)


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
        The map that the state must belong to. None does not check here. The state still carries
        its fingerprint, so that reading it with another map raises an error.
    like : array, optional
        Gives the library and device of the state. Default NumPy.

    Returns
    -------
    State
        In the dtype in which it was saved.

    Raises
    ------
    StateFileError
        The file is no saved state, is damaged, has a newer format, or belongs to another map.
    OSError
        The file cannot be read.

    Notes
    -----
    Nothing is unpickled, and no header can make it read or allocate more than the file holds.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> state = linattn.init_state(phi, 64, like=np.ones(64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     linattn.save_state(Path(folder) / "state.npz", state, phi)
    ...     loaded = linattn.load_state(Path(folder) / "state.npz", phi)
    >>> loaded.kvz.shape
    (64, 65)
    """
    path = checked_path(path)
    wanted = None if feature_map is None else _fingerprint(feature_map)
    saved, state = STATE_FORMAT.read(path, _build_state)
    _check_fingerprint(saved, wanted, path)
    if like is None:
        return state
    xp, _ = _checks.check_arrays(1, like=like)
    device = array_api_compat.device(like)
    arrays = {
        name: xp.asarray(array, device=device)
        for name in ("kvz", "log_scale", "log_decay")
        if (array := getattr(state, name)) is not None
    }
    return state._replace(**arrays)


def _warn_of_lost_map(feature_map: Any) -> None:
    """Warn if a map, or a map inside it, was made with ``rng=None``."""
    while feature_map is not None:
        if getattr(feature_map, "_unseeded", False):
            message = (
                f"{feature_map!r} was made with rng=None and cannot be made again: without it the "
                f"state is of no use. Make it with an integer as rng, or pickle it too"
            )
            warnings.warn(message, stacklevel=_arrays.caller_level())
            return
        feature_map = getattr(feature_map, "feature_map", None)


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
        raise ValueError(
            f"kvz and log_scale do not fit: {kvz.dtype} {kvz.shape} and {log_scale.dtype} "
            f"{log_scale.shape}"
        )
    decay = arrays.get("log_decay")
    if decay is not None and (decay.shape != kvz.shape[:-2] or decay.dtype != kvz.dtype):
        raise ValueError(
            f"kvz and log_decay do not fit: {kvz.shape} and {decay.dtype} {decay.shape}"
        )
    length = int(arrays["length"])
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    number = None if "num_sequences" not in arrays else int(arrays["num_sequences"])
    if number and (kvz.ndim < 3 or kvz.shape[0] != number):
        raise ValueError(f"kvz and num_sequences do not fit: {kvz.shape} and {number}")
    saved = str(arrays["fingerprint"])
    return saved, State(kvz, log_scale, length, _short(saved), decay, number)


def _short(saved: str) -> int | None:
    """Return the fingerprint of a state from what its file says."""
    if not saved.startswith(SHORT):
        return short_fingerprint(saved) if saved else None
    number = saved.removeprefix(SHORT)
    if not (number.isascii() and number.isdecimal() and len(number) <= 10 and int(number) < 2**31):
        raise ValueError(
            f"fingerprint must be {SHORT} and an integer of 31 bits, got {saved[:20]!r}"
        )
    return int(number)
