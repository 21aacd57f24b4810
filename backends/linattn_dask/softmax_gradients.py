"""Gradients of softmax attention: blocks of queries by blocks of keys, summed over either."""

from __future__ import annotations

from typing import Any

import array_api_compat
import dask.array as da
import numpy as np

import linattn
from linattn.typing import Array, Cotangent
from linattn_dask.block_gradients import BlockGradients, sum_heads, tokens_of, zeros
from linattn_dask.blocks import Block
from linattn_dask.exact import merged_pairs
from linattn_dask.layout import Layout, Part, merge_along
from linattn_dask.states import ones
from linattn_dask.sums import sum_to, with_ones

__all__ = ["pull_softmax"]

KEYS = ("key", "value", "key_mask", "key_bias")


def pull_softmax(layout: Layout, cotangent: Cotangent) -> tuple[Array | None, ...]:
    """Gradients by query, key, value, state, key_bias and log_decay, as far as there are some."""
    problem = layout.problem
    if problem.is_causal:
        layout.check_rows()
    parts = layout.parts("query") | layout.reading_again("gradients").parts(*KEYS)
    parts["grad_output"] = Part(cotangent.output, ("rows", "outputs"))
    parts["whole"] = Part(merged_pairs(layout)[..., 0, :], ("rows", "whole"))
    axes = {"rows": ones(layout.query_chunks), "keys": ones(layout.key_chunks)}
    for axis, chunks in axes.items():
        parts[f"number of {axis}"] = Part(da.from_array(np.arange(len(chunks)), chunks=1), (axis,))
    pulled = layout.blockwise(
        pull_pair,
        axes,
        [*map(ones, layout.lead)],
        parts,
        meta=np.empty((0,) * (len(layout.lead) + 2), dtype=object),
        scale=float(problem.query_spec.scale),
        is_causal=problem.is_causal,
    )
    names = ("query", "key", "value", "key_bias")
    found = [_gradient(layout, n, pulled) if layout.parts(n) else None for n in names]
    return (*found[:3], None, found[3], None)


def _gradient(layout: Layout, name: str, pulled: Array) -> Array:
    """Gradient by an array: the sum over the blocks of queries, or by queries of keys."""
    array, argument_axes = layout.part(name)
    *shape, _, width = array.shape
    chunks = {"rows": layout.query_chunks, "keys": layout.key_chunks}
    axis, other = ("rows", "keys") if name == "query" else ("keys", "rows")
    along = ones(chunks[axis]) if "all_keys" in argument_axes else chunks[axis]
    axes = {other: ones(chunks[other]), axis: along, "numbers": (width,)}
    ndim = len(layout.lead) + 3
    gradients = layout.blockwise(
        gradient_of_pair,
        axes,
        with_ones(layout.lead, shape),
        {"pulled": Part(pulled, ("rows", "keys"))},
        argument=name,
        ndim=ndim,
    )
    summed = merge_along(gradients, ndim - 3, np.sum)[..., 0, :, :]
    return sum_to(summed, array.shape).astype(array.dtype, copy=False)


def pull_pair(block: Block, scale: float, is_causal: bool) -> BlockGradients:
    r"""Pull back a block of queries over one of keys.

    A key more stands for all keys of the sequence: by a coordinate more its logit for query i is
    the log normalizer of that query, so that weights of the block are :math:`p_{ij} \rho_i`, its
    own is :math:`\rho_i \ge 1/2`. By a value more it is given the cotangent for which
    :math:`\bar o_i \cdot o_i` is that of the whole sequence.
    """
    whole = block["whole"]
    query, key, value, grad_output = tokens_of(
        block, whole.dtype, "query", "key", "value", "grad_output"
    )
    xp = array_api_compat.array_namespace(query)
    numbers = [int(block[f"number of {axis}"][0]) for axis in ("rows", "keys")]
    if not (query.shape[-2] and key.shape[-2]) or (is_causal and numbers[0] < numbers[1]):
        arrays = {"query": query, "key": key, "value": value, "key_bias": block["key_bias"]}
        return BlockGradients(**{n: xp.zeros_like(a) for n, a in arrays.items() if a is not None})
    log = xp.where(whole[..., -1:] == -xp.inf, xp.zeros_like(whole[..., -1:]), whole[..., -1:])
    lead = tuple(log.shape[:-2])
    wide = xp.broadcast_to(query, (*lead, *query.shape[-2:]))
    output, pullback = linattn.softmax_attention_vjp(
        xp.concat([wide, log], axis=-1),
        _with_one_more(key, 1 / scale),
        _with_one_more(value, 1.0),
        scale=scale,
        is_causal="lower_right" if is_causal and numbers[0] == numbers[1] else False,
        **_weights(block, key),
    )
    share = output[..., -1:]
    missing = _dot(grad_output, whole[..., :-1]) - _dot(grad_output, output[..., :-1])
    gradients = pullback(xp.concat([grad_output, missing / share], axis=-1) / share)
    pulled = {
        "query": sum_heads(gradients[0][..., :-1], tuple(query.shape[:-2])),
        "key": gradients[1][..., 1:, :-1],
        "value": gradients[2][..., 1:, :-1],
    }
    if block["key_bias"] is not None:
        pulled["key_bias"] = gradients[3][..., 1:, None]
    return BlockGradients(**pulled)


def gradient_of_pair(block: Block, argument: str, ndim: int) -> Array:
    """Take the gradient by one argument, with an axis for the blocks of the other side."""
    gradient = block["pulled"].arrays[argument][..., None, :, :]
    return gradient[(None,) * (ndim - gradient.ndim) + (...,)]


def _with_one_more(array: Array, number: float) -> Array:
    """Add a coordinate, 0 but in a row before the others, which has nothing else."""
    xp, lead = array_api_compat.array_namespace(array), array.shape[:-2]
    rows = xp.concat([array, zeros(array, (*array.shape[:-1], 1))], axis=-1)
    first = [zeros(array, (*lead, 1, array.shape[-1])), zeros(array, (*lead, 1, 1)) + number]
    return xp.concat([xp.concat(first, axis=-1), rows], axis=-2)


def _weights(block: Block, key: Array) -> dict[str, Any]:
    """Mask and bias of the keys, and of the one before them."""
    xp, found = array_api_compat.array_namespace(key), {}
    for name in ("key_mask", "key_bias"):
        weight = block.weights[name]
        if weight is not None:
            rows = xp.broadcast_to(weight, (*weight.shape[:-1], key.shape[-2]))
            first = (xp.ones_like if name == "key_mask" else xp.zeros_like)(weight[..., :1])
            found[name] = xp.concat([first, rows], axis=-1)
    return found


def _dot(first: Array, second: Array) -> Array:
    xp = array_api_compat.array_namespace(first)
    return xp.sum(first * second, axis=-1, keepdims=True)
