"""Blocks of hybrid models on NumPy arrays, from ``linattn.layers`` and one recurrence each.

Gated DeltaNet (Qwen3-Next), Kimi Delta Attention (Kimi-linear) and the mixer of Mamba-2, with the
names that their weights have in transformers::

    params = layers.load_safetensors("model.safetensors")
    prefix = "model.layers.0.linear_attn."
    mixer = {name.removeprefix(prefix): w for name, w in params.items() if name.startswith(prefix)}
    output, state = gated_delta_net(mixer, hidden, key_heads=16, value_heads=32)
    output, state = gated_delta_net(mixer, token, state, key_heads=16, value_heads=32)

Tokens are ``(batch, length, dim)``. A state is a pair of arrays: the last tokens of the short
convolution, and the matrices of the recurrence; None starts a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import layers

Array: TypeAlias = NDArray[Any]
Params: TypeAlias = Mapping[str, Array]
State: TypeAlias = tuple[Array, Array]


def gated_delta_net(
    params: Params,
    x: Array,
    state: State | None = None,
    *,
    key_heads: int,
    value_heads: int,
    eps: float = 1e-6,
) -> tuple[Array, State]:
    """Return the output of a Gated DeltaNet of Qwen3-Next, and the state after it."""
    group = value_heads // key_heads
    value_dim = params["out_proj.weight"].shape[1] // value_heads
    key_dim = params["in_proj_qkvz.weight"].shape[0] // (2 * key_heads) - value_dim * group
    mixed = per_head(project(params, "in_proj_qkvz", x), key_heads)
    ends = np.cumsum([key_dim, key_dim, group * value_dim])
    query, key, value, gate = np.split(mixed, ends, axis=-1)
    rates, decays = np.split(per_head(project(params, "in_proj_ba", x), key_heads), 2, axis=-1)

    flat = np.concatenate([joined(part) for part in (query, key, value)], axis=-1)
    flat, convolved = convolve(params, flat, state)
    parts = np.split(flat, np.cumsum([key_heads * key_dim] * 2), axis=-1)
    # A head of keys, and all heads of values that share it, along an axis of their own.
    query, key, value = (per_head(part, key_heads) for part in parts)
    value = np.moveaxis(value.reshape(*value.shape[:-1], group, value_dim), -2, 2)
    log_decay = decay_of(params, np.swapaxes(decays, -1, -2), (key_heads, group, 1))
    output, after = linattn.linear_recurrence(
        unit(query)[:, :, None],
        unit(key)[:, :, None],
        value,
        update_rule="gated_delta",
        log_decay=log_decay,
        beta=sigmoid(np.swapaxes(rates, -1, -2)),
        initial_state=None if state is None else state[1],
        return_state=True,
    )
    gate = np.moveaxis(gate.reshape(*gate.shape[:-1], group, value_dim), -2, 2)
    output = layers.gated_rms_norm(part_of(params, "norm"), output, gate, eps=eps)
    output = output.reshape(x.shape[0], value_heads, x.shape[1], value_dim)
    return project(params, "out_proj", joined(output)), (convolved, after)


def kimi_delta_attention(
    params: Params, x: Array, state: State | None = None, *, num_heads: int, eps: float = 1e-6
) -> tuple[Array, State]:
    """Return the output of a Kimi Delta Attention, and the state after it."""
    flat = np.concatenate([project(params, f"{name}_proj", x) for name in "qkv"], axis=-1)
    flat, convolved = convolve(params, flat, state)
    query, key, value = (per_head(part, num_heads) for part in np.split(flat, 3, axis=-1))
    forget = project(params, "forget_gate.f_b_proj", project(params, "forget_gate.f_a_proj", x))
    forget = forget + params["forget_gate.dt_bias"]
    rates = params["forget_gate.A_log"].reshape(num_heads, 1, 1)
    output, after = linattn.linear_recurrence(
        unit(query),
        unit(key),
        value,
        update_rule="gated_delta",
        log_decay=-np.exp(rates) * softplus(per_head(forget, num_heads)),
        beta=np.swapaxes(sigmoid(project(params, "b_proj", x)), -1, -2),
        initial_state=None if state is None else state[1],
        return_state=True,
    )
    gate = per_head(project(params, "g_b_proj", project(params, "g_a_proj", x)), num_heads)
    norm = part_of(params, "o_norm")
    output = layers.gated_rms_norm(norm, output, gate, activation="sigmoid", eps=eps)
    return project(params, "o_proj", joined(output)), (convolved, after)


def mamba2(
    params: Params,
    x: Array,
    state: State | None = None,
    *,
    num_groups: int = 1,
    time_step_limit: tuple[float, float] = (0.0, np.inf),
    eps: float = 1e-5,
) -> tuple[Array, State]:
    """Return the output of a mixer of Mamba-2, and the state after it."""
    num_heads, inner = len(params["A_log"]), params["norm.weight"].shape[0]
    conv_dim = params["conv1d.weight"].shape[0]
    ends = (inner, inner + conv_dim)
    gate, flat, steps = np.split(project(params, "in_proj", x), ends, axis=-1)
    flat, convolved = convolve(params, flat, state)
    state_dim = (conv_dim - inner) // 2
    value, key, query = np.split(flat, (inner, inner + state_dim), axis=-1)
    key, query = (per_head(part, num_groups)[:, :, None] for part in (key, query))
    heads = (num_groups, num_heads // num_groups)
    value = per_head(value, num_heads)
    value = value.reshape(len(x), *heads, *value.shape[2:])
    steps = np.clip(softplus(steps + params["dt_bias"]), *time_step_limit)
    steps = np.swapaxes(steps, -1, -2).reshape(len(x), *heads, -1)
    output, after = linattn.linear_recurrence(
        query,
        key,
        value * steps[..., None],
        update_rule="gated",
        log_decay=-np.exp(params["A_log"]).reshape(*heads, 1) * steps,
        scale=1.0,
        initial_state=None if state is None else state[1],
        return_state=True,
    )
    output = output + params["D"].reshape(*heads, 1, 1) * value
    output = joined(output.reshape(len(x), num_heads, *output.shape[3:]))
    norm = part_of(params, "norm")
    options: Any = {"gate_first": True, "num_groups": num_groups, "eps": eps}
    output = layers.gated_rms_norm(norm, output, gate, **options)
    return project(params, "out_proj", output), (convolved, after)


def part_of(params: Params, name: str) -> dict[str, Array]:
    """Return the parameters whose names begin with this one and a dot."""
    start = f"{name}."
    return {n.removeprefix(start): w for n, w in params.items() if n.startswith(start)}


def project(params: Params, name: str, x: Array) -> Array:
    """Multiply each token by the matrix of this name."""
    return np.asarray(layers.linear(part_of(params, name), x))


def convolve(params: Params, x: Array, state: State | None) -> tuple[Array, Array]:
    """Apply the short convolution; return its last tokens too."""
    before = None if state is None else state[0]
    options: Any = {"activation": "silu", "state": before, "return_state": True}
    output, after = layers.causal_convolution(part_of(params, "conv1d"), x, **options)
    return output, after


def per_head(x: Array, num_heads: int) -> Array:
    """Cut ``(batch, length, heads * dim)`` to ``(batch, heads, length, dim)``."""
    return np.swapaxes(x.reshape(*x.shape[:-1], num_heads, -1), 1, 2)


def joined(x: Array) -> Array:
    """Join ``(batch, heads, length, dim)`` to ``(batch, length, heads * dim)``."""
    x = np.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1)


def decay_of(params: Params, steps: Array, heads: tuple[int, ...]) -> Array:
    """Log decays from steps ``(batch, *heads, length)`` before their bias."""
    steps = steps + params["dt_bias"].reshape(heads)
    return np.asarray(-np.exp(params["A_log"]).reshape(heads) * softplus(steps))


def unit(x: Array) -> Array:
    """Scale each token to norm 1."""
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6))


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))``."""
    return np.logaddexp(x, np.zeros((), x.dtype))
