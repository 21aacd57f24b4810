"""Checkpoints of a run: state and position in one file, replaced as a whole."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any
from warnings import warn
from zlib import crc32

import array_api_compat
import numpy as np

from linattn import _arrays, _dispatch, _settings
from linattn._driver.problem import map_fingerprint
from linattn._files import Arrays, Format, Path, StateFileError, checked_path
from linattn.stream._inputs import Inputs, dtype_name, read
from linattn.stream._walks import Place
from linattn.typing import State

__all__ = ["Checkpoint"]

CHECKPOINT_FORMAT = Format(
    "checkpoint",
    1,
    {
        "call": ("U", 0),
        "numerics": ("U", 0),
        "step": ("i", 0),
        "kvz": ("f", None),
        "log_scale": ("f", None),
        "length": ("i", 0),
    },
    {
        "log_decay": ("f", None),
        "later_kvz": ("f", None),
        "later_log_scale": ("f", None),
        "later_length": ("i", 1),
    },
)


class Checkpoint:
    """The file of one run, which goes on from it only with the same call."""

    def __init__(self, path: Path, inputs: Inputs, block_size: int, begin: State, out: Any) -> None:
        self.path = checked_path(path)
        self.call = _describe(inputs, block_size, begin)
        self.numerics = _numerics(begin)
        self.begin, self.out = begin, out

    def load_or_begin(self, place: Place) -> Place:
        """Return the place of an earlier run; without one save this place, before any work."""
        if not os.path.lexists(self.path):
            self.save(place)
            return place
        call, numerics, found = CHECKPOINT_FORMAT.read(self.path, self._build)
        differ = [name for name, text in self.call.items() if call.get(name) != text]
        if differ:
            message = (
                f"{self.path} is the checkpoint of another call, which differs in "
                f"{', '.join(differ)}; remove it to begin anew"
            )
            raise StateFileError(message)
        if numerics != self.numerics:
            message = (
                f"the run was begun with {numerics} and goes on with {self.numerics}: last bits "
                f"may differ from those of an undisturbed run"
            )
            warn(message, UserWarning, stacklevel=5)
        return found

    def save(self, place: Place) -> None:
        """Save a place, after the rows that were written before it."""
        flush = getattr(self.out, "flush", None)
        if callable(flush) and place.step:
            flush()
        state = place.state
        arrays = {
            "call": np.str_(json.dumps(self.call)),
            "numerics": np.str_(self.numerics),
            "step": np.int64(place.step),
            "kvz": _arrays.to_numpy(state.kvz),
            "log_scale": _arrays.to_numpy(state.log_scale),
            "length": np.int64(int(state.length)),
        }
        if state.log_decay is not None:
            arrays["log_decay"] = _arrays.to_numpy(state.log_decay)
        if place.later:
            kvz = [_arrays.to_numpy(later.kvz) for later in place.later]
            log_scale = [_arrays.to_numpy(later.log_scale) for later in place.later]
            arrays["later_kvz"], arrays["later_log_scale"] = np.stack(kvz), np.stack(log_scale)
            arrays["later_length"] = np.array([int(later.length) for later in place.later])
        CHECKPOINT_FORMAT.write(self.path, arrays)

    def save_if_possible(self, place: Place) -> None:
        """Save a place on the way out of an error: if that fails, the last checkpoint holds."""
        with suppress(OSError):
            self.save(place)

    def remove(self) -> None:
        """Remove the file: the run is done."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _build(self, arrays: Arrays) -> tuple[dict[str, Any], str, Place]:
        begin = self.begin
        xp, device = _arrays.namespace(begin.kvz), array_api_compat.device(begin.kvz)

        def state(kvz: Any, log_scale: Any, length: Any, log_decay: Any = None) -> State:
            fits = kvz.shape == tuple(begin.kvz.shape) and log_scale.shape == kvz.shape[:-1]
            if not fits or str(kvz.dtype) != dtype_name(begin.kvz.dtype):
                message = f"its state has {kvz.dtype} {kvz.shape}, wanted {begin!r}"
                raise ValueError(message)
            numbers = [
                None if array is None else xp.asarray(array, device=device)
                for array in (kvz, log_scale, log_decay)
            ]
            return State(numbers[0], numbers[1], int(length), begin.fingerprint, numbers[2])

        here = (arrays["kvz"], arrays["log_scale"], arrays["length"], arrays.get("log_decay"))
        later = []
        if "later_kvz" in arrays:
            names = ("later_kvz", "later_log_scale", "later_length")
            later = [state(*each) for each in zip(*(arrays[n] for n in names), strict=True)]
        place = Place(int(arrays["step"]), state(*here), tuple(later))
        return json.loads(str(arrays["call"])), str(arrays["numerics"]), place


def _describe(inputs: Inputs, block_size: int, begin: State) -> dict[str, Any]:
    """Return what two calls must share for one to go on where the other stopped."""
    weights = {name: _brief(weight) for name, weight in sorted(inputs.weights.items())}
    arrays = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    return {
        **{name: _brief(array) + _ends(array) for name, array in arrays.items()},
        "feature_map": map_fingerprint(inputs.feature_map),
        "weights of keys": weights,
        "is_causal": inputs.is_causal,
        "exact_window": None if inputs.exact_window is None else int(inputs.exact_window),
        "block_size": block_size,
        "initial_state": [int(begin.length), crc32(_arrays.to_numpy(begin.kvz).tobytes())],
    }


def _brief(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return repr(array) if shape is None else f"{dtype_name(array.dtype)} {tuple(shape)}"


def _ends(array: Any) -> str:
    """Sum of the first and the last row: mostly enough to tell other numbers of one shape."""
    last = max(0, array.shape[-2] - 1)
    rows = [_arrays.to_numpy(read(array[..., start : start + 1, :])) for start in (0, last)]
    return f" {crc32(b''.join(row.tobytes() for row in rows))}"


def _numerics(begin: State) -> str:
    """Say what last bits depend on beside the call."""
    xp = _arrays.namespace(begin.kvz)
    threads = _settings.current_settings().num_threads or os.environ.get("OMP_NUM_THREADS")
    status = _dispatch.find("kernel_status", xp)
    kernels = "" if status is None else f", {status().partition(' (')[0]}"
    return f"{threads or os.cpu_count()} threads{kernels}"
