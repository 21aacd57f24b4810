"""Gated and delta recurrences: whole sequences, packed ones, single tokens, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

from linattn import _arrays, _checks
from linattn._generic.feature_vjps import sum_to
from linattn._recurrence.parts import parts_of, pull_back_parts, solve_parts
from linattn._recurrence.problem import mask_of, recurrence_problem
from linattn._recurrence.walk import attend, solve_for_pullback, solve_in_loop, step
from linattn.typing import Array, ArrayT, Recurrence

__all__ = ["linear_recurrence", "linear_recurrence_vjp", "recurrence_step"]

UpdateRule: TypeAlias = Literal["linear", "gated", "delta", "gated_delta", "dplr"]
Pullback: TypeAlias = Callable[..., tuple[Array, ...]]


class _Options(TypedDict, total=False):
    log_decay: Array | None
    beta: Array | None
    erase_key: Array | None
    read_key: Array | None
    key_mask: Array | None
    key_lengths: Any
    return_states_every: int | None
    scale: float | None
    initial_state: Array | None
    chunk_size: int | None
    cu_seqlens: Sequence[int] | None


@overload
def linear_recurrence(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    update_rule: UpdateRule,
    return_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...


@overload
def linear_recurrence(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    update_rule: UpdateRule,
    return_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, Array]: ...


@overload
def linear_recurrence(
    query: Array,
    key: Array,
    value: Array,
    *,
    update_rule: str,
    return_state: bool = False,
    **options: Unpack[_Options],
) -> Any: ...


@_arrays.as_autocast("query", "key", "value")
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
    r"""Return the outputs of a linear recurrence: a matrix state with a gate and a delta rule.

    .. math::
        S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t (v_t - r_t)^T, \qquad
        o_t = s \, S_t^T q_t

    The delta rules have ``r_t = (diag(e^{g_t}) S_{t-1})^T k_t``: they write the difference between
    the value and the state's answer for the key. The linear and gated rules have ``r_t = 0,
    beta_t = 1``. Rules without a gate have ``g_t = 0``. The general rule "dplr" (diagonal plus low
    rank) reads and erases along keys of its own:

    .. math::
        S_t = \left( \mathrm{diag}(e^{g_t}) - (\beta_t \odot a_t) b_t^T \right) S_{t-1}
        + k_t v_t^T

    There is no feature map and no denominator. Letters: ``L`` tokens, ``d`` dim, ``e`` value dim,
    ``s`` scale. Leading axes ``...`` (batch, heads) broadcast: grouped queries are a key and a
    value with a heads axis of 1.

    Parameters
    ----------
    query : array, (..., L, d)
        float16, bfloat16, float32 or float64, of any array-API library.
    key : array, (..., L, d)
        Same library, dtype and device. Delta rules need keys of norm 1 or less: the state grows if
        ``beta |k|^2`` is above 2.
    value : array, (..., L, e)
        Same library, dtype and device.
    update_rule : {"linear", "gated", "delta", "gated_delta", "dplr"}
        The first four as ONNX's ``LinearAttention`` names them.
    log_decay : array, (..., L) or (..., L, d), optional
        g, at most 0, of any floating dtype. The gated rules need it, "dplr" may have it. One number
        per token (with fewer axes than ``key``) or one per key channel (with as many axes); axes of
        1 broadcast. It acts before the token is written. -inf forgets everything.
    beta : array, (..., L), or (..., L, d) for "dplr", optional
        The delta rules need it; in [0, 2] by convention. "dplr" may have it, default 1. Shaped like
        ``log_decay``.
    erase_key, read_key : array, (..., L, d), optional
        a and b, which "dplr" needs, of any floating dtype. The state must not grow: with norms
        ``|beta * a| |b|`` of at most 1 and a along b it does not.
    key_mask : boolean array, (L,) or key.shape[:-1] with axes of 1, optional
        True = a token that counts. A masked token leaves the state unchanged, even if its key,
        value, decay or beta is NaN. Its output reads that state.
    key_lengths : int or integer array, key.shape[:-2] with axes of 1, optional
        How many leading tokens count; the others are masked. Not with `cu_seqlens`.
    scale : float, optional
        s; default ``1 / sqrt(d)``, as in ONNX and flash-linear-attention.
    initial_state : array, (..., d, e), optional
        S before the first token, in the accumulation dtype. Default zeros.
    return_state : bool, optional
        Also return S after the last token. Default False.
    return_states_every : int, optional
        c: also return, as the last result, a list of the L // c states after c, 2 c, ... tokens.
        Sequences can continue from each of them. Not with `cu_seqlens`. Default: none.
    chunk_size : int, optional
        Tokens in a chunk, rounded up to a power of two; a backend may take fewer. Default 64; for
        the delta rules d / 2, but between 16 and 32: longer chunks lose digits.
    cu_seqlens : sequence of int, optional
        Borders of packed sequences: integers 0, ..., L on the host. Sequence i is tokens
        ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. States have a first axis for the sequences.

    Returns
    -------
    output : array, (..., L, e)
        In the library, dtype and device of the inputs.
    state : array, (..., d, e)
        Only with ``return_state``: float64 for float64 inputs, else float32, with the broadcast
        leading axes of all arrays except the query.
    states : list of array, (..., d, e)
        Only with ``return_states_every``.

    Raises
    ------
    TypeError
        Not arrays of one library, or not floating.
    ValueError
        Shapes, dtypes or devices do not fit; the rule is unknown; the rule needs an argument that
        is missing, or does not take one; ``log_decay`` is above 0 where tokens count.

    See Also
    --------
    recurrence_step : one token.
    linear_recurrence_vjp : with gradients.
    linattn.reference.recurrence : the loop.
    linattn.testing.check_recurrence : checks a kernel of your own.

    Notes
    -----
    Time O(L (d e + c (d + e))) with chunks of c tokens; gates per key channel add O(L d log c)
    exponentials. Extra memory is O(c^2 + d e) for each chunk solved in parallel, whatever the
    length. float16 and bfloat16 are accumulated in float32.

    A chunk of the delta rules is a unit lower triangular system, inverted from the inverses of its
    halves. No factor inside a chunk is above 1, whatever the gates. Results do not depend on the
    chunk size, to rounding, and agree with `recurrence_step`. States on the way divide the sequence
    into parts, which are solved one after the other. "dplr" has no code of NumPy's backend; it
    takes 3 times as long as "gated_delta", or less. Without a backend, what is left of a
    token or state after a decay within a chunk counts as 0 below 2^-40 of it (float64: 2^-400).
    NaN and infinity may reach other tokens of their chunk.

    References
    ----------
    Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    (2024), section 3; Yang et al., "Gated Delta Networks" (2024), section 3.3; Yang et al., "Gated
    Linear Attention Transformers with Hardware-Efficient Training" (2023), section 4; Dao and Gu,
    "Transformers are SSMs" (2024). "dplr": Peng et al., "RWKV-7" (2025); Hatamizadeh et al.,
    "Gated DeltaNet-2" (2026). ONNX operator set 27, ``LinearAttention``.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 8, 1000, 64), dtype=np.float32)
    >>> key /= np.linalg.norm(key, axis=-1, keepdims=True)
    >>> gates = {"log_decay": -rng.random((8, 1000)), "beta": rng.random((8, 1000))}
    >>> linattn.linear_recurrence(query, key, value, update_rule="gated_delta", **gates).shape
    (8, 1000, 64)
    """
    return_state = _checks.check_flag("return_state", return_state)
    problem = recurrence_problem(
        (query, key, value),
        update_rule=update_rule,
        log_decay=log_decay,
        beta=beta,
        erase_key=erase_key,
        read_key=read_key,
        key_mask=key_mask,
        key_lengths=key_lengths,
        scale=scale,
        initial_state=initial_state,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    if return_states_every is None:
        output, state = attend(problem)
        return (output, state) if return_state else output
    parts = parts_of(problem, return_states_every)
    found = solve_in_loop(problem, return_states_every)
    output, states = found or solve_parts(parts, attend)[:2]
    return _results(output, states, return_state, problem, return_states_every)


def _results(
    output: Array,
    states: list[Array],
    return_state: bool,
    problem: Recurrence,
    interval: int | None,
) -> Any:
    """Return the output with the states that were asked for."""
    extra: list[Any] = [states[-1]] if return_state else []
    if interval is not None:
        extra.append(states[: problem.key.shape[-2] // interval])
    return (output, *extra) if extra else output


@overload
def linear_recurrence_vjp(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    update_rule: UpdateRule,
    return_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[ArrayT, Pullback]: ...


@overload
def linear_recurrence_vjp(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    update_rule: UpdateRule,
    return_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[tuple[ArrayT, Array], Pullback]: ...


@overload
def linear_recurrence_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    update_rule: str,
    return_state: bool = False,
    **options: Unpack[_Options],
) -> tuple[Any, Pullback]: ...


@_arrays.as_autocast("query", "key", "value")
def linear_recurrence_vjp(
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
) -> tuple[Any, Pullback]:
    r"""Return a linear recurrence and a function that computes its gradients, in linear time.

    .. math::
        \bar S_{t-1} = \mathrm{diag}(e^{g_t}) (\bar S_t + s \, q_t \bar o_t^T - k_t \bar v_t^T)

    The term of ``k_t`` belongs to the delta rules only. Chunks are as in the forward pass.
    Letters: ``L`` tokens, ``d`` dim, ``e`` value dim, ``s`` scale.

    Parameters
    ----------
    query : array, (..., L, d)
        As for :func:`linear_recurrence`.
    key : array, (..., L, d)
        Same library, dtype and device.
    value : array, (..., L, e)
        Same library, dtype and device.
    update_rule, log_decay, beta, erase_key, read_key, key_mask, key_lengths, scale
        As for :func:`linear_recurrence`.
    initial_state, chunk_size, cu_seqlens
        As for :func:`linear_recurrence`.
    return_state, return_states_every : optional
        As for :func:`linear_recurrence`, whose results are then the first result, a tuple.

    Returns
    -------
    output : array, (..., L, e)
        What :func:`linear_recurrence` returns for the same arguments.
    pullback : callable
        ``pullback(grad_output, grad_state=None, grad_states=None)`` returns the gradients by query,
        key, value, ``log_decay``, ``beta``, ``erase_key``, ``read_key`` and ``initial_state``, in
        this order, for the arguments that were given. ``grad_output``, (..., L, e), is the
        derivative of the loss by ``output``. ``grad_state``, only with ``return_state``, is its
        derivative by ``state``; ``grad_states``, only with ``return_states_every``, a list of its
        derivatives by ``states``, each an array or None. Each gradient has the shape, dtype and
        device of its argument, summed over axes along which the argument was broadcast, and is 0
        for masked tokens. The pullback may be called more than once.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear_recurrence`. In the pullback: a cotangent has another shape, dtype or
        library, or the gradient of a state is given that was not returned.

    See Also
    --------
    linattn.testing.assert_gradient : a pullback against finite differences.

    Notes
    -----
    The pullback takes about three times as long as the forward pass. The forward pass stores one
    state per head before every group of chunks; the pullback solves the chunks again. It also needs
    the arguments: do not change them before you call it.

    The gradient of a log decay is a sum over all pairs of tokens on its two sides. Nothing is
    subtracted, so that it keeps its digits where decays are strong.

    References
    ----------
    Derived in this project; Yang et al., "Gated Linear Attention Transformers with
    Hardware-Efficient Training" (2023), section 4.3, has the gradient of a gate by a difference.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 100, 16))
    >>> log_decay = np.full((8, 100), -0.1)
    >>> output, pullback = linattn.linear_recurrence_vjp(
    ...     query, key, value, update_rule="gated", log_decay=log_decay
    ... )
    >>> [gradient.shape for gradient in pullback(output)]
    [(8, 100, 16), (8, 100, 16), (8, 100, 16), (8, 100)]
    """
    return_state = _checks.check_flag("return_state", return_state)
    given = {
        **{"log_decay": log_decay, "beta": beta, "erase_key": erase_key, "read_key": read_key},
        "initial_state": initial_state,
    }
    problem = recurrence_problem(
        (query, key, value),
        update_rule=update_rule,
        key_mask=key_mask,
        key_lengths=key_lengths,
        scale=scale,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        **given,
    )
    parts = parts_of(problem, return_states_every)
    output, states, parts, before = solve_parts(parts, solve_for_pullback)
    results = _results(output, states, return_state, problem, return_states_every)
    mask = mask_of(problem.key, key_mask, key_lengths)
    arguments = {"query": query, "key": key, "value": value} | given

    @_arrays.on_array_device
    def pullback(
        grad_output: Array,
        grad_state: Array | None = None,
        grad_states: Sequence[Array | None] | None = None,
    ) -> tuple[Array, ...]:
        _checks.check_cotangent(
            "grad_output", grad_output, "output", tuple(output.shape), problem.query
        )
        count = 0 if return_states_every is None else len(results[-1])
        _check_grad_states(grad_state, grad_states, states[-1], return_state, count)
        found = pull_back_parts(parts, before, grad_output, grad_state, grad_states or ())
        gradients = dict(zip((*problem.TOKENS, "initial_state"), found, strict=True))
        if update_rule == "dplr" and beta is not None:
            gradients |= _of_product(problem, gradients["erase_key"], arguments)
        return tuple(
            _like_argument(name, gradients[name], argument, mask, key.ndim)
            for name, argument in arguments.items()
            if argument is not None
        )

    return results, pullback


def _of_product(problem: Any, gradient: Array, given: dict[str, Any]) -> dict[str, Array]:
    """Gradients of ``beta`` and ``erase_key``, of which only the product is in the rule."""
    rates, key = given["beta"], given["erase_key"]
    rates = rates if rates.ndim == given["key"].ndim else rates[..., None]
    rates, key = (problem.xp.astype(x, problem.dtype) for x in (rates, key))
    return {"beta": gradient * key, "erase_key": gradient * rates}


def _check_grad_states(
    grad_state: Any, grad_states: Any, state: Array, returned: bool, count: int
) -> None:
    """Check the gradients of the last state, if it was returned, and of states on the way."""
    if grad_state is not None and not returned:
        raise ValueError("grad_state must be None without return_state=True, got an array")
    if grad_states is not None and len(grad_states) != count:
        raise ValueError(
            f"grad_states must have an array or None for each of the {count} states of "
            f"return_states_every, got {len(grad_states)}"
        )
    names = ["grad_state", *(f"grad_states[{i}]" for i in range(count))]
    for name, grad in zip(names, (grad_state, *(grad_states or ())), strict=False):
        if grad is not None:
            _checks.check_cotangent(name, grad, "a state", tuple(state.shape), state)


def _like_argument(
    name: str, gradient: Array, argument: Array, mask: Array | None, ndim: int
) -> Array:
    """Sum a gradient to the shape of its argument, which may lack the last axis; 0 if masked."""
    xp, shape = _arrays.namespace(argument), tuple(argument.shape)
    if mask is not None and name not in ("query", "initial_state"):
        gradient = xp.where(mask, gradient, xp.zeros_like(gradient))
    if name in ("log_decay", "beta") and len(shape) < ndim:
        gradient = sum_to(gradient, (*shape, 1), 0)[..., 0]
    return xp.astype(sum_to(gradient, shape, 0), argument.dtype, copy=False)


@_arrays.as_autocast("query", "key", "value")
def recurrence_step(
    query: ArrayT,
    key: Array,
    value: Array,
    state: Array,
    *,
    update_rule: str,
    log_decay: Array | None = None,
    beta: Array | None = None,
    erase_key: Array | None = None,
    read_key: Array | None = None,
    key_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[ArrayT, Array]:
    """Return the output of one more token of a recurrence, and the new state.

    Parameters
    ----------
    query, key : array, (..., d)
        One token; no length axis.
    value : array, (..., e)
        Same library, dtype and device.
    state : array, (..., d, e)
        S before the token, in the accumulation dtype; it is not changed.
    update_rule, scale
        As for :func:`linear_recurrence`.
    log_decay : array, (...) or (..., d), optional
        One number, with one axis fewer than ``key``, or one number per key channel.
    beta : array, (...), or (..., d) for "dplr", optional
        With one axis fewer than ``key``, or one number per key channel.
    erase_key, read_key : array, (..., d), optional
        As for :func:`linear_recurrence`.
    key_mask : boolean array, (...), optional
        Where it is False, the state stays as it is, and the output reads it.

    Returns
    -------
    output : array, (..., e)
        Output of :func:`linear_recurrence` over the whole sequence at this token.
    state : array, (..., d, e)
        S after the token.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear_recurrence`.

    Notes
    -----
    Time and memory O(d e), whatever the context length. Decays below 2^-40 (float64: 2^-400)
    count as 0.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> token = np.ones((8, 64)) / 8
    >>> state = np.zeros((8, 64, 64))
    >>> output, state = linattn.recurrence_step(token, token, token, state, update_rule="linear")
    >>> output.shape, state.shape
    ((8, 64), (8, 64, 64))
    """
    _, tokens = _checks.check_arrays(1, query=query, key=key, value=value)
    ndim = tokens[1].ndim
    problem = recurrence_problem(
        (token[..., None, :] for token in tokens),
        update_rule=update_rule,
        log_decay=_of_one_token(log_decay, ndim),
        beta=_of_one_token(beta, ndim if update_rule == "dplr" else None),
        erase_key=_of_one_token(erase_key, ndim),
        read_key=_of_one_token(read_key, ndim),
        key_mask=_of_one_token(key_mask),
        scale=scale,
        initial_state=state,
    )
    output: tuple[ArrayT, Array] = step(problem)
    return output


def _of_one_token(numbers: Any, ndim: int | None = None) -> Any:
    """Give the numbers of one token an axis for the length; return other objects unchanged.

    ``ndim``: axes of numbers with one for each key channel.
    """
    if not hasattr(numbers, "ndim"):
        return numbers
    return numbers[..., None, :] if numbers.ndim == ndim else numbers[..., None]
