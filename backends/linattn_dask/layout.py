"""From a problem of Dask arrays to calls of Dask's ``blockwise``: axes, chunks, checks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import normalize_token
from dask.graph_manipulation import clone

import linattn
from linattn.typing import (
    Array,
    ColumnNormalized,
    Corrected,
    Opaque,
    Problem,
    SeparateDenominator,
    State,
    Tokens,
)
from linattn_dask.blocks import Call, run

MIN_ROWS = 2500
"""Rows of a chunk below which the scheduler takes longer than the work."""

_warned: list[str] = []
"""What was warned of: once in a process."""

WRAPPERS = (ColumnNormalized, Corrected, SeparateDenominator)

Chunks = tuple[int, ...]
Axes = tuple[str, ...]

SPLIT_EVERY = 8
"""Blocks that a task of a tree merges."""


class Part(NamedTuple):
    """A Dask array and the names of its last axes; those before them are leading axes."""

    array: Array
    axes: Axes

    @property
    def names(self) -> Axes:
        """Names of all axes: leading ones are counted from the last, as they broadcast."""
        lead = self.array.ndim - len(self.axes)
        return (*(f"lead{i}" for i in range(lead, 0, -1)), *self.axes)

    @property
    def lead_chunks(self) -> tuple[Chunks, ...]:
        """Chunks of the leading axes."""
        return tuple(self.array.chunks[: self.array.ndim - len(self.axes)])


class CarriedMap:
    """A feature map as the only element of an array of no axes: for Dask the data of one task."""

    shape = ()
    ndim = 0
    dtype = np.dtype(object)

    def __init__(self, feature_map: Any) -> None:
        self.feature_map = feature_map

    def __getitem__(self, index: tuple[()]) -> CarriedMap:
        """Return itself: NumPy is not to take the map apart."""
        return self

    def __dask_tokenize__(self) -> Any:
        """Equal maps have one name."""
        return normalize_token(self.feature_map)


class Layout:
    """Arrays of a problem with their axes, checked; and the tasks that are made of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._parts = {
            "query": Part(problem.query, ("rows", "dim")),
            "key": Part(problem.key, ("keys", "dim")),
            "value": Part(problem.value, ("keys", "value")),
        }
        for name, part in self._parts.items():
            check_chunks(name, part.array)
        self.query_chunks: Chunks = problem.query.chunks[-2]
        self.key_chunks: Chunks = problem.key.chunks[-2]
        if self.key_chunks != problem.value.chunks[-2]:
            raise differing(("key", "value"), -2, self.key_chunks, problem.value.chunks[-2])
        for name in ("key_mask", "key_bias", "log_decay"):
            array = getattr(problem.weights, name)
            if array is not None:
                self._parts[name] = self._beside_keys(array)
        lead_of_map = () if problem.feature_map is None else map_lead(problem)
        keys = [self._parts["key"], self._parts["value"]]
        if problem.state is not None:
            known = keys if problem.key.shape[-2] else []
            lead = common_chunks([*known, self._parts["query"]], lead_of_map)
            self._parts |= state_parts(problem.state, lead)
            if not known:
                # Axes of no tokens have chunks that mean nothing.
                known = [self._parts["query"], self._parts["kvz"]]
                lead = common_chunks(known, lead_of_map)
                for name, part in self._parts.items():
                    if "keys" in part.axes:
                        chunks = matching_chunks(part, lead)
                        rows = part.array.chunks[-2]
                        self._parts[name] = Part(part.array.rechunk((*chunks, rows, -1)), part.axes)
                keys = [self._parts["key"], self._parts["value"]]
            keys.append(self._parts["kvz"])
        self.state_lead = common_chunks(keys, lead_of_map)
        self.lead = common_chunks([*keys, self._parts["query"]], lead_of_map)
        self.key_lead = common_chunks([self._parts["key"], self._parts["value"]], lead_of_map)
        if problem.weights.relative_bias is not None:
            table = Part(problem.weights.relative_bias.table, ("offsets",))
            chunks = matching_chunks(table, self.lead)
            self._parts["relative_bias"] = Part(table.array.rechunk((*chunks, -1)), table.axes)
        if problem.feature_map is not None:
            self._parts["feature_map"] = Part(_carried(problem.feature_map), ())
        _warn_of_short_chunks(self)

    @property
    def meta(self) -> Array:
        """Array of length 0 of the library of the chunks."""
        return self.problem.key._meta

    @property
    def window(self) -> int:
        """Length of the blocks of an exact window."""
        return self.problem.exact.window or 1

    def check_rows(self) -> None:
        """Check that queries are chunked as keys are, where rows must meet."""
        if self.query_chunks != self.key_chunks:
            raise differing(("key", "query"), -2, self.key_chunks, self.query_chunks)

    def part(self, name: str, axes: Axes | None = None) -> Part:
        """Return an array of the problem, with other names of its axes where they are given."""
        part = self._parts[name]
        return part if axes is None else Part(part.array, axes)

    def parts(self, *names: str) -> dict[str, Part]:
        """Return arrays of the problem, those that it has."""
        return {name: self._parts[name] for name in names if name in self._parts}

    def reading_again(self, what: str = "states") -> Layout:
        """Return the same problem with reads of its own: keys are not kept from pass to pass.

        ``what``: the purpose of the read; reads for one purpose are done once.
        """
        other, keys = copy(self), {n: p for n, p in self._parts.items() if "keys" in p.axes}
        other._parts = self._parts | read_again(keys, what)
        return other

    def without_rows(self, *names: str) -> dict[str, Part]:
        """Return arrays of keys that the problem has, without any key, in one block."""
        return {
            name: Part(_without_rows(part.array), part.axes) if "keys" in part.axes else part
            for name, part in self.parts(*names).items()
        }

    def starts(self, chunks: Chunks, axis: str) -> dict[str, Part]:
        """Positions at which blocks begin, for maps whose features depend on them."""
        if not depends_on_position(self.problem):
            return {}
        before = 0 if self.problem.state is None else self.problem.state.length
        if sum(chunks):
            # A map that has no features there says so now, not in a task.
            shape = (*(1,) * (self.problem.key.ndim - 1), self.problem.key.shape[-1])
            last_row = np.zeros(shape, dtype=np.float32)
            innermost(self.problem.key_spec).fn(Tokens(last_row, None, before + sum(chunks) - 1))
        starts = before + np.cumsum([0, *chunks[:-1]])
        return {"start": Part(da.from_array(starts, chunks=1), (axis,))}

    def blockwise(
        self,
        function: Callable[..., Array],
        axes: dict[str, Chunks],
        lead: Sequence[Chunks],
        parts: dict[str, Part],
        *,
        dtype: Any = None,
        want_log: bool = False,
        meta: Array | None = None,
        **options: Any,
    ) -> Array:
        """Make an array of a task for each block: ``axes`` are the last ones, with their chunks.

        ``meta``: given for results that are not arrays of the chunks' library.
        """
        problem = self.problem
        call = Call(
            tuple(parts),
            problem.value.shape[-1],
            problem.policy.num_threads,
            _precision(problem),
            problem.normalize,
            want_log,
            problem.policy.chunk_size,
        )
        if meta is None:
            dtype = problem.dtype if dtype is None else dtype
            meta = meta_from_array(self.meta, ndim=len(lead) + len(axes), dtype=dtype)
        return tasks(function, call, {**lead_axes(lead), **axes}, parts, meta, **options)

    def outputs(
        self,
        function: Callable[..., Array],
        axis: str,
        chunks: Chunks,
        parts: dict[str, Part],
        **options: Any,
    ) -> tuple[Array, Array | None]:
        """Make outputs of blocks, and their log normalizers where they are asked for."""
        problem = self.problem
        e, want_log = problem.value.shape[-1], problem.want_log
        dtype = problem.dtype if want_log else problem.query.dtype
        axes = {axis: chunks, "outputs": (e + want_log,)}
        output = self.blockwise(
            function, axes, self.lead, parts, dtype=dtype, want_log=want_log, **options
        )
        if not want_log:
            return output, None
        return output[..., :e].astype(problem.query.dtype, copy=False), output[..., e]

    def _beside_keys(self, array: Array) -> Part:
        """Chunk numbers of keys as keys are; one number for all keys has other axes."""
        key = self.problem.key
        array = array[(None,) * (key.ndim - array.ndim)]
        lead = [
            chunks if array.shape[i] == key.shape[i] else (array.shape[i],)
            for i, chunks in enumerate(key.chunks[:-2])
        ]
        if array.shape[-2] != key.shape[-2] or array.shape[-2] == 1:
            return Part(array.rechunk((*lead, -1, -1)), ("all_keys", "unit"))
        return Part(array.rechunk((*lead, self.key_chunks, -1)), ("keys", "unit"))


def innermost(spec: Any) -> Any:
    """Spec of the features that wrappers are about."""
    while isinstance(spec, WRAPPERS):
        spec = spec.spec
    return spec


def depends_on_position(problem: Problem) -> bool:
    """Whether features may depend on where a token stands."""
    return isinstance(innermost(problem.key_spec), Opaque)


def lead_axes(lead: Sequence[Chunks]) -> dict[str, Chunks]:
    """Name leading axes as :attr:`Part.names` does."""
    return {f"lead{len(lead) - i}": chunks for i, chunks in enumerate(lead)}


def tasks(
    function: Callable[..., Array],
    call: Call,
    axes: dict[str, Chunks],
    parts: dict[str, Part],
    meta: Array,
    **options: Any,
) -> Array:
    """Make an array of a task for each block, of all these axes with their chunks."""
    names = [_uncontracted(part, axes) for part in parts.values()]
    arrays = [part.array for part in parts.values()]
    known = set(chain.from_iterable(names))
    return da.blockwise(
        run,
        tuple(axes),
        *chain.from_iterable(zip(arrays, names, strict=True)),
        function=function,
        call=call,
        **options,
        token=f"linattn-{function.__name__.replace('_', '-')}",
        new_axes={name: chunks for name, chunks in axes.items() if name not in known},
        adjust_chunks={name: chunks for name, chunks in axes.items() if name in known},
        align_arrays=False,
        dtype=meta.dtype,
        meta=meta,
    )


def merge_along(array: Array, axis: int, merge: Callable[..., Array]) -> Array:
    """Merge the blocks along an axis as a tree, in their order."""
    return da.reduction(
        array,
        chunk=_as_it_is,
        combine=merge,
        aggregate=merge,
        axis=axis,
        keepdims=True,
        split_every={axis: SPLIT_EVERY},
        dtype=array.dtype,
        meta=array._meta,
        concatenate=True,
    )


def read_again(parts: dict[str, Part], what: str) -> dict[str, Part]:
    """Return the same arrays with reads of their own, where a task reads a block from a store."""
    return {
        name: Part(clone(array, seed=f"linattn {what}") if _is_read(array) else array, axes)
        for name, (array, axes) in parts.items()
    }


def _as_it_is(array: Array, axis: object, keepdims: bool) -> Array:
    return array


def _is_read(array: Array) -> bool:
    """Whether a block of an array is what one task reads from a store, its axes in any order."""
    if hasattr(array, "expr"):
        return False
    layers, name = dict(array.__dask_graph__().layers), array.name
    task = getattr(layers.pop(name, None), "task", None)
    while task is not None and task.func is np.transpose:
        (name,) = array.__dask_graph__().dependencies[name]
        task = getattr(layers.pop(name, None), "task", None)
    return task is not None and task.data_producer and all(len(n) == 1 for n in layers.values())


def _without_rows(array: Array) -> Array:
    """Return an array without any row, for which none is read."""
    lead, width = array.shape[:-2], array.shape[-1]
    return da.zeros_like(array, shape=(*lead, 0, width), chunks=(*array.chunks[:-2], 0, width))


def _uncontracted(part: Part, axes: dict[str, Chunks]) -> Axes:
    """Name axes of one chunk that the result lacks as its last one, which has one chunk too.

    Dask fuses tasks with those that read their arrays where no axis is summed over.
    """
    *_, last = axes
    blocks = part.array.numblocks
    return tuple(
        last if name not in axes and count == 1 else name
        for name, count in zip(part.names, blocks, strict=True)
    )


def _precision(problem: Problem) -> str | None:
    if problem.dtype == np.float64:
        return "float64"
    return "tf32" if problem.policy.tf32 else None


def check_chunks(name: str, array: Array) -> None:
    """Check that chunks are known, and hold whole rows."""
    if len(array.chunks[-1]) > 1:
        raise ValueError(
            f"{name} must be in one chunk along its last axis, got chunks {array.chunks[-1]}; "
            f"use {name}.rechunk({{-1: -1}})"
        )


def differing(names: tuple[str, str], axis: int, expected: Chunks, got: Chunks) -> ValueError:
    """Return the error that two arrays are in different chunks."""
    first, second = names
    message = (
        f"{first} and {second} must have equal chunks along axis {axis}, got "
        f"{_brief(expected)} and {_brief(got)}; use "
        f"{second}.rechunk({{{axis}: {first}.chunks[{axis}]}})"
    )
    return ValueError(message)


def _brief(chunks: Chunks) -> str:
    return str(chunks) if len(chunks) <= 6 else f"({', '.join(map(str, chunks[:5]))}, ...)"


def map_lead(problem: Problem) -> tuple[int, ...]:
    """Leading axes (heads) of the parameters of the map."""
    like = np.empty(problem.key.shape[-1], dtype=np.float32)
    state = linattn.init_state(problem.feature_map, 1, like=like)
    return tuple(state.kvz.shape[:-2])


def common_chunks(parts: list[Part], map_lead: tuple[int, ...]) -> list[Chunks]:
    """Chunks of leading axes that arrays broadcast to; a map's present are in one chunk."""
    count = max(len(map_lead), *(len(part.lead_chunks) for part in parts))
    common: list[Chunks] = []
    for axis in range(count, 0, -1):
        found: Chunks = (1,)
        for part in parts:
            chunks = part.lead_chunks[-axis] if len(part.lead_chunks) >= axis else (1,)
            if sum(chunks) == 1:
                continue
            if sum(found) != 1 and chunks != found:
                names = "key", "query, value and state"
                raise differing(names, -2 - axis, found, chunks)
            found = chunks
        heads = map_lead[-axis] if len(map_lead) >= axis else 1
        if heads > 1:
            # :func:`linattn_dask.fitted.fitted` has put arrays into one chunk.
            found = (heads,)
        common.append(found)
    return common


def matching_chunks(part: Part, lead: list[Chunks]) -> list[Chunks]:
    """Chunks of the leading axes of a part: the chunks of ``lead`` where lengths agree."""
    present = part.lead_chunks
    with_one = [(1,)] * len(present) + lead
    wanted = with_one[len(with_one) - len(present) :]
    return [c if sum(c) == sum(p) else p for c, p in zip(wanted, present, strict=True)]


def state_parts(state: State, lead: list[Chunks]) -> dict[str, Part]:
    """Return arrays of a state, chunked as tokens are along leading axes, and not otherwise."""
    chunks = matching_chunks(Part(state.kvz, ("features", "width")), lead)
    kvz = state.kvz.rechunk((*chunks, -1, -1))
    return {
        "kvz": Part(kvz, ("features", "width")),
        "log_scale": Part(state.log_scale.rechunk((*chunks, -1)), ("features",)),
    }


def _carried(feature_map: Any) -> Array:
    return da.from_array(CarriedMap(feature_map), asarray=False, meta=np.empty((), dtype=object))


def _warn_of_short_chunks(layout: Layout) -> None:
    for name, chunks in (("queries", layout.query_chunks), ("keys", layout.key_chunks)):
        if len(chunks) > 1 and max(chunks) < MIN_ROWS and not _warned:
            _warned.append(name)
            message = (
                f"{name} are in chunks of at most {max(chunks)} rows, for which a task costs the "
                f"scheduler more than the work takes; rechunk to 8,000 to 64,000 rows"
            )
            warnings.warn(message, stacklevel=_caller_level())


def _caller_level() -> int:
    """Return the ``stacklevel`` of the first caller outside of linattn and this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("linattn", __name__.partition(".")[0])
