"""Blocks of rows on a Dask cluster: a local one, or one that is running."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn._extras import remedy
from linattn.cli.errors import CommandError
from linattn.cli.text import reason
from linattn.stream._checksums import Record, checksum
from linattn.stream._inputs import Inputs
from linattn.typing import State

__all__ = ["BLOCKS_AT_ONCE", "ClusterInputs", "connected"]

BLOCKS_AT_ONCE = 32
"""Blocks in one graph, between which the state comes back: the same on any number of workers."""

PATIENCE = "10s"
"""How long a scheduler may take to answer."""


@dataclass(frozen=True)
class FileMap:
    """A memory map as tasks take it along: by name, opened where rows are read or written."""

    name: str
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    order: str

    def _open(self, mode: Any) -> Any:
        order: Any = self.order
        return np.memmap(self.name, self.dtype, mode, self.offset, self.shape, order)

    def __getitem__(self, index: Any) -> Any:
        """Read rows."""
        return np.array(self._open("r")[index])

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Write rows."""
        self._open("r+")[index] = rows


def _portable(array: Any) -> Any:
    if not isinstance(array, np.memmap):
        return array
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return FileMap(str(array.filename), array.dtype, array.offset, array.shape, order)


@dataclass(frozen=True)
class Rows:
    """Some rows of an array, as tasks take them along."""

    array: Any
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """Read some of the rows."""
        *lead, rows, dims = index
        return self.array[(*lead, slice(rows.start + self.start, rows.stop + self.start), dims)]


class ClusterInputs(Inputs):
    """The arguments of a call, whose blocks are attended to by tasks of Dask."""

    @property
    def on_cluster(self) -> bool:
        """Other processes read and write the rows."""
        return True

    def attend(self, out: Any, rows: slice, queries: slice, keys: slice, state: State) -> State:
        """Attend with queries that are read, write them; the state after the keys."""
        da = importlib.import_module("dask.array")
        size = _rows_of_task(rows, out)
        weights: Any = self._lazy_weights(keys, size)
        block, after = linattn.linear_attention(
            _lazy(self.query, queries, size),
            _lazy(self.key, keys, size),
            _lazy(self.value, keys, size),
            self.feature_map,
            is_causal=self.is_causal,
            initial_state=_lazy_state(state),
            return_state=True,
            **weights,
        )
        region = (*(slice(0, n) for n in block.shape[:-2]), rows, slice(0, block.shape[-1]))
        stored = da.store(block, _portable(out), regions=region, lock=False, compute=False)
        computed = _computed(after, stored)
        self._record(query=(self.query, queries), key=(self.key, keys), value=(self.value, keys))
        self._record(out=(out, rows))
        return computed

    def add(self, state: State, rows: slice) -> State:
        """Add keys and values to a state."""
        size = _rows_of_task(rows, None)
        key, value = _lazy(self.key, rows, size), _lazy(self.value, rows, size)
        weights: Any = self._lazy_weights(rows, size)
        after = linattn.update_state(_lazy_state(state), key, value, self.feature_map, **weights)
        computed = _computed(after)
        self._record(key=(self.key, rows), value=(self.value, rows))
        return computed

    def finite(self, name: str, rows: slice) -> Any:
        """Return which rows are finite, (..., rows)."""
        lazy = _lazy(getattr(self, name), rows, _rows_of_task(rows, None))
        return np.isfinite(lazy).all(axis=-1).compute()

    def checksum(self, array: Any, rows: slice) -> int:
        """Return the checksum of some rows; each task reads a part."""
        lazy = _lazy(array, rows, _rows_of_task(rows, None))
        sums = lazy.map_blocks(
            _chunk_sum,
            dtype=np.int64,
            chunks=tuple((1,) * count for count in lazy.numblocks),
            meta=np.empty((0,) * lazy.ndim, np.int64),
        )
        return checksum(np.asarray(sums))

    def _record(self, **read: tuple[Any, slice]) -> None:
        for name, (array, rows) in read.items():
            if self.checksums is not None and rows.start < rows.stop:
                crc = self.checksum(array, rows)
                self.checksums.append(Record(name, rows.start, rows.stop, crc))

    def _lazy_weights(self, rows: slice, size: int) -> dict[str, Any]:
        da = importlib.import_module("dask.array")
        return {
            name: da.from_array(np.array(weight), chunks=(*weight.shape[:-1], size))
            for name, weight in self.weights_of(rows).items()
        }


def _lazy(array: Any, rows: slice, size: int) -> Any:
    """Make a Dask array of some rows, one task for `size` rows of each head."""
    da = importlib.import_module("dask.array")
    array = _portable(array)
    shape = (*array.shape[:-2], rows.stop - rows.start, array.shape[-1])
    chunks = (*(1 for _ in shape[:-2]), size, shape[-1])
    meta = np.empty((0,) * len(shape), array.dtype)
    part = Rows(array, rows.start, shape, array.dtype)
    return da.from_array(part, chunks=chunks, name=False, meta=meta)


def _chunk_sum(chunk: NDArray[Any]) -> NDArray[Any]:
    return np.full((1,) * chunk.ndim, checksum(chunk), np.int64)


def _rows_of_task(rows: slice, out: Any) -> int:
    """Rows of a task: no two of them write to one chunk of the output."""
    chunks = getattr(out, "chunks", None)
    unit = int(chunks[-2]) if isinstance(chunks, tuple) else 1
    blocks: int = -(-(rows.stop - rows.start) // (BLOCKS_AT_ONCE * unit))
    return max(1, blocks * unit)


def _lazy_state(state: State) -> State:
    da = importlib.import_module("dask.array")
    arrays = {name: getattr(state, name) for name in ("kvz", "log_scale", "log_decay")}
    lazy: dict[str, Any] = {
        name: None if array is None else da.from_array(np.asarray(array), chunks=-1)
        for name, array in arrays.items()
    }
    return state._replace(**lazy)


def _computed(after: State, *along: Any) -> State:
    """Compute a state and what else its graph is for, on the workers."""
    dask = importlib.import_module("dask")
    try:
        kvz, log_scale, decay, *_ = dask.compute(
            after.kvz, after.log_scale, after.log_decay, *along
        )
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what a cluster raises is no class of one kind
        raise OSError(f"the cluster failed: {type(error).__name__}: {reason(error)}") from None
    return after._replace(kvz=kvz, log_scale=log_scale, log_decay=decay)


@contextmanager
def connected(workers: int | None, scheduler: str | None) -> Iterator[None]:
    """Run the tasks inside on a scheduler, or on a number of workers started for it.

    Raises
    ------
    CommandError
        Dask is not installed, no scheduler answers, or it has no worker.
    """
    try:
        distributed = importlib.import_module("distributed")
    except ImportError:
        raise CommandError(
            f"--workers and --scheduler need dask.distributed: {remedy('dask')}"
        ) from None
    # What goes wrong is said in one line.
    for name in ("distributed", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    cluster = None
    try:
        if scheduler is None:
            cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                # Any port: another cluster may have the usual one.
                dashboard_address=":0",
                silence_logs=logging.CRITICAL,
            )
        client = distributed.Client(scheduler or cluster, timeout=PATIENCE)
    except (OSError, ValueError, RuntimeError) as error:
        if cluster is not None:
            cluster.close()
        what = f"--workers {workers}: they do not start"
        if scheduler is not None:
            what = f"--scheduler {scheduler}: no scheduler answers there"
        raise CommandError(f"{what}: {reason(error)}") from None
    try:
        if not client.scheduler_info()["workers"]:
            raise CommandError(f"--scheduler {scheduler}: it has no workers")
        yield
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
