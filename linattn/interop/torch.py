"""Attention for torch's autograd that keeps nothing but its arguments for the backward pass."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

try:
    import torch
except ImportError as error:
    message = "linattn.interop.torch needs torch, which is not installed: pip install torch"
    raise ImportError(message) from error

from linattn import _arrays, _checks, _settings
from linattn._driver import forward
from linattn._driver.options import InteropOptions
from linattn._driver.problem import exact_problem
from linattn._driver.stamps import stamped
from linattn.gradients import differentiable_problem, pullback_of
from linattn.typing import Array, ArrayT, FeatureMap, State

__all__ = ["linear_attention", "softmax_attention"]


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


@_arrays.as_autocast("query", "key", "value")
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
    casts those of ``scaled_dot_product_attention``; nothing else is. States are float32, gradients
    have the dtypes of the inputs, and ``backward()`` may be called inside or outside.
    """
    return_state = _checks.check_flag("return_state", return_state)
    settings = {
        "is_causal": is_causal,
        "key_lengths": key_lengths,
        "key_stop": key_stop,
        "prefix_length": prefix_length,
        "causal_block": causal_block,
        "cu_seqlens": cu_seqlens,
        "normalize": normalize,
        "chunk_size": chunk_size,
    }
    decays = log_decay
    if not isinstance(log_decay, torch.Tensor):
        # A number, which has no gradient.
        settings["log_decay"], decays = log_decay, None
    kvz, log_scale, before = None, None, None
    if initial_state is not None:
        _checks.check_state_record("initial_state", initial_state)
        kvz, log_scale, *_ = initial_state
        before = initial_state._replace(kvz=None, log_scale=None, log_decay=None)
    arrays = (query, key, value, kvz, key_bias, decays, log_scale, key_mask)
    output, kvz, log_scale = _LinearAttention.apply(
        *arrays, before, feature_map, settings, return_state
    )
    if not return_state:
        return output
    added = key.shape[-2] if cu_seqlens is None else int(np.diff(np.asarray(cu_seqlens)).max())
    after = State(kvz, log_scale, added if before is None else before.length + added)
    problem = None
    if log_decay is not None or cu_seqlens is not None:
        problem = _problem(arrays, before, feature_map, settings)
    return output, stamped(after, initial_state, feature_map, problem)


@_arrays.as_autocast("query", "key", "value")
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
    scale, is_causal, key_mask, key_bias, key_lengths, local_window_size
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
    settings = {
        "scale": scale,
        "is_causal": is_causal,
        "key_lengths": key_lengths,
        "key_stop": key_stop,
        "prefix_length": prefix_length,
        "causal_block": causal_block,
        "cu_seqlens": cu_seqlens,
        "local_window_size": local_window_size,
        "window_bias": window_bias,
        "far_bias": far_bias,
    }
    return _SoftmaxAttention.apply(query, key, value, key_bias, key_mask, settings)


class _LinearAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Array,
        key: Array,
        value: Array,
        kvz: Array,
        key_bias: Array,
        log_decay: Array,
        log_scale: Array,
        key_mask: Array,
        before: State | None,
        feature_map: FeatureMap,
        settings: dict[str, Any],
        return_state: bool,
    ) -> tuple[Array, Array, Array]:
        arrays = (query, key, value, kvz, key_bias, log_decay, log_scale, key_mask)
        problem = _problem(arrays, before, feature_map, settings)
        output, state, _ = forward.solve(problem, return_state=return_state)
        new_kvz, new_scale = (None, None) if state is None else (state.kvz, state.log_scale)
        ctx.save_for_backward(*arrays, new_scale)
        ctx.rest = (before, feature_map, settings)
        ctx.policy = _settings.current_settings()
        if new_scale is not None:
            ctx.mark_non_differentiable(new_scale)
        return output, new_kvz, new_scale

    @staticmethod
    @_arrays.on_array_device
    def backward(ctx: Any, grad_output: Array, grad_kvz: Array, _: Array) -> tuple[Array, ...]:
        *arrays, new_scale = ctx.saved_tensors
        with torch.no_grad(), _settings.use_settings(ctx.policy):
            problem = _problem(arrays, *ctx.rest)
            weights = {"key_bias": arrays[4], "log_decay": arrays[5]}
            gradients = pullback_of(problem, weights, new_scale)(grad_output, grad_kvz)
        gradients = _once(gradients, (*arrays[:6], grad_output, grad_kvz))
        given = iter(gradients)
        found = [None if array is None else next(given) for array in arrays[:6]]
        return (*found, *[None] * 6)


def _problem(
    arrays: Any, before: State | None, feature_map: FeatureMap, settings: dict[str, Any]
) -> Any:
    query, key, value, kvz, key_bias, log_decay, log_scale, key_mask = arrays
    state = None if before is None else before._replace(kvz=kvz, log_scale=log_scale)
    settings = {**settings, "key_mask": key_mask, "key_bias": key_bias, "initial_state": state}
    if log_decay is not None:
        settings["log_decay"] = log_decay
    return differentiable_problem(query, key, value, feature_map, **settings)


class _SoftmaxAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Array,
        key: Array,
        value: Array,
        key_bias: Array,
        key_mask: Array,
        settings: dict[str, Any],
    ) -> Array:
        masks = {"key_mask": key_mask, "key_bias": key_bias}
        problem = exact_problem(query, key, value, **masks, **settings)
        ctx.save_for_backward(query, key, value, key_bias, key_mask)
        ctx.settings, ctx.policy = settings, _settings.current_settings()
        return forward.solve(problem, return_state=False)[0]

    @staticmethod
    @_arrays.on_array_device
    def backward(ctx: Any, grad_output: Array) -> tuple[Array, ...]:
        query, key, value, key_bias, key_mask = ctx.saved_tensors
        with torch.no_grad(), _settings.use_settings(ctx.policy):
            masks = {"key_mask": key_mask, "key_bias": key_bias}
            problem = exact_problem(query, key, value, **masks, **ctx.settings)
            gradients = pullback_of(problem, {"key_bias": key_bias})(grad_output)
        gradients = _once(gradients, (query, key, value, key_bias, grad_output))
        return (*gradients, *[None] * (6 - len(gradients)))


def _once(gradients: tuple[Array, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Make differentiating gradients again an error; alone, torch takes them as constant."""
    if not torch.is_grad_enabled():
        return gradients
    given = [array for array in arrays if array is not None]
    return tuple(_Once.apply(gradient, *given) for gradient in gradients)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gradient: Array, *arrays: Array) -> Array:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Array) -> tuple[Array, ...]:
        message = (
            "the gradient of linattn.interop.torch cannot be differentiated again; that of "
            "linattn.linear_attention and linattn.softmax_attention can"
        )
        raise RuntimeError(message)
