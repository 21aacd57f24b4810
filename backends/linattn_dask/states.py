"""States of blocks, merged: all of them by a tree, and those before each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from typing import Any

import dask.array as da

from linattn.typing import Array, State
from linattn_dask.blocks import add_blocks, block_state, merge_blocks, pack_block, scan_states
from linattn_dask.layout import Layout, Part, merge_along

MAX_CHAIN = 32
"""Blocks whose states are merged one after the other; more blocks are merged in groups."""

AXES = ("block", "features", "packed")


def ones(chunks: Sequence[int]) -> tuple[int, ...]:
    """Chunks of one entry for each of these."""
    return (1,) * len(chunks)


def block_states(layout: Layout) -> Array:
    """States of all blocks of keys, ``(..., blocks, m, packed)``, a chunk each."""
    names = ("key", "value", "key_mask", "key_bias", "log_decay", "feature_map")
    parts = layout.parts(*names) | layout.starts(layout.key_chunks, "keys")
    axes = {"keys": ones(layout.key_chunks), **state_axes(layout)}
    return layout.blockwise(block_state, axes, layout.key_lead, parts)


def _state_of_nothing(layout: Layout) -> Array:
    parts = layout.without_rows("key", "value", "key_mask", "key_bias", "log_decay")
    axes = {"keys": (1,), **state_axes(layout)}
    parts |= layout.parts("feature_map")
    return layout.blockwise(block_state, axes, layout.key_lead, parts)


def state_axes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Last axes of packed states, with their chunks."""
    problem = layout.problem
    width = problem.value.shape[-1] + (2 if problem.weights.log_decay is None else 3)
    return {"features": (problem.num_features,), "packed": (width,)}


def first_state(layout: Layout, *, with_given: bool = True) -> Array:
    """State before the first key, ``(..., 1, m, packed)``, with all its leading axes."""
    if layout.problem.state is None or not with_given:
        return _state_of_nothing(layout)
    parts = layout.parts("kvz", "log_scale")
    axes = {"block": (1,), **state_axes(layout)}
    axes["packed"] = (layout.problem.value.shape[-1] + 2,)
    given = layout.blockwise(pack_block, axes, parts["kvz"].lead_chunks, parts)
    return merge(layout, given, _state_of_nothing(layout))


def merge(
    layout: Layout, *states: Array, of_blocks: bool = False, from_the_end: bool = False
) -> Array:
    """Merge arrays of states chunk by chunk, in their order; ``of_blocks``: of blocks alone."""
    axes = {"block": ones(states[-1].chunks[-3]), **state_axes(layout)}
    lead = states[0].chunks[:-3] if of_blocks else layout.state_lead
    parts = {str(i): Part(state, AXES) for i, state in enumerate(states)}
    return layout.blockwise(merge_blocks, axes, lead, parts, from_the_end=from_the_end)


def reduce_states(layout: Layout, states: Array) -> Array:
    """Merge the states of all blocks, ``(..., 1, m, packed)``."""
    axis = states.ndim - 3
    add = partial(add_blocks, value_dim=layout.problem.value.shape[-1])
    return merge_along(states, axis, add)


def all_states(layout: Layout) -> Array:
    """State after the last key, ``(..., 1, m, packed)``."""
    state = first_state(layout)
    if not layout.problem.key.shape[-2]:
        return state
    keys = reduce_states(layout, block_states(layout))
    return keys if layout.problem.state is None else merge(layout, state, keys)


def states_before(layout: Layout, states: Array, first: Array) -> tuple[Array, Array]:
    """Merge the states before each block, and all of them: no block waits for a later one."""
    return prefix_scan(partial(merge, layout), states, first)


def states_after(layout: Layout, states: Array, last: Array) -> tuple[Array, Array]:
    """Merge the states after each block, and all of them."""

    def scan(states: Array, last: Array) -> Array:
        axes = {"block": states.chunks[-3], **state_axes(layout)}
        parts = {"states": Part(states, AXES), "first": Part(last, AXES)}
        lead = layout.state_lead
        return layout.blockwise(scan_states, axes, lead, parts, from_the_end=True)

    chunks = (*layout.state_lead, *last.chunks[-3:])
    if last.shape != tuple(map(sum, chunks)):
        # Heads that only the initial state has. Dask's expressions have no `broadcast_to`.
        last = last + da.zeros(tuple(map(sum, chunks)), chunks=chunks, dtype=last.dtype)
    return grouped_scan(partial(merge, layout), scan, states, last, from_the_end=True)


def prefix_scan(
    merge: Callable[..., Array], states: Array, first: Array, *, from_the_end: bool = False
) -> tuple[Array, Array]:
    """Merge the states before each block, and all of them, by any rule of merging.

    ``merge`` makes one array of several, block by block; ``of_blocks``: without the first state. Of
    many blocks the states of groups are merged first, so that ``sqrt(n)`` merges follow each other,
    and as many operations of Dask are made.
    """
    count = states.shape[-3]
    if count <= MAX_CHAIN:
        return _chain(merge, states, first, from_the_end)
    size = isqrt(count - 1) + 1
    groups = count // size
    rest = states[..., groups * size :, :, :]
    of_rest = []
    if from_the_end and rest.shape[-3]:
        after, first = _chain(merge, rest, first, from_the_end)
        of_rest.append(after)
    places = [states[..., i : groups * size : size, :, :] for i in range(size)]
    places = _in_order(places, from_the_end)
    of_groups = merge(*places, of_blocks=True)
    before, last = prefix_scan(merge, of_groups, first, from_the_end=from_the_end)
    rows = [before]
    for place in places[:-1]:
        rows.append(merge(rows[-1], place))
    grid = da.stack(_in_order(rows, from_the_end), axis=-3)
    parts = [grid[..., i, :, :, :] for i in range(groups)]
    if not from_the_end and rest.shape[-3]:
        before, last = _chain(merge, rest, last, from_the_end)
        of_rest.append(before)
    return da.concatenate([*parts, *of_rest], axis=-3), last


def grouped_scan(
    merge: Callable[..., Array],
    scan: Callable[[Array, Array], Array],
    states: Array,
    first: Array,
    *,
    from_the_end: bool,
) -> tuple[Array, Array]:
    """As :func:`prefix_scan`, by a task for each group of blocks, which waits for all of them.

    ``scan`` makes one array of all states and those before the groups, or after them.
    """
    axis, count = states.ndim - 3, states.shape[-3]
    size = max(MAX_CHAIN, isqrt(max(count, 1) - 1) + 1)
    grouped = states.rechunk({axis: size}, method="tasks")
    of_groups = merge(grouped, of_blocks=True, from_the_end=from_the_end)
    beside, merged = prefix_scan(merge, of_groups, first, from_the_end=from_the_end)
    return scan(grouped, beside).rechunk({-3: 1}, method="tasks"), merged


def _chain(
    merge: Callable[..., Array], states: Array, first: Array, from_the_end: bool
) -> tuple[Array, Array]:
    merged = [first]
    for i in _in_order(list(range(states.shape[-3])), from_the_end):
        merged.append(merge(merged[-1], states[..., i : i + 1, :, :]))
    # The first state may have leading axes that keys lack.
    return da.concatenate(_in_order(merged[:-1], from_the_end), axis=-3), merged[-1]


def _in_order(blocks: list[Any], from_the_end: bool) -> list[Any]:
    return blocks[::-1] if from_the_end else blocks


def lazy_state(layout: Layout, packed: Array) -> State:
    """Return what a caller gets of a merged state."""
    problem, width = layout.problem, layout.problem.value.shape[-1] + 1
    before = 0 if problem.state is None else problem.state.length
    state = packed[..., 0, :, :]
    return State(state[..., :width], state[..., width], before + problem.key.shape[-2])
