"""What a task of a recurrence does with the chunks of one block.

A block maps the state before it to the state after it, ``S -> T S + B``; ``[B, T]`` travels as one
array, ``(..., d, e + d)``. Adjoints are mapped the same way, from the end.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import array_api_compat
import numpy as np

import linattn
from linattn.typing import Array
from linattn_dask.blocks import Block, along_blocks, zeros

RULES = {(): "linear", ("log_decay",): "gated", ("beta",): "delta"}


def recur(block: Block, scale: float) -> Array:
    """Output of a block that the state of all before it is given to."""
    tokens = (block[name] for name in ("query", "key", "value"))
    output: Array = linattn.linear_recurrence(*tokens, **_options(block, scale))
    return output


def transition(block: Block) -> Array:
    """``[B, T]`` of a block."""
    key, value = _tokens(block, "key", "value")
    if block["beta"] is None and block["read_key"] is None:
        _, remaining, total = _remaining(block)
        added = _product(key if remaining is None else key * remaining, value)
        return _pack(added, _diagonal(key, total))
    lead = _lead(block, "key", "value", "log_decay", "beta", "erase_key", "read_key")
    *_, state = _recur_from_identity(block, key, value, lead)
    return state[..., None, :, :]


def merge_transitions(block: Block, from_the_end: bool) -> Array:
    """``[B, T]`` of consecutive blocks, in their order."""
    merge = partial(_merge, value_dim=block.call.value_dim)
    return reduce(merge, along_blocks(block, from_the_end))


def _merge(first: Array, later: Array, value_dim: int) -> Array:
    xp = array_api_compat.array_namespace(first)
    added, carried = later[..., :value_dim], later[..., value_dim:]
    moved = xp.matmul(carried, first)
    return xp.concat([moved[..., :value_dim] + added, moved[..., value_dim:]], axis=-1)


def pack_matrix(block: Block) -> Array:
    """``[S, 1]`` of a given state."""
    (state,) = (block[name] for name in block.call.names)
    return _pack(state, _diagonal(state, None, state.shape[-2]))


def _options(block: Block, scale: float) -> Any:
    return {
        **_rule(block),
        "scale": scale,
        "chunk_size": block.call.chunk_size,
        "initial_state": _matrix(block, "state"),
    }


def _rule(block: Block) -> dict[str, Any]:
    """Update rule, with the numbers of tokens that it takes as a caller gives them."""
    numbers = {n: block[n] for n in ("log_decay", "beta") if block[n] is not None}
    given = {n: each if each.shape[-1] > 1 else each[..., 0] for n, each in numbers.items()}
    if block["read_key"] is not None:
        keys = {name: block[name] for name in ("erase_key", "read_key")}
        return {"update_rule": "dplr", **given, **keys}
    return {"update_rule": RULES.get(tuple(numbers), "gated_delta"), **given}


def _matrix(block: Block, name: str) -> Array:
    """State or adjoint of a packed array."""
    return block[name][..., 0, :, : block.call.value_dim]


def _tokens(block: Block, *names: str) -> list[Array]:
    """Chunks in the accumulation dtype."""
    xp = array_api_compat.array_namespace(block["key"])
    double = block.call.precision == "float64" or block["key"].dtype == xp.float64
    dtype = xp.float64 if double else xp.float32
    return [xp.astype(block[name], dtype, copy=False) for name in names]


def _remaining(block: Block) -> tuple[Array | None, Array | None, Array | None]:
    """Share that is left of the state before a block at each token; of each at the end; of all."""
    if block["log_decay"] is None:
        return None, None, None
    xp = array_api_compat.array_namespace(block["key"])
    (decay,) = _tokens(block, "log_decay")
    nothing = xp.zeros_like(decay[..., :1, :])
    later = xp.concat([decay[..., 1:, :], nothing], axis=-2)[..., : decay.shape[-2], :]
    to_the_end = xp.flip(xp.cumulative_sum(xp.flip(later, axis=-2), axis=-2), axis=-2)
    from_the_start = xp.cumulative_sum(decay, axis=-2)
    total = xp.sum(decay, axis=-2, keepdims=True)
    return xp.exp(from_the_start), xp.exp(to_the_end), xp.exp(total)


def _diagonal(like: Array, remaining: Array | None, dim: int | None = None) -> Array:
    """Matrix that keeps these shares of key channels; all of them by default."""
    xp, device = array_api_compat.array_namespace(like), array_api_compat.device(like)
    eye = xp.eye(dim or like.shape[-1], dtype=like.dtype, device=device)
    return eye if remaining is None else eye * xp.matrix_transpose(remaining)


def _recur_from_identity(
    block: Block, key: Array, value: Array, lead: tuple[int, ...], query: Array | None = None
) -> tuple[Array, Array]:
    """Output and state by the delta rule from ``[0, 1]``: of values, and of what was before."""
    xp, d = array_api_compat.array_namespace(key), key.shape[-1]
    values = xp.concat([value, zeros(value, (*value.shape[:-1], d))], axis=-1)
    first = xp.concat([zeros(key, (d, value.shape[-1])), _diagonal(key, None)], axis=-1)
    output, state = linattn.linear_recurrence(
        key if query is None else query,
        key,
        values,
        **_rule(block),
        scale=1.0,
        initial_state=xp.broadcast_to(first, (*lead, *first.shape)),
        chunk_size=block.call.chunk_size,
        return_state=True,
    )
    return output, state


def _lead(block: Block, *names: str) -> tuple[int, ...]:
    there = [block[name] for name in names if block[name] is not None]
    return np.broadcast_shapes(*(tuple(array.shape[:-2]) for array in there))


def _product(left: Array, right: Array) -> Array:
    xp = array_api_compat.array_namespace(left)
    return xp.matmul(xp.matrix_transpose(left), right)


def _pack(added: Array, carried: Array) -> Array:
    """``[B, T]`` with an axis of blocks."""
    xp = array_api_compat.array_namespace(added)
    lead = np.broadcast_shapes(added.shape[:-2], carried.shape[:-2])
    both = [xp.broadcast_to(each, (*lead, *each.shape[-2:])) for each in (added, carried)]
    return xp.concat(both, axis=-1)[..., None, :, :]
