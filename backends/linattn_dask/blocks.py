"""What a task does with the chunks of one block: calls of linattn's public functions.

Chunks are arrays of a library of their own (NumPy, CuPy), which that library's backend serves. A
state travels as one array, ``[kvz, log_scale]`` or ``[kvz, log_scale, log_decay]`` along the
last axis: Dask walks into tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import array_api_compat

import linattn
from linattn.typing import Array, State


class Call(NamedTuple):
    """What all tasks of a problem are told beside their chunks."""

    names: tuple[str, ...]
    """Of the chunks, in their order."""
    value_dim: int
    num_threads: int | None = None
    precision: str | None = None
    normalize: bool = True
    want_log: bool = False
    chunk_size: int | None = None


class Block:
    """Chunks of one block by their names; a missing one is None."""

    def __init__(self, call: Call, chunks: tuple[Any, ...]) -> None:
        self.call = call
        self._chunks = dict(zip(call.names, map(_only, chunks), strict=True))

    def __getitem__(self, name: str) -> Any:
        """Return the block of an argument; of a feature map that was sent, the map."""
        chunk: Any = self._chunks.get(name)
        return chunk.feature_map if name == "feature_map" else chunk

    def replace(self, **arrays: Array) -> Block:
        """Return a block with other arrays of these names."""
        other = copy(self)
        other._chunks = self._chunks | arrays
        return other

    @property
    def weights(self) -> dict[str, Any]:
        """Masks, biases and decays of keys, as public functions take them."""
        names = ("key_mask", "key_bias", "log_decay")
        return {name: None if self[name] is None else self[name][..., 0] for name in names}

    @property
    def visibility(self) -> dict[str, Any]:
        """Which keys of the block its queries see, as public functions take it."""
        stops = self["key_stop"]
        return {"is_causal": True} if stops is None else {"key_stop": stops}

    @property
    def start(self) -> int:
        """Position of the first token, where the map asks for it."""
        return 0 if self["start"] is None else int(self["start"][0])

    def state(self, name: str = "state") -> State:
        """State of this name, without its axis of blocks."""
        return self.unpacked(self[name][..., 0, :, :])

    def unpacked(self, packed: Array) -> State:
        """State of an array without axis of blocks."""
        return _unpack(packed, self.call.value_dim, self.start)


def _only(chunk: Any) -> Any:
    """Take a chunk out of the lists of contracted axes, which have one chunk each."""
    while isinstance(chunk, list):
        (chunk,) = chunk
    return chunk


def run(*chunks: Any, function: Callable[..., Array], call: Call, **options: Any) -> Array:
    """Run a function of one block on one thread: workers are what runs side by side."""
    with linattn.config(num_threads=call.num_threads or 1, precision=call.precision):
        return function(Block(call, chunks), **options)


def _pack(state: State) -> Array:
    """Put a state into one array, ``(..., m, e + 2)`` or, with decay, ``(..., m, e + 3)``."""
    xp = array_api_compat.array_namespace(state.kvz)
    fields = [state.kvz, state.log_scale[..., None]]
    if state.log_decay is not None:
        decay = xp.astype(state.log_decay, state.kvz.dtype, copy=False)[..., None, None]
        fields.append(xp.broadcast_to(decay, fields[1].shape))
    return xp.concat(fields, axis=-1)


def _unpack(packed: Array, value_dim: int, length: int = 0) -> State:
    """Undo :func:`_pack`."""
    width = value_dim + 1
    decay = packed[..., 0, width + 1] if packed.shape[-1] > width + 1 else None
    return State(packed[..., :width], packed[..., width], length, None, decay)


def block_state(block: Block) -> Array:
    """State of one block of keys."""
    key, value = block["key"], block["value"]
    nothing = linattn.init_state(block["feature_map"], value.shape[-1], like=key)
    state = linattn.update_state(
        nothing._replace(length=block.start), key, value, block["feature_map"], **block.weights
    )
    return _pack(state)[..., None, :, :]


def pack_block(block: Block) -> Array:
    """Put the arrays of a state into one."""
    return _pack(State(block["kvz"], block["log_scale"], 0))[..., None, :, :]


def along_blocks(block: Block, from_the_end: bool) -> list[Array]:
    """Blocks of numbered chunks, with their axis, in the order in which they are merged."""
    chunks = [block[name] for name in block.call.names if name.isdecimal()]
    blocks = [c[..., i : i + 1, :, :] for c in chunks for i in range(c.shape[-3])]
    return blocks[::-1] if from_the_end else blocks


def merge_blocks(block: Block, from_the_end: bool) -> Array:
    """Merge states of the blocks of all chunks, in their order."""
    states = [state[..., 0, :, :] for state in along_blocks(block, from_the_end)]
    return merged_states(states, block.call.value_dim)


def merge_two(block: Block) -> Array:
    """Merge two states that came as arrays of their own."""
    fields = ("kvz", "log_scale", "log_decay")
    states = [[block[f"{name} {field}"] for field in fields] for name in ("first", "second")]
    merged = linattn.merge_states(
        *(State(kvz, log_scale, 0, None, decay) for kvz, log_scale, decay in states)
    )
    return _pack(merged._replace(log_decay=None))


def merged_states(packed: list[Array], value_dim: int) -> Array:
    """Merge packed states in their order; the result has an axis of blocks."""
    states = [_unpack(each, value_dim) for each in packed]
    merged = states[0]
    for state in states[1:]:
        merged = linattn.merge_states(merged, state)
    return _pack(merged)[..., None, :, :]


def scan(block: Block, merge: Callable[[Array, Array], Array], from_the_end: bool) -> Array:
    """Merge the states before each block of a group, or after each; axis -3 counts blocks."""
    states, merged = block["states"], [block["first"]]
    order = range(states.shape[-3])
    for i in reversed(order) if from_the_end else order:
        merged.append(merge(merged[-1], states[..., i : i + 1, :, :]))
    del merged[-1]
    xp = array_api_compat.array_namespace(states)
    return xp.concat(merged[::-1] if from_the_end else merged, axis=-3)


def scan_states(block: Block, from_the_end: bool) -> Array:
    """Merge states before each block of a group, or after each."""

    def merge(first: Array, second: Array) -> Array:
        return merged_states([first[..., 0, :, :], second[..., 0, :, :]], block.call.value_dim)

    return scan(block, merge, from_the_end)


def add_blocks(states: Array, axis: Any, keepdims: bool, value_dim: int) -> Array:
    """Merge states along the axis of blocks, a step of Dask's reductions."""
    if not states.shape[-3]:  # Dask asks on arrays of length 0 what comes of them.
        return states
    return merged_states([states[..., i, :, :] for i in range(states.shape[-3])], value_dim)


def causal_block(block: Block) -> Array:
    """Causal attention of a block, or one with stops, that the state before it is given to."""
    options: Any = {**block.visibility, **block.weights}
    result = linattn.linear_attention(
        block["query"],
        block["key"],
        block["value"],
        block["feature_map"],
        initial_state=block.state(),
        normalize=block.call.normalize,
        return_log_normalizer=block.call.want_log,
        chunk_size=block.call.chunk_size,
        **options,
    )
    return outputs_of(block, result)


def read_block(block: Block) -> Array:
    """Attention of a block of queries to the keys of a state."""
    query = block["query"]
    xp, e = array_api_compat.array_namespace(query), block.call.value_dim
    device = array_api_compat.device(query)
    key, value = (xp.empty((0, n), dtype=query.dtype, device=device) for n in (query.shape[-1], e))
    return outputs_of(
        block,
        linattn.linear_attention(
            query,
            key,
            value,
            block["feature_map"],
            initial_state=block.state(),
            normalize=block.call.normalize,
            return_log_normalizer=block.call.want_log,
            chunk_size=block.call.chunk_size,
        ),
    )


def softmax_block(block: Block, scale: float, is_causal: bool) -> Array:
    """Softmax attention of a block of queries to one of keys, with its log normalizer."""
    output, norm = linattn.softmax_attention(
        *(block[name] for name in ("query", "key", "value")),
        scale=scale,
        is_causal=is_causal,
        key_mask=block.weights["key_mask"],
        key_bias=block.weights["key_bias"],
        return_log_normalizer=True,
    )
    return _beside(output, norm)[..., None, :]


def merge_pairs(pairs: Array, axis: object, keepdims: bool) -> Array:
    """Merge outputs over blocks of keys, a step of Dask's reductions."""
    if not pairs.shape[-2]:  # Dask asks on arrays of length 0 what comes of them.
        return pairs
    parts = [pairs[..., i, :] for i in range(pairs.shape[-2])]
    merged = linattn.merge_outputs((part[..., :-1], part[..., -1]) for part in parts)
    return _beside(*merged)[..., None, :]


def outputs_of(block: Block, result: Any) -> Array:
    """Put a log normalizer, where there is one, behind the columns of its output."""
    if not block.call.want_log:
        return result
    return _beside(*result)


def _beside(output: Array, norm: Array) -> Array:
    """Put log normalizers behind the columns of outputs."""
    xp = array_api_compat.array_namespace(output)
    return xp.concat([xp.astype(output, norm.dtype, copy=False), norm[..., None]], axis=-1)


def zeros(like: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of the library, dtype and device of an array."""
    xp, device = array_api_compat.array_namespace(like), array_api_compat.device(like)
    return xp.zeros(shape, dtype=like.dtype, device=device)
