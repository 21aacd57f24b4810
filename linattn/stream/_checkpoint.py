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
from linattn._driver.stamps import map_fingerprint
from linattn._files import Arrays, Format, Path, StateFileError, checked_path
from linattn.stream._inputs import Inputs, dtype_name, read
from linattn.stream._walks import Place, Walk
from linattn.typing import State

__all__ = ["Checkpoint"]

CHECKPOINT_FORMAT = Format(
    "checkpoint",
    2,
    {
        "call": ("U", 0),
        "numerics": ("U", 0),
        "output": ("U", 0),
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

    def __init__(self, path: Path, walk: Walk, block_size: int) -> None:
        self.path = checked_path(path)
        self.call = _describe(walk.inputs, block_size, walk.begin)
        self.numerics = _numerics(walk.begin)
        self.walk = walk

    def load_or_begin(self, place: Place) -> Place:
        """Return the place of an earlier run; without one save this place, before any work."""
        if not os.path.lexists(self.path):
            self.save(place)
            return place
        call, numerics, output, found = CHECKPOINT_FORMAT.read(self.path, self._build)
        differ = [name for name, text in self.call.items() if call.get(name) != text]
        if differ:
            message = (
                f"{self.path} is the checkpoint of another call, which differs in "
                f"{', '.join(differ)}; remove it to begin anew"
            )
            raise StateFileError(message)
        if output != self._output(found):
            message = (
                f"out does not hold the rows that were written before {self.path}; open it as it "
                f"was left (mode 'r+'), or remove the checkpoint to begin anew"
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
        flush = getattr(self.walk.out, "flush", None)
        if callable(flush) and place.step:
            flush()
        state = place.state
        arrays = {
            "call": np.str_(json.dumps(self.call)),
            "numerics": np.str_(self.numerics),
            "output": np.str_(self._output(place)),
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

    def _output(self, place: Place) -> str:
        """Sum of the first and the last finished row."""
        return _ends(self.walk.out, self.walk.num_written(place))

    def _build(self, arrays: Arrays) -> tuple[dict[str, Any], str, str, Place]:
        begin = self.walk.begin
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
            kvz, log_scale, log_decay = numbers
            return begin._replace(
                kvz=kvz, log_scale=log_scale, length=int(length), log_decay=log_decay
            )

        here = (arrays["kvz"], arrays["log_scale"], arrays["length"], arrays.get("log_decay"))
        later = []
        if "later_kvz" in arrays:
            names = ("later_kvz", "later_log_scale", "later_length")
            later = [state(*each) for each in zip(*(arrays[n] for n in names), strict=True)]
        place = Place(int(arrays["step"]), state(*here), tuple(later))
        call = json.loads(str(arrays["call"]))
        return call, str(arrays["numerics"]), str(arrays["output"]), place


def _describe(inputs: Inputs, block_size: int, begin: State) -> dict[str, Any]:
    """Return what two calls must share for one to go on where the other stopped."""
    weights = {name: _weight(weight, block_size) for name, weight in sorted(inputs.weights.items())}
    arrays = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    return {
        **{name: f"{_brief(a)} {_ends(a, a.shape[-2])}" for name, a in arrays.items()},
        "feature_map": map_fingerprint(inputs.feature_map),
        "weights of keys": weights,
        "is_causal": inputs.is_causal,
        "exact_window": None if inputs.exact_window is None else int(inputs.exact_window),
        "block_size": block_size,
        "initial_state": [
            int(begin.length),
            *(
                None if a is None else _sum(a)
                for a in (begin.kvz, begin.log_scale, begin.log_decay)
            ),
        ],
    }


def _brief(array: Any) -> str:
    return f"{dtype_name(array.dtype)} {tuple(array.shape)}"


def _weight(weight: Any, block_size: int) -> str:
    """Describe all numbers of a mask, bias or decay, which are few beside those of keys."""
    shape = getattr(weight, "shape", ())
    if not shape:
        return repr(float(weight))
    total = 0
    for start in range(0, shape[-1], block_size):
        total = _sum(weight[..., start : min(start + block_size, shape[-1])], total)
    return f"{_brief(weight)} {total}"


def _ends(array: Any, length: int) -> str:
    """Sum of the first and the last row: mostly enough to tell other numbers of one shape."""
    total = 0
    for start in (0, max(0, length - 1)):
        total = _sum(array[..., start : min(start + 1, length), :], total)
    return str(total)


def _sum(array: Any, before: int = 0) -> int:
    return crc32(_arrays.to_numpy(read(array)).tobytes(), before)


def _numerics(begin: State) -> str:
    """Say what last bits depend on beside the call."""
    xp = _arrays.namespace(begin.kvz)
    threads = _settings.current_settings().num_threads or os.environ.get("OMP_NUM_THREADS")
    status = _dispatch.find("kernel_status", xp)
    kernels = "" if status is None else f", {status().partition(' (')[0]}"
    return f"{threads or os.cpu_count()} threads{kernels}"
