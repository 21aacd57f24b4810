"""What a task of an exact window does: blocks, and what lies before or after them.

What a block leaves for those after it is an *edge*: its last rows, which they see exactly, and the
state of all rows before these. Edges merge as states do: the rows of the earlier one go into the
state. From the end it is the first rows, and the state of those after them. An edge travels as one
array, ``(..., 1, 1, numbers)``: the state, then the rows, each with a 1 behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

import linattn
from linattn.typing import Array, State
from linattn_dask.blocks import Block, along_blocks, block_state, merged_states, outputs_of, scan


class EdgeShape(NamedTuple):
    """What an edge is made of."""

    names: tuple[str, ...]
    """Of arrays of keys, whose rows stand side by side."""
    widths: tuple[int, ...]
    """Columns of each."""
    window: int
    features: int
    packed: int
    """Columns of a packed state."""

    @property
    def num_numbers(self) -> int:
        """Numbers of an edge."""
        return self.features * self.packed + self.window * (sum(self.widths) + 1)


class _Edge(NamedTuple):
    state: Array
    """Packed, ``(..., m, packed)``."""
    rows: dict[str, Array]
    """By the names of arrays; empty at the ends of the sequence."""


def edge_of_block(block: Block, shape: EdgeShape, from_the_end: bool) -> Array:
    """Edge of one block of keys."""
    window, length = shape.window, block["key"].shape[-2]
    inner = max(length - window, 0)
    rest, edge = slice(inner), slice(inner, None)
    if from_the_end:
        rest, edge = slice(window, None), slice(window)
    rows = {name: block[name][..., edge, :] for name in shape.names}
    inside = {name: block[name][..., rest, :] for name in shape.names}
    return _pack(_Edge(block_state(block.replace(**inside))[..., 0, :, :], rows), shape)


def edge_of_state(block: Block, shape: EdgeShape) -> Array:
    """Edge of a state, all of whose keys are far."""
    return _pack(_Edge(block["state"][..., 0, :, :], {}), shape)


def merge_edges(block: Block, shape: EdgeShape, from_the_end: bool) -> Array:
    """Merge edges of all chunks, in their order."""
    return reduce(_merge(block, shape), along_blocks(block, from_the_end))


def scan_edges(block: Block, shape: EdgeShape, from_the_end: bool) -> Array:
    """Edges before each block of a group, or after each."""
    return scan(block, _merge(block, shape), from_the_end)


def window_block(block: Block, shape: EdgeShape, is_causal: bool) -> Array:
    """Attention with an exact window: a block, rows beside it, and the state of all others."""
    query, sides = block["query"], [_unpack(block["before"], shape)]
    if not is_causal:
        sides.append(_unpack(block["after"], shape))
    xp, length = array_api_compat.array_namespace(query), query.shape[-2]
    device = array_api_compat.device(query)
    counts = [side.rows["key"].shape[-2] if side.rows else 0 for side in sides]
    padding = [
        xp.zeros((*query.shape[:-2], n, query.shape[-1]), dtype=query.dtype, device=device)
        for n in counts
    ]
    joined, table = block.replace(**_joined(block, shape, sides)), block["relative_bias"]
    options: Any = {**joined.weights, **_near_and_far_bias(table, shape.window)}
    result = linattn.linear_attention(
        xp.concat([*padding[:1], query, *padding[1:]], axis=-2),
        joined["key"],
        joined["value"],
        block["feature_map"],
        is_causal=is_causal,
        initial_state=_far_state(block, [side.state for side in sides], table),
        normalize=block.call.normalize,
        return_log_normalizer=block.call.want_log,
        chunk_size=block.call.chunk_size,
        **options,
    )
    return outputs_of(block, result)[..., counts[0] : counts[0] + length, :]


def _near_and_far_bias(table: Array | None, window: int) -> dict[str, Any]:
    """Biases as a caller gives them, and the window: where it is all of a sequence, one as long."""
    if table is None:
        return {"exact_window": window}
    return {
        "exact_window": max(window, (table.shape[-1] - 3) // 2),
        "window_bias": table[..., 1:-1],
        "far_bias": (table[..., 0], table[..., -1]),
    }


def _far_state(block: Block, states: list[Array], table: Array | None) -> State:
    """State of all far keys; keys to the right are on the scale of the bias to the left."""
    if len(states) > 1 and table is not None:
        states[1] = _weighed(states[1], table, block.call.value_dim)
    return block.unpacked(merged_states(states, block.call.value_dim)[..., 0, :, :])


def _weighed(packed: Array, table: Array, value_dim: int) -> Array:
    """Weigh a state of keys to the right, so that the left bias then gives it the right bias."""
    xp = array_api_compat.array_namespace(packed)
    left, right = table[..., :1], table[..., -1:]
    left_out = left == -xp.inf
    if bool(xp.any(left_out & (right > -xp.inf))):
        raise ValueError(
            "far_bias must leave out keys on both sides or to the right alone in full attention on "
            "Dask arrays, got -inf to the left alone; compute() the arrays first"
        )
    nothing = xp.zeros_like(left)
    weight = xp.where(left_out, nothing, right - xp.where(left_out, nothing, left))
    lead = np.broadcast_shapes(packed.shape[:-2], weight.shape[:-1])
    packed = xp.broadcast_to(packed, (*lead, *packed.shape[-2:]))
    kvz, log_scale = packed[..., : value_dim + 1], packed[..., value_dim + 1]
    return xp.concat([kvz, (log_scale + weight)[..., None]], axis=-1)


def _joined(block: Block, shape: EdgeShape, sides: list[_Edge]) -> dict[str, Array]:
    """Arrays of keys with the rows before and after the block, as far as there are some."""
    xp = array_api_compat.array_namespace(block["key"])
    joined = {}
    for name in shape.names:
        array = block[name]
        beside = [xp.astype(s.rows[name], array.dtype) if s.rows else None for s in sides]
        in_order = [beside[0], array, *beside[1:]]
        parts = _broadcast_lead([rows for rows in in_order if rows is not None])
        joined[name] = xp.concat(parts, axis=-2)
    return joined


def _merge(block: Block, shape: EdgeShape) -> Callable[[Array, Array], Array]:
    """Return the function that merges two edges, the one that is further away first."""

    def merge(first: Array, second: Array) -> Array:
        distant, near = _unpack(first, shape), _unpack(second, shape)
        states = [distant.state, near.state]
        if distant.rows:
            states.insert(1, block_state(block.replace(**distant.rows))[..., 0, :, :])
        state = merged_states(states, block.call.value_dim)[..., 0, :, :]
        return _pack(_Edge(state, near.rows), shape)

    return merge


def _pack(edge: _Edge, shape: EdgeShape) -> Array:
    """Put an edge into one array, with axes of blocks and of one."""
    xp, state = array_api_compat.array_namespace(edge.state), edge.state
    rows, count = list(edge.rows.values()), 0
    if rows:
        count = rows[0].shape[-2]
        ones = xp.ones_like(rows[0][..., :1], dtype=state.dtype)
        rows = [xp.astype(array, state.dtype, copy=False) for array in (*rows, ones)]
    lead = np.broadcast_shapes(*(array.shape[:-2] for array in (state, *rows)))
    size, device = shape.window * (sum(shape.widths) + 1), array_api_compat.device(state)
    flat = []
    if rows:
        beside = xp.concat([xp.broadcast_to(r, (*lead, *r.shape[-2:])) for r in rows], axis=-1)
        flat.append(xp.reshape(beside, (*lead, count * beside.shape[-1])))
        size -= flat[0].shape[-1]
    flat.append(xp.zeros((*lead, size), dtype=state.dtype, device=device))
    state = xp.broadcast_to(state, (*lead, *state.shape[-2:]))
    flat.insert(0, xp.reshape(state, (*lead, shape.features * shape.packed)))
    return xp.concat(flat, axis=-1)[..., None, None, :]


def _unpack(packed: Array, shape: EdgeShape) -> _Edge:
    """Undo :func:`_pack`."""
    xp, numbers = array_api_compat.array_namespace(packed), packed[..., 0, 0, :]
    lead, size = tuple(numbers.shape[:-1]), shape.features * shape.packed
    state = xp.reshape(numbers[..., :size], (*lead, shape.features, shape.packed))
    beside = xp.reshape(numbers[..., size:], (*lead, shape.window, sum(shape.widths) + 1))
    # Rows are there for all heads or for none.
    present = xp.reshape(beside[..., -1], (-1, shape.window))[:1, :]
    count = int(xp.sum(present))
    if not count:
        return _Edge(state, {})
    rows, start = {}, 0
    for name, width in zip(shape.names, shape.widths, strict=True):
        rows[name] = beside[..., :count, start : start + width]
        start += width
    if "key_mask" in rows:
        rows["key_mask"] = rows["key_mask"] > 0
    return _Edge(state, rows)


def _broadcast_lead(arrays: list[Any]) -> list[Any]:
    xp = array_api_compat.array_namespace(arrays[0])
    lead = np.broadcast_shapes(*(array.shape[:-2] for array in arrays))
    return [xp.broadcast_to(array, (*lead, *array.shape[-2:])) for array in arrays]
