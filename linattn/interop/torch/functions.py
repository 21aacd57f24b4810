"""Attention for torch's autograd that keeps nothing but its arguments for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Unpack, overload

import torch

from linattn import _checks
from linattn._driver.options import InteropOptions
from linattn.interop.torch._node import Named, fingerprint_of, run, widest
from linattn.typing import Array, ArrayT, FeatureMap, State

__all__ = ["linear_attention", "linear_recurrence", "softmax_attention"]


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[InteropOptions],
) -> ArrayT: ...


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[True],
    **options: Unpack[InteropOptions],
) -> tuple[ArrayT, State]: ...


@overload
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: bool = False,
    **options: Unpack[InteropOptions],
) -> Any: ...


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    is_causal: bool | Literal["lower_right"] = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    key_lengths: Any = None,
    key_stop: Any = None,
    prefix_length: Any = None,
    causal_block: int | None = None,
    cu_seqlens: Any = None,
    log_decay: Array | float | None = None,
    normalize: bool = True,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """:func:`linattn.linear_attention` on tensors, with a backward pass in constant extra memory.

    Parameters
    ----------
    query : Tensor, (..., L, d)
        As for :func:`linattn.linear_attention`.
    key : Tensor, (..., S, d)
        Same dtype and device.
    value : Tensor, (..., S, e)
        Same dtype and device.
    feature_map : FeatureMap
        A map whose specs have gradients. Its parameters are constants.
    is_causal, key_mask, key_bias, key_lengths, log_decay, normalize
        As for :func:`linattn.linear_attention`. Gradients flow through ``key_bias``, and through
        ``log_decay`` where it is an array.
    initial_state, return_state, chunk_size
        As for :func:`linattn.linear_attention`. Gradients flow through ``kvz`` of the states; their
        ``log_scale`` is held constant.
    key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linattn.linear_attention`; their values are needed.

    Returns
    -------
    Tensor, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_attention`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`.
    NotImplementedError
        The map has no gradient.

    Notes
    -----
    Extra memory as of :func:`linattn.linear_attention_vjp`. The gradient cannot be differentiated
    again; :func:`linattn.linear_attention` itself can.

    Inside ``torch.autocast`` query, key and value are cast to the dtype of the context, as torch
    does for ``scaled_dot_product_attention``; other arguments are not cast. States are float32,
    and gradients have the dtypes of the inputs. ``backward()`` may be called inside or outside.
    """
    arrays = {
        **{"query": query, "key": key, "value": value},
        **{"kvz": None, "log_scale": None, "key_bias": key_bias, "log_decay": log_decay},
        **{"key_mask": key_mask, "key_lengths": key_lengths, "key_stop": key_stop},
    }
    constants = {
        "is_causal": is_causal,
        "prefix_length": prefix_length,
        "causal_block": causal_block,
        "cu_seqlens": cu_seqlens,
        "normalize": normalize,
        "chunk_size": chunk_size,
        "feature_map": feature_map,
        "return_state": _checks.check_flag("return_state", return_state),
        "fingerprint": None,
        "num_sequences": None,
    }
    length = 0
    if initial_state is not None:
        if not torch.compiler.is_compiling():  # else the operator does, when it runs
            _checks.check_state_record("initial_state", initial_state)
        arrays["kvz"], arrays["log_scale"], length = initial_state[:3]
        for name in ("fingerprint", "num_sequences"):
            constants[name] = getattr(initial_state, name)
    output, *rest = run("linear", arrays, constants, length)
    if not return_state:
        return output
    return output, _state_after(rest, initial_state, feature_map, arrays, cu_seqlens)


def softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    key_lengths: Any = None,
    key_stop: Any = None,
    prefix_length: Any = None,
    causal_block: int | None = None,
    cu_seqlens: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    sinks: int | None = None,
    window_bias: Array | None = None,
    far_bias: tuple[Any, Any] | None = None,
) -> Array:
    """:func:`linattn.softmax_attention` on tensors, with a backward pass in linear memory.

    Parameters
    ----------
    query : Tensor, (..., L, d)
        As for :func:`linattn.softmax_attention`.
    key : Tensor, (..., S, d)
        Same dtype and device.
    value : Tensor, (..., S, e)
        Same dtype and device.
    scale, is_causal, key_mask, key_bias, key_lengths, local_window_size, sinks
        As for :func:`linattn.softmax_attention`. Gradients flow through ``key_bias``.
    key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linattn.softmax_attention`; their values are needed.
    window_bias, far_bias
        As for :func:`linattn.softmax_attention`; constants in the gradient.

    Returns
    -------
    Tensor, (..., L, e)
        As of :func:`linattn.softmax_attention`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`.

    Notes
    -----
    The gradient cannot be differentiated again; :func:`linattn.softmax_attention` itself can.

    Inside ``torch.autocast`` as :func:`linear_attention`.
    """
    arrays = {
        **{"query": query, "key": key, "value": value, "key_bias": key_bias},
        **{"key_mask": key_mask, "key_lengths": key_lengths, "key_stop": key_stop},
        **{"window_bias": window_bias, "far_bias[0]": None, "far_bias[1]": None},
    }
    constants = {
        "scale": scale,
        "is_causal": is_causal,
        "prefix_length": prefix_length,
        "causal_block": causal_block,
        "cu_seqlens": cu_seqlens,
        "local_window_size": local_window_size,
        "sinks": sinks,
        "far_bias": far_bias,
    }
    if isinstance(far_bias, tuple | list) and len(far_bias) == 2:
        arrays["far_bias[0]"], arrays["far_bias[1]"] = far_bias
        constants["far_bias"] = None
    return run("softmax", arrays, constants)[0]


def linear_recurrence(
    query: Array,
    key: Array,
    value: Array,
    *,
    update_rule: str,
    log_decay: Array | None = None,
    beta: Array | None = None,
    erase_key: Array | None = None,
    read_key: Array | None = None,
    key_mask: Array | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
    return_states_every: int | None = None,
    chunk_size: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Any:
    """:func:`linattn.linear_recurrence` on tensors, with a backward pass that keeps no chunk.

    Parameters
    ----------
    query : Tensor, (..., L, d)
        As for :func:`linattn.linear_recurrence`.
    key : Tensor, (..., L, d)
        Same dtype and device.
    value : Tensor, (..., L, e)
        Same dtype and device.
    update_rule, log_decay, beta, erase_key, read_key, key_mask, key_lengths, scale
        As for :func:`linattn.linear_recurrence`. Gradients flow through all floating arrays.
    initial_state, return_state, return_states_every, chunk_size, cu_seqlens
        As for :func:`linattn.linear_recurrence`.

    Returns
    -------
    Tensor, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_recurrence`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_recurrence`.

    Notes
    -----
    The backward pass solves the recurrence again: it takes some four times as long as the forward
    pass, and nothing but the arguments is stored. The gradient cannot be differentiated again;
    :func:`linattn.linear_recurrence` itself can.

    Inside ``torch.autocast`` as :func:`linear_attention`.

    Examples
    --------
    >>> import torch
    >>> from linattn.interop.torch import linear_recurrence
    >>> query, key, value = torch.randn(3, 8, 100, 16, requires_grad=True)
    >>> decay = torch.full((8, 100), -0.1)
    >>> output = linear_recurrence(query, key, value, update_rule="gated", log_decay=decay)
    >>> output.shape
    torch.Size([8, 100, 16])
    """
    return_state = _checks.check_flag("return_state", return_state)
    arrays = {
        **{"query": query, "key": key, "value": value},
        **{"log_decay": log_decay, "beta": beta, "initial_state": initial_state},
        **{"erase_key": erase_key, "read_key": read_key},
        **{"key_mask": key_mask, "key_lengths": key_lengths},
    }
    constants = {
        "update_rule": update_rule,
        "scale": scale,
        "return_state": return_state,
        "return_states_every": return_states_every,
        "chunk_size": chunk_size,
        "cu_seqlens": cu_seqlens,
    }
    output, *states = run("recurrence", arrays, constants)
    if return_states_every is not None:
        states = [state for stacked in states for state in stacked]
    extra = [states.pop(0)] if return_state else []
    extra += [] if return_states_every is None else [states]
    return (output, *extra) if extra else output


def _state_after(
    parts: list[Array], before: State | None, feature_map: FeatureMap, named: Named, borders: Any
) -> State:
    """Return the state after a call, with its length and fingerprint."""
    kvz, log_scale, key, decay = *parts, named["key"], named["log_decay"]
    ends = [0, key.shape[-2]] if borders is None else [int(end) for end in borders]
    pairs = [*pairwise(ends)]
    added = max(stop - start for start, stop in pairs)
    count = 0 if borders is None else len(pairs)
    known: dict[str, Any] = {"fingerprint": fingerprint_of(feature_map), "num_sequences": count}
    total = None if decay is None else _total_decay(decay, key, pairs, packed=bool(count))
    length = added
    if before is not None:
        length, known["fingerprint"] = before.length + added, before.fingerprint
        if not count:
            same = before.num_sequences is None or before.kvz.ndim == kvz.ndim
            known["num_sequences"] = before.num_sequences if same else 0
    after = State(kvz, log_scale.detach(), length, **known)
    earlier = None if before is None else before.log_decay
    decays = [part for part in (earlier, total) if part is not None]
    if not decays:
        return after
    lead = kvz.shape[:-2]
    if count:  # the axis of the sequences is the first, all others align to the right
        decays = [part[(slice(None), *[None] * (len(lead) - part.ndim), ...)] for part in decays]
    in_all = sum(decays[1:], decays[0]).to(kvz.dtype)
    return after._replace(log_decay=in_all.expand(lead).contiguous())


def _total_decay(decay: Any, key: Array, pairs: Any, *, packed: bool) -> Array:
    """Log decay of all tokens; of packed sequences each, along a first axis."""
    if not isinstance(decay, torch.Tensor):
        decay = key.new_full((1,) * (key.ndim - 1), decay, dtype=widest(key.device.type))
    decay = decay.to(widest(key.device.type))
    if decay.ndim == 0:
        decay = decay.reshape((1,) * (key.ndim - 1))
    if decay.ndim < key.ndim - 1:
        decay = decay[..., None]
    if decay.shape[-1] == 1:
        totals = [decay[..., 0] * (stop - start) for start, stop in pairs]
    else:
        totals = [decay[..., start:stop].sum(-1) for start, stop in pairs]
    return torch.stack(totals) if packed else totals[0]
