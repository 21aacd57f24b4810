"""The inputs of a stream: arrays that are sliced by rows, checked by their shapes alone."""

from __future__ import annotations

import mmap
import os
from math import prod
from typing import Any, NamedTuple

import numpy as np

from linattn import _arrays, _checks
from linattn.functional import linear_attention
from linattn.state import update_state
from linattn.stream._checksums import Checksums, checksum
from linattn.typing import Array, FeatureMap, State


class Inputs(NamedTuple):
    """The arguments of a call; rows of them are read."""

    query: Any
    key: Any
    value: Any
    feature_map: FeatureMap
    weights: dict[str, Any]
    """Mask, bias and decay of keys, those that were given, by their names."""
    is_causal: bool
    exact_window: Any
    checksums: Checksums | None = None
    """Of the rows that are read and written; None where no checkpoint needs them."""

    @property
    def on_cluster(self) -> bool:
        """Whether other processes read and write the rows."""
        return False

    def rows(self, name: str, rows: slice) -> Array:
        """Read rows of query, key or value."""
        block = read(getattr(self, name)[..., rows, :])
        if self.checksums is not None:
            self.checksums.add(name, rows.start, block)
        return block

    def checksum(self, array: Any, rows: slice) -> int:
        """Return the current checksum of some rows."""
        return checksum(read(array[..., rows, :]))

    def weights_of(self, rows: slice) -> dict[str, Any]:
        """Mask, bias and decay of some keys."""
        length = self.key.shape[-2]
        return {
            name: read(weight[..., rows])
            if _is_by_token(name, weight, self.key, length)
            else weight
            for name, weight in self.weights.items()
        }

    def attention(self, queries: slice, keys: slice, state: State | None) -> tuple[Array, State]:
        """Attend with some queries to some keys and a state: rows, and the state after the keys."""
        options: Any = self.weights_of(keys)
        result: tuple[Array, State] = linear_attention(
            self.rows("query", queries),
            self.rows("key", keys),
            self.rows("value", keys),
            self.feature_map,
            is_causal=self.is_causal,
            exact_window=self.exact_window,
            initial_state=state,
            return_state=True,
            **options,
        )
        return result

    def attend(self, out: Any, rows: slice, queries: slice, keys: slice, state: State) -> State:
        """Attend with queries that are read, write some rows of them; the state after the keys."""
        block, after = self.attention(queries, keys, state)
        inside = slice(rows.start - queries.start, rows.stop - queries.start)
        write_rows(out, rows, block[..., inside, :])
        if self.checksums is not None:
            # As it is stored: a codec may round.
            self.checksums.add("out", rows.start, read(out[..., rows, :]))
        return after

    def add(self, state: State, rows: slice) -> State:
        """Add keys and values to a state."""
        key, value, weights = (
            self.rows("key", rows),
            self.rows("value", rows),
            self.weights_of(rows),
        )
        after: State = update_state(state, key, value, self.feature_map, **weights)
        return after


def _is_by_token(name: str, weight: Any, key: Any, length: int) -> bool:
    """Whether a mask, bias or decay has an axis of tokens that is not one for all."""
    shape = tuple(getattr(weight, "shape", ()))
    if name == "log_decay" and len(shape) != len(key.shape) - 1:
        return False
    return bool(shape) and shape[-1] == length


def read(rows: Any) -> Array:
    """Return rows as an array of its library, without copying a memory map."""
    return np.asarray(rows) if isinstance(rows, np.ndarray) else rows


def write_rows(out: Any, rows: slice, block: Array) -> None:
    """Write rows of the output, in whatever holds it."""
    out[..., rows, :] = block if type(out) is type(block) else _arrays.to_numpy(block)


def dtype_name(dtype: Any) -> str:
    """Name of a dtype, whatever its byte order and library."""
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


def check_inputs(inputs: Inputs, initial_state: State | None) -> tuple[State, tuple[int, ...]]:
    """Check a call by its shapes and rows of no length: state before it, shape of its output."""
    names = ("query", "key", "value")
    for name in names:
        _check_sliceable(name, getattr(inputs, name))
    window = inputs.exact_window
    if window is not None:
        window = _checks.check_positive_int("exact_window", window)
    query, key, value = (getattr(inputs, name) for name in names)
    remedy = "each query sees the keys up to its own position"
    _checks.check_pairing(query, key, value, is_causal=inputs.is_causal, remedy=remedy)
    if window is not None and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"under exact_window query and key must have equal length, got {query.shape[-2]} and "
            f"{key.shape[-2]}"
        )
    if "log_decay" in inputs.weights and not inputs.is_causal:
        raise ValueError(
            "log_decay must be None unless is_causal: in full attention it acts in both "
            "directions, which takes all rows at once; use linear_attention"
        )
    none = slice(0, 0)
    _check_weights(inputs)
    output, state = inputs.attention(none, none, initial_state)
    return state, (*output.shape[:-2], query.shape[-2], value.shape[-1])


def _check_sliceable(name: str, array: Any) -> None:
    if not all(hasattr(array, attribute) for attribute in ("shape", "dtype", "__getitem__")):
        raise TypeError(
            f"{name} must have a shape, a dtype and rows to slice, as numpy.memmap and arrays of "
            f"zarr and h5py have, got {type(array).__name__}"
        )
    if len(array.shape) < 2:
        raise ValueError(
            f"{name} must have at least 2 axes (..., length, dim), got shape {tuple(array.shape)}"
        )


def _check_weights(inputs: Inputs) -> None:
    """Check lengths of masks and biases, which rows of no length do not tell."""
    *lead, length = wanted = tuple(inputs.key.shape[:-1])
    for name, weight in inputs.weights.items():
        shape = tuple(getattr(weight, "shape", ()))
        if not shape or (name == "log_decay" and len(shape) != len(wanted)):
            continue
        if shape[-1] not in (1, length):
            raise ValueError(
                f"{name} must have a last axis of {length}, the length of key, or 1, got shape "
                f"{shape}"
            )
        axes = shape[:-1] or (1,) * len(lead)
        if len(axes) != len(lead) or any(a not in (1, b) for a, b in zip(axes, lead, strict=True)):
            raise ValueError(
                f"{name} must have shape ({length},), or {wanted} with axes of 1, got {shape}"
            )


def prepare_output(out: Any, shape: tuple[int, ...], inputs: Inputs, block_size: int) -> int:
    """Check the output, reserve its space on disk, and return the block size that suits it."""
    _check_sliceable("out", out)
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    wanted = dtype_name(inputs.query.dtype)
    if dtype_name(out.dtype) != wanted:
        raise ValueError(f"out must have the dtype of query, {wanted}, got {out.dtype}")
    read_only = isinstance(out, np.ndarray) and not out.flags.writeable
    if read_only or not hasattr(out, "__setitem__"):
        raise ValueError("out must be writable, got a read-only one; open it with mode 'r+'")
    _reserve(out)
    # Another block must never touch a chunk again that holds finished rows.
    chunks = getattr(out, "shards", None) or getattr(out, "chunks", None)
    rows = chunks[-2] if isinstance(chunks, tuple) and isinstance(chunks[-2], int) else 1
    return -(-block_size // rows) * rows


def _mapping(array: Any) -> mmap.mmap | None:
    """Return the file mapping that a memory map or a view of one is of."""
    base = array.base if isinstance(array, np.memmap) else None
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _reserve(out: Any) -> None:
    """Have the disk hold all of a memory map: where it is full a write would end the process."""
    name = out.filename if isinstance(out, np.memmap) else None
    if name is None or not hasattr(os, "posix_fallocate"):
        return
    size = os.path.getsize(name)
    file = os.open(name, os.O_RDWR)
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        reason = f"{error.strerror}, {size} bytes are needed"
        raise OSError(error.errno, reason, os.fspath(name)) from None
    finally:
        os.close(file)


def release_pages(*arrays: Any) -> None:
    """Give back the pages of memory maps, which the system goes on caching as it likes."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    for array in arrays:
        mapping = _mapping(array)
        # A private map has changes of its own, which would be lost.
        if mapping is not None and array.mode != "c" and prod(array.shape):
            mapping.madvise(mmap.MADV_DONTNEED)
