"""The functions of linattn as torch compiles, exports and transforms them.

A function has its signature and its docstring here. What it does is written once, in
:func:`linattn.interop.torch._node.operator_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from linattn._driver.options import InteropOptions
from linattn.interop.torch._node import operator_of
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


@operator_of("linear")
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
    Extra memory as of :func:`linattn.linear_attention_vjp`. Where torch compiles or transforms a
    call, its gradient cannot be differentiated again; that of :func:`linattn.linear_attention` can.

    Inside ``torch.autocast`` query, key and value are cast to the dtype of the context, as torch
    does for ``scaled_dot_product_attention``; other arguments are not cast. States are float32,
    and gradients have the dtypes of the inputs. ``backward()`` may be called inside or outside.
    """


@operator_of("softmax")
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
    Where torch compiles or transforms a call, its gradient cannot be differentiated again; that of
    :func:`linattn.softmax_attention` can.

    Inside ``torch.autocast`` as :func:`linear_attention`.
    """


@operator_of("recurrence")
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
    pass, and nothing but the arguments is stored. Where torch compiles or transforms a call, its
    gradient cannot be differentiated again; that of :func:`linattn.linear_recurrence` can.

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
