"""Calls that operators of ONNX compute, for :func:`linattn.interop.onnx.export`."""

from __future__ import annotations

from math import prod

import ndonnx
from spox.opset.ai.onnx import v27

from linattn.typing import Array, Declined, Recurrence


def recurrence(problem: Recurrence) -> tuple[Array, Array] | Declined:
    """Write ``LinearAttention``, whose arrays are ``(batch, length, heads * dim)``."""
    if problem.query.dtype != ndonnx.float32 or problem.dtype != ndonnx.float32:
        return Declined("the operator accumulates in float32")
    lead, (length, d), e = problem.lead, problem.key.shape[-2:], problem.value.shape[-1]
    of_state = (1,) * (len(lead) - len(problem.state_lead)) + problem.state_lead
    # Queries along an axis that no state has share a head of the state.
    shared = [axis for axis, n in enumerate(of_state) if n < lead[axis]]
    if 0 in shared or problem.scale == 0:
        return Declined("states have no axis of batches, or the scale is 0, ONNX's default")
    order = [axis for axis in range(len(lead)) if axis not in shared] + shared
    batch = lead[0] if lead else 1
    kv_heads, q_heads = prod(of_state[1:]), prod(lead[1:])

    def packed(tokens: Array | None, shape: tuple[int, ...], heads: int) -> Array:
        if tokens is None:
            return None
        width = tokens.shape[-1]
        whole = ndonnx.broadcast_to(tokens, (*shape, length, width))
        if heads == q_heads and shared:
            whole = ndonnx.permute_dims(whole, (*order, len(lead), len(lead) + 1))
        whole = ndonnx.reshape(whole, (batch, heads, length, width))
        whole = ndonnx.permute_dims(whole, (0, 2, 1, 3))
        return ndonnx.reshape(whole, (batch, length, heads * width)).unwrap_spox()

    key, value, decay, beta = (
        packed(x, of_state, kv_heads)
        for x in (problem.key, problem.value, problem.log_decay, problem.beta)
    )
    before = problem.initial_state
    if before is not None:
        before = ndonnx.broadcast_to(before, (*of_state, d, e))
        before = ndonnx.reshape(before, (batch, kv_heads, d, e)).unwrap_spox()
    rule = ("gated_" if decay is not None else "") + ("delta" if beta is not None else "")
    output, state = map(
        ndonnx.asarray,
        v27.linear_attention(
            packed(problem.query, lead, q_heads),
            *(key, value, before, decay, beta),
            kv_num_heads=kv_heads,
            q_num_heads=q_heads,
            scale=problem.scale,
            update_rule=rule.strip("_") or "linear",
        ),
    )
    output = ndonnx.reshape(output, (batch, length, q_heads, e))
    output = ndonnx.permute_dims(output, (0, 2, 1, 3))
    output = ndonnx.reshape(output, (*(lead[axis] for axis in order), length, e))
    back = sorted(range(len(lead)), key=order.__getitem__)
    output = ndonnx.permute_dims(output, (*back, len(lead), len(lead) + 1))
    return output, ndonnx.reshape(state, (*problem.state_lead, d, e))
