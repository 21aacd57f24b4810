"""Gradients without a framework: attention as a function with a pullback."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Unpack, overload

from linattn import _arrays, _checks
from linattn._driver import backward, forward
from linattn._driver.gradient_rows import Checkpoints
from linattn._driver.options import GradientOptions
from linattn._driver.problem import exact_problem, linear_problem
from linattn._driver.stamps import stamped
from linattn._generic.feature_vjps import check_differentiable, sum_to
from linattn.typing import Array, ArrayT, ColumnNormalized, Cotangent, FeatureMap, Problem, State

__all__ = [
    "differentiable_problem",
    "linear_attention_vjp",
    "pullback_of",
    "softmax_attention_vjp",
]

Pullback: TypeAlias = Callable[..., tuple[Array, ...]]


@overload
def linear_attention_vjp(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[GradientOptions],
) -> tuple[ArrayT, Pullback]: ...


@overload
def linear_attention_vjp(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[True],
    **options: Unpack[GradientOptions],
) -> tuple[tuple[ArrayT, State], Pullback]: ...


@overload
def linear_attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: bool = False,
    **options: Unpack[GradientOptions],
) -> tuple[Any, Pullback]: ...


@_arrays.as_autocast("query", "key", "value")
def linear_attention_vjp(
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
    exact_window: int | None = None,
    sinks: int | None = None,
    window_bias: Array | None = None,
    far_bias: tuple[Any, Any] | None = None,
) -> tuple[Any, Pullback]:
    r"""Return linear attention and a function that computes its gradients, in linear time.

    .. math::
        \bar q_i = \sum_j \frac{\partial w_{ij}}{\partial q_i}\,
        \frac{\bar o_i \cdot (v_j - o_i)}{D_i}, \quad
        \bar k_j = \sum_i \frac{\partial w_{ij}}{\partial k_j}\,
        \frac{\bar o_i \cdot (v_j - o_i)}{D_i}, \quad
        \bar v_j = \sum_i \frac{w_{ij}}{D_i}\, \bar o_i

    with weights ``w_ij = phi(q_i).psi(k_j)`` and denominators ``D_i = sum_j w_ij``, i and j running
    over the pairs that see each other. Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``m``
    features, ``e`` value dim.

    Parameters
    ----------
    query : array, (..., L, d)
        As for :func:`linattn.linear_attention`.
    key : array, (..., S, d)
        Same library, dtype and device.
    value : array, (..., S, e)
        Same library, dtype and device.
    feature_map : FeatureMap
        A map whose specs have gradients. Its parameters are constants.
    is_causal, key_mask, key_bias, key_lengths, log_decay, normalize, initial_state, chunk_size
        As for :func:`linattn.linear_attention`.
    key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linattn.linear_attention`.
    return_state : bool, optional
        The first result is then the tuple ``(output, state)``. Default False.
    exact_window, sinks, window_bias, far_bias
        As for :func:`linattn.linear_attention`; biases are constants in the gradient, and are not
        given with ``log_decay``.

    Returns
    -------
    output : array, (..., L, e)
        What :func:`linattn.linear_attention` returns for the same arguments.
    pullback : callable
        ``pullback(grad_output, grad_state=None) -> (grad_query, grad_key, grad_value)``. Then
        follow the gradients by ``initial_state.kvz``, ``key_bias`` and ``log_decay``, in this
        order, for the arguments that were given. ``grad_output``, (..., L, e), is the derivative of
        the loss by ``output``. ``grad_state``, (..., m, e + 1), only with ``return_state``, is its
        derivative by ``state.kvz``. Each gradient has the shape, dtype and device of its argument,
        summed over axes along which the argument was broadcast. The pullback may be called more
        than once.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`. In the pullback: a cotangent has another shape, dtype
        or library, or ``grad_state`` is given without ``return_state``.
    NotImplementedError
        The map has no gradient, or has none with ``normalize=False``.

    Warns
    -----
    UserWarning
        As :func:`linattn.linear_attention`.

    See Also
    --------
    softmax_attention_vjp : the same for exact attention.
    linattn.testing.assert_gradient : a pullback against finite differences.

    Notes
    -----
    Time O((L + S) m (d + e)), 2 to 2.8 times the products of the forward pass. Extra memory is
    O(c m + m e) for each head that runs in parallel, with blocks of c tokens. Windows need three
    more numbers a row, and full attention with a decay e + 6. Causal attention needs
    at most 64 states a head: 32 checkpoints, and as many recomputed states while the pullback runs.
    Both numbers double beyond 1,024 blocks.

    With NumPy the forward pass stores the checkpoints, or the state of full attention if it is not
    returned. Besides, the pullback needs only the arguments: do not change them before you call it.
    States are sums from either end, never differences.

    ``log_scale`` of a state is held constant. Rescaling ``kvz`` and ``log_scale`` together changes
    no output; the gradient by ``kvz`` rescales inversely.

    A masked key and its value have gradient 0. So has a query that sees no key or whose
    denominator is exactly 0. The derivative of a ReLU at 0 is taken to be 0.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), section 3.3, for the numerator; the
    denominator, the scales and the rules of the maps are derived in this project (docs,
    "Gradients").

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 8, 1000, 64), dtype=np.float32)
    >>> phi = linattn.feature_maps.PositiveFeatures(64, num_features=256, rng=0)
    >>> output, pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=True)
    >>> grad_query, grad_key, grad_value = pullback(output)  # of |output|^2 / 2
    >>> grad_query.shape
    (8, 1000, 64)
    """
    return_state = _checks.check_flag("return_state", return_state)
    problem = differentiable_problem(
        query,
        key,
        value,
        feature_map,
        is_causal=is_causal,
        key_mask=key_mask,
        key_bias=key_bias,
        key_lengths=key_lengths,
        key_stop=key_stop,
        prefix_length=prefix_length,
        causal_block=causal_block,
        cu_seqlens=cu_seqlens,
        log_decay=log_decay,
        normalize=normalize,
        initial_state=initial_state,
        chunk_size=chunk_size,
        exact_window=exact_window,
        sinks=sinks,
        window_bias=window_bias,
        far_bias=far_bias,
    )
    weights = {"key_bias": key_bias, "log_decay": log_decay}
    checkpoints = backward.checkpoints_for(problem)
    output, state, _ = forward.solve(problem, return_state=return_state, checkpoints=checkpoints)
    # A backend that does the whole problem may give a state that nobody asked for.
    if state is None or not return_state:
        return output, pullback_of(problem, weights, checkpoints=checkpoints)
    state = stamped(state, initial_state, feature_map, problem)
    return (output, state), pullback_of(problem, weights, state.log_scale, checkpoints)


@_arrays.as_autocast("query", "key", "value")
def softmax_attention_vjp(
    query: ArrayT,
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
) -> tuple[ArrayT, Pullback]:
    r"""Return exact softmax attention and a function that computes its gradients.

    .. math::
        \bar q_i = s \sum_j p_{ij}\, \bar o_i \cdot (v_j - o_i)\, k_j, \quad
        \bar k_j = s \sum_i p_{ij}\, \bar o_i \cdot (v_j - o_i)\, q_i, \quad
        \bar v_j = \sum_i p_{ij}\, \bar o_i

    with ``p_ij = softmax_j(s q_i.k_j + b_j + c_{j - i})`` over the keys that query i sees. Letters:
    ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``s`` scale, ``b`` and ``c`` biases.

    Parameters
    ----------
    query : array, (..., L, d)
        As for :func:`linattn.softmax_attention`.
    key : array, (..., S, d)
        Same library, dtype and device.
    value : array, (..., S, e)
        Same library, dtype and device.
    scale, is_causal, key_mask, key_bias, key_lengths, local_window_size, sinks
        As for :func:`linattn.softmax_attention`.
    key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linattn.softmax_attention`.
    window_bias, far_bias
        As for :func:`linattn.softmax_attention`; constants in the gradient.

    Returns
    -------
    output : array, (..., L, e)
        What :func:`linattn.softmax_attention` returns for the same arguments.
    pullback : callable
        ``pullback(grad_output) -> (grad_query, grad_key, grad_value)``, as the pullback of
        :func:`linear_attention_vjp`. With ``key_bias``, its gradient follows.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`. In the pullback: a cotangent has another shape, dtype
        or library.

    Notes
    -----
    Time O(L S (d + e)), or O(L w (d + e)) with a window of w keys: about five times the forward
    pass. Memory beyond arguments and gradients is O(c^2 + c e) with blocks of c tokens, and three
    numbers a row. Queries that see later keys need sums, at most one head's gradient of queries. A
    masked key, its value, and a query that sees no key have gradient 0.

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Dao et al.,
    "FlashAttention" (2022), appendix B.2.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> output, pullback = linattn.softmax_attention_vjp(query, key, value, is_causal=True)
    >>> [gradient.shape for gradient in pullback(output)]
    [(100, 16), (100, 16), (100, 16)]
    """
    problem = exact_problem(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        key_mask=key_mask,
        key_lengths=key_lengths,
        key_stop=key_stop,
        prefix_length=prefix_length,
        causal_block=causal_block,
        cu_seqlens=cu_seqlens,
        key_bias=key_bias,
        local_window_size=local_window_size,
        sinks=sinks,
        window_bias=window_bias,
        far_bias=far_bias,
    )
    output = forward.solve(problem, return_state=False)[0]
    return output, pullback_of(problem, {"key_bias": key_bias})


def differentiable_problem(
    query: Array, key: Array, value: Array, feature_map: FeatureMap, **settings: Any
) -> Problem:
    """Return a problem of linear attention, or say why the map has no gradient."""
    problem = linear_problem(query, key, value, feature_map, **settings)
    for spec in (problem.query_spec, problem.key_spec):
        check_differentiable(spec, feature_map)
    if not problem.normalize and isinstance(problem.query_spec, ColumnNormalized):
        raise NotImplementedError(
            f"normalize must be True for gradients of {feature_map!r}, which divides each column "
            f"of its state by its sum, got False; multiply outputs by exp(log_normalizer) instead"
        )
    return problem


def pullback_of(
    problem: Problem,
    weights: dict[str, Array] | None = None,
    log_scale: Array = None,
    checkpoints: Checkpoints | None = None,
) -> Pullback:
    """Return the pullback of a problem.

    ``weights`` are the user's ``key_bias`` and ``log_decay``, None if not given. ``log_scale``
    belongs to the last state, if the state is returned. ``checkpoints`` of the forward pass make
    the pullback faster; it runs without them too.
    """
    weights = {name: array for name, array in (weights or {}).items() if array is not None}

    @_arrays.on_array_device
    def pullback(grad_output: Array, grad_state: Array | None = None) -> tuple[Array, ...]:
        shape = (*problem.lead, problem.query.shape[-2], problem.value.shape[-1])
        _checks.check_cotangent("grad_output", grad_output, "output", shape, problem.query)
        cotangent = Cotangent(grad_output, backward.state_cotangent(grad_state, log_scale, problem))
        gradients = backward.pull(problem, cotangent, checkpoints)
        state = () if problem.state is None else (gradients.state,)
        rest = (_like(name, getattr(gradients, name), array) for name, array in weights.items())
        return (*gradients[:3], *state, *rest)

    return pullback


def _like(name: str, gradient: Array, array: Array) -> Array:
    """Sum the gradient of rows of keys, ``(..., S, 1)``, to the shape and dtype of an argument."""
    xp, gradient = _arrays.namespace(gradient), gradient[..., 0]
    if isinstance(array, numbers.Real):
        return xp.sum(gradient)
    shape = tuple(array.shape)
    if name == "log_decay" and len(shape) < gradient.ndim:
        gradient = xp.sum(gradient, axis=-1)
    summed = sum_to(gradient, shape, 0)
    return xp.astype(summed, array.dtype, copy=False)
