"""Checkpoints of a run: state and position in one file, replaced as a whole."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any
from warnings import warn

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _dispatch, _settings
from linattn._files import Arrays, Format, Path, StateFileError, checked_path
from linattn._fingerprints import map_fingerprint
from linattn.stream._checksums import Checksums, Record, checksum
from linattn.stream._inputs import Inputs, dtype_name, read
from linattn.stream._walks import Place, Walk
from linattn.typing import State

CHECKPOINT_FORMAT = Format(
    "checkpoint",
    3,
    {
        "call": ("U", 0),
        "numerics": ("U", 0),
        "checksums": ("i", 2),
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
    remedy="name another file, or remove it to begin anew",
)

NAMES = ("query", "key", "value", "out")
"""What checksums are of, by the first number of a row of the array of that name."""


class Checkpoint:
    """The file of one run, which goes on from it only with the same call."""

    def __init__(self, path: Path, walk: Walk, block_size: int, checksums: Checksums) -> None:
        self.path = checked_path(path)
        self.call = _describe(walk.inputs, block_size, walk.begin)
        self.numerics = _numerics(walk.begin)
        self.walk = walk
        self.checksums = checksums

    def load_or_begin(self, place: Place) -> Place:
        """Return the place of an earlier run; without one save this place, before any work."""
        if not os.path.lexists(self.path):
            self.save(place)
            return place
        call = CHECKPOINT_FORMAT.read(self.path, _call)
        differ = [name for name, text in self.call.items() if call.get(name) != text]
        if differ:
            raise StateFileError(
                f"{self.path} is the checkpoint of another call, which differs in "
                f"{', '.join(differ)}; remove it to begin anew"
            )
        numerics, records, place = CHECKPOINT_FORMAT.read(self.path, self._build)
        for record in records:
            self._check(record)
            self.checksums.append(record)
        if numerics != self.numerics:
            message = (
                f"the run was begun with {numerics} and goes on with {self.numerics}: last bits "
                f"may differ from those of an undisturbed run"
            )
            warn(message, UserWarning, stacklevel=_arrays.caller_level())
        return place

    def _check(self, record: Record) -> None:
        """Read again what a record is about."""
        inputs, rows = self.walk.inputs, slice(record.start, record.stop)
        if inputs.checksum(self._array(record.name), rows) == record.crc:
            return
        where = f"in rows {record.start} to {record.stop}"
        message = (
            f"{record.name} has changed {where} since {self.path} was saved; restore it, or "
            f"remove the checkpoint to begin anew"
        )
        if record.name == "out":
            message = (
                f"out does not hold the rows that were written before {self.path}, {where}; open "
                f"it as it was left (mode 'r+'), or remove the checkpoint to begin anew"
            )
        raise StateFileError(message)

    def save(self, place: Place) -> None:
        """Save a place, after the rows that were written before it."""
        flush = getattr(self.walk.out, "flush", None)
        if callable(flush) and place.step:
            flush()
        state = place.state
        arrays = {
            "call": np.str_(json.dumps(self.call)),
            "numerics": np.str_(self.numerics),
            "checksums": np.array(
                [
                    (NAMES.index(name), *numbers)
                    for name, *numbers in self.checksums.records[: place.num_records]
                ],
                dtype=np.int64,
            ).reshape(-1, 4),
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

    def _build(self, arrays: Arrays) -> tuple[str, list[Record], Place]:
        """Check that the file holds a place of this walk, and return it."""
        step, walk = int(arrays["step"]), self.walk
        if not 0 <= step <= len(walk.rows):
            raise ValueError(f"step must be 0 to {len(walk.rows)}, got {step}")
        fields = (arrays.get(name) for name in ("kvz", "log_scale", "length", "log_decay"))
        state = self._state(walk.first(step), *fields)
        later = [arrays.get(n) for n in ("later_kvz", "later_log_scale", "later_length")]
        counts = [0 if array is None else len(array) for array in later]
        if counts != [walk.num_later(step)] * 3:
            raise ValueError(
                f"it must hold {walk.num_later(step)} states of later keys, got {counts}"
            )
        given = [array for array in later if array is not None]
        states = tuple(self._state(walk.nothing, *each) for each in zip(*given, strict=True))
        records = self._records(arrays["checksums"])
        place = Place(step, state, states, len(records))
        written = [(r.start, r.stop) for r in records if r.name == "out"]
        ends = [0, *(stop for _, stop in written)]
        if [start for start, _ in written] != ends[:-1] or ends[-1] != walk.num_written(place):
            raise ValueError(
                f"checksums must be of the {walk.num_written(place)} rows that were written"
            )
        return str(arrays["numerics"]), records, place

    def _state(
        self, begin: State, kvz: Any, log_scale: Any, length: Any, log_decay: Any = None
    ) -> State:
        """Return a state that goes on from another."""
        found = (kvz, log_scale, log_decay)
        for array, wanted in zip(found, (begin.kvz, begin.log_scale, begin.log_decay), strict=True):
            brief = [None if each is None else _brief(each) for each in (array, wanted)]
            if brief[0] != brief[1]:
                raise ValueError(f"its state must have {brief[1]}, got {brief[0]}")
        least = int(begin.length)
        most = least + self.walk.inputs.key.shape[-2]
        if not least <= length <= most:
            raise ValueError(f"length must be {least} to {most}, got {length}")
        xp, device = _arrays.namespace(begin.kvz), array_api_compat.device(begin.kvz)
        numbers = [None if a is None else xp.asarray(a, device=device) for a in found]
        kvz, log_scale, log_decay = numbers
        return begin._replace(kvz=kvz, log_scale=log_scale, length=int(length), log_decay=log_decay)

    def _records(self, rows: NDArray[Any]) -> list[Record]:
        records = []
        for number, start, stop, crc in rows.tolist():
            name = dict(enumerate(NAMES)).get(number)
            length = 0 if name is None else self._array(name).shape[-2]
            if name is None or not (0 <= start < stop <= length and 0 <= crc < 2**32):
                raise ValueError(
                    f"checksums must be of rows of an array, got {(number, start, stop, crc)}"
                )
            records.append(Record(name, start, stop, crc))
        return records

    def _array(self, name: str) -> Any:
        return self.walk.out if name == "out" else getattr(self.walk.inputs, name)


def _call(arrays: Arrays) -> dict[str, Any]:
    call = json.loads(str(arrays["call"]))
    if not isinstance(call, dict):
        raise TypeError(f"call must be a JSON object, got {type(call).__name__}")
    return call


def _describe(inputs: Inputs, block_size: int, begin: State) -> dict[str, Any]:
    """Return the description that two calls must share for one to resume the other."""
    state = (begin.kvz, begin.log_scale, begin.log_decay)
    return {
        **{name: _brief(getattr(inputs, name)) for name in ("query", "key", "value")},
        "feature_map": map_fingerprint(inputs.feature_map),
        "weights of keys": {
            name: _weight(weight, block_size) for name, weight in sorted(inputs.weights.items())
        },
        "is_causal": inputs.is_causal,
        "exact_window": None if inputs.exact_window is None else int(inputs.exact_window),
        "block_size": block_size,
        "cluster": inputs.on_cluster,
        "initial_state": [
            int(begin.length),
            *(None if array is None else checksum(array) for array in state),
        ],
    }


def _brief(array: Any) -> str:
    return f"{dtype_name(array.dtype)} {tuple(array.shape)}"


def _weight(weight: Any, block_size: int) -> str:
    """Describe all numbers of a mask, bias or decay: far fewer than the numbers of the keys."""
    shape = getattr(weight, "shape", ())
    if not shape:
        return repr(float(weight))
    starts = range(0, shape[-1], block_size)
    sums = [checksum(read(weight[..., n : min(n + block_size, shape[-1])])) for n in starts]
    return f"{_brief(weight)} {checksum(np.array(sums))}"


def _numerics(begin: State) -> str:
    """Say what last bits depend on beside the call."""
    xp = _arrays.namespace(begin.kvz)
    threads = _settings.current_settings().num_threads or os.environ.get("OMP_NUM_THREADS")
    status = _dispatch.find("kernel_status", xp)
    kernels = "" if status is None else f", {status().partition(' (')[0]}"
    return f"{threads or os.cpu_count()} threads{kernels}"
