"""What a task of the pullback does with the chunks of one block: pullbacks of linattn.

A block of queries leaves its share of the adjoint of the state before it. Adjoints are states on
scales of their own, and merge like states; keys read the merged adjoint of all later queries.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

import linattn
from linattn.gradients import differentiable_problem, pullback_of
from linattn.typing import Array, State
from linattn_dask.blocks import Block, add_blocks, zeros


class BlockGradients:
    """Gradients of one block by their names: for Dask, which walks into dicts, one thing."""

    def __init__(self, **arrays: Array) -> None:
        self.arrays = arrays

    def __sizeof__(self) -> int:
        """Bytes, by which a cluster tells what a worker holds."""
        return sum(int(array.nbytes) for array in self.arrays.values())


def pull_queries(block: Block) -> BlockGradients:
    """Pull back queries that read the state of all keys."""
    state = block.state()
    query, grad_output = tokens_of(block, state.kvz.dtype, "query", "grad_output")
    key, value = (_no_rows(array) for array in (query, grad_output))
    problem = differentiable_problem(
        *(query, key, value, block["feature_map"]), initial_state=state, **_options(block)
    )
    of_query, _, _, of_state = pullback_of(problem)(grad_output)
    return BlockGradients(query=of_query, adjoint=_adjoint(of_state, state))


def pull_keys(block: Block) -> BlockGradients:
    """Pull back keys that are read by the queries of an adjoint."""
    adjoint = block.state("adjoint")
    key, value = tokens_of(block, adjoint.kvz.dtype, "key", "value")
    xp = array_api_compat.array_namespace(key)
    options = _options(block)
    if block["log_decay"] is None:
        query, nothing = _no_rows(key), xp.full_like(adjoint.log_scale, -xp.inf)
        state = State(xp.zeros_like(adjoint.kvz), nothing, block.start)
    else:
        # Decays act on what was there before, too: a scan, whose queries have cotangents of 0.
        query, state = xp.zeros_like(key), block.state()
        options["is_causal"] = True
    problem = differentiable_problem(
        query, key, value, block["feature_map"], initial_state=state, **options
    )
    grad_output = zeros(value, (*problem.lead, query.shape[-2], value.shape[-1]))
    weights = {name: block.weights[name] for name in ("key_bias", "log_decay")}
    pullback = pullback_of(problem, weights, -adjoint.log_scale)
    gradients = _named(block, pullback(grad_output, adjoint.kvz))
    return BlockGradients(**{n: g for n, g in gradients.items() if n not in ("query", "state")})


def pull_causal_block(block: Block) -> BlockGradients:
    """Pull back a causal block as if no query came after it."""
    state = block.state()
    names = ("query", "key", "value", "grad_output")
    query, key, value, grad_output = tokens_of(block, state.kvz.dtype, *names)
    _, pullback = linattn.linear_attention_vjp(
        query,
        key,
        value,
        block["feature_map"],
        initial_state=state,
        **block.visibility,
        **_options(block),
    )
    gradients = _named(block, pullback(grad_output))
    # The total log decay of the block: that of the adjoint after it.
    decay = None if block["states"] is None else block["states"][..., 0, :, -1:]
    adjoint = _adjoint(gradients.pop("state"), state, decay)
    return BlockGradients(**gradients, adjoint=adjoint)


def tokens_of(block: Block, dtype: Any, *names: str) -> list[Array]:
    """Chunks in the accumulation dtype, in which gradients of one block are added."""
    chunks = [block[name] for name in names]
    return [array_api_compat.array_namespace(c).astype(c, dtype, copy=False) for c in chunks]


def _no_rows(like: Array) -> Array:
    """No rows of an array, without its leading axes."""
    return zeros(like, (0, like.shape[-1]))


def _options(block: Block) -> Any:
    call = block.call
    return {"normalize": call.normalize, "chunk_size": call.chunk_size, **block.weights}


def _named(block: Block, gradients: tuple[Array, ...]) -> dict[str, Array]:
    """Gradients that a pullback with a state returns, by their names and with all axes."""
    weights = [name for name in ("key_bias", "log_decay") if block[name] is not None]
    named = dict(zip(("query", "key", "value", "state", *weights), gradients, strict=True))
    return named | {name: named[name][..., None] for name in weights}


def _adjoint(gradient: Array, before: State, decay: Array | None = None) -> Array:
    """Pack the gradient of a state before some queries, on the inverse of the state's scale."""
    xp, log_scale = array_api_compat.array_namespace(gradient), before.log_scale
    log_scale = xp.where(log_scale == -xp.inf, log_scale, -log_scale)
    fields = [gradient, log_scale[..., None]]
    if decay is not None:
        fields.append(xp.broadcast_to(decay, fields[1].shape))
    return xp.concat(fields, axis=-1)


def gradient_of_block(block: Block, argument: str, ndim: int) -> Array:
    """Add the gradients by one argument, and give them as many axes as there are."""
    first, *more = (block[i].arrays[argument] for i in block.call.names)
    return _with_axes(sum(more, start=first), ndim)


def adjoint_of_block(block: Block, ndim: int) -> Array:
    """Take the adjoint of the state before a block, with an axis of blocks."""
    return _with_axes(block["pulled"].arrays["adjoint"][..., None, :, :], ndim)


def _with_axes(array: Array, ndim: int) -> Array:
    return array[(None,) * (ndim - array.ndim) + (...,)]


def add_heads(states: Array, axis: tuple[int], keepdims: bool, value_dim: int) -> Array:
    """Merge adjoints of heads that share keys, and their decay: a step of Dask's reductions."""
    xp, width = array_api_compat.array_namespace(states), value_dim + 2
    heads = xp.moveaxis(states, axis[0], -3)
    merged = add_blocks(heads[..., :width], axis, keepdims, value_dim)
    with_decay = xp.concat([merged, heads[..., :1, :, width:]], axis=-1)
    return xp.moveaxis(with_decay, -3, axis[0])


def state_gradient(block: Block) -> Array:
    """Gradient by the ``kvz`` of a state, its log scale held constant, of the adjoint after it."""
    adjoint, xp = block.state("adjoint"), array_api_compat.array_namespace(block["log_scale"])
    return adjoint.kvz * xp.exp(adjoint.log_scale + block["log_scale"])[..., None]
