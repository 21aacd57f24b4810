"""Attention for JAX's gradients that keeps nothing but its arguments for the backward pass.

An eager call is computed by NumPy in the memory of its arrays, forward and backward. Under a trace
causal linear attention and recurrences are loops over chunks, compiled alike at every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(
        "linattn.interop.jax needs jax, which is not installed: pip install jax"
    ) from error

from linattn import _checks, recurrences
from linattn._driver.forward import solve
from linattn._driver.options import InteropOptions
from linattn._driver.problem import exact_problem
from linattn._driver.runner import initial_state
from linattn._driver.stamps import known_integer, stamped
from linattn._generic.feature_vjps import sum_to
from linattn._recurrence.problem import mask_of, recurrence_problem
from linattn.gradients import _like, differentiable_problem, pullback_of
from linattn.interop import _chunks
from linattn.interop._gradient import as_jax, attention_of
from linattn.typing import Array, ArrayT, FeatureMap, Recurrence, State

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
    """:func:`linattn.linear_attention` on JAX arrays, with a gradient in constant extra memory.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.linear_attention`.
    key : jax.Array, (..., S, d)
        Same dtype and device.
    value : jax.Array, (..., S, e)
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
        As for :func:`linattn.linear_attention`; their values are needed, outside of any trace.

    Returns
    -------
    jax.Array, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_attention`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`.
    NotImplementedError
        The map has no gradient.

    Notes
    -----
    Extra memory as of :func:`linattn.linear_attention_vjp`. Works under ``jax.jit`` and
    ``jax.vmap``. For forward-mode derivatives, or derivatives of the gradient, use
    :func:`linattn.linear_attention` itself.
    """
    return_state = _checks.check_flag("return_state", return_state)
    host, weights = _numbers_and_arrays(key_bias=key_bias, log_decay=log_decay)
    host |= {"is_causal": is_causal, "chunk_size": chunk_size, "cu_seqlens": cu_seqlens}
    host |= {"key_stop": key_stop, "prefix_length": prefix_length, "causal_block": causal_block}
    host |= {"normalize": normalize}
    before, known = _as_jax_state(initial_state)
    lengths = None if key_lengths is None else jnp.asarray(key_lengths)
    qkv = _taken(query=query, key=key, value=value)
    arrays = (*qkv, before, weights, *_taken(key_mask=key_mask), lengths)
    given = (feature_map, known, host, return_state)
    parts = (key_stop, prefix_length, causal_block, cu_seqlens)
    in_chunks = _linear_in_chunks if is_causal is True and parts == (None,) * 4 else None
    output, state = attention_of(_linear, given, in_chunks)(arrays)
    if not return_state:
        return output
    if type(state.length) is not int and isinstance(known_integer(state.length), int):
        state = state._replace(length=int(state.length))
    return output, stamped(state, initial_state, feature_map, _linear_problem(*given)(arrays))


def _linear_problem(feature_map: Any, known: Any, host: Any, *_: Any) -> Any:
    def problem_of(arrays: Any) -> Any:
        query, key, value, state, weights, key_mask, key_lengths = jax.tree.map(as_jax, arrays)
        state = None if state is None else state._replace(**known)
        masks = {"key_mask": key_mask, "key_lengths": key_lengths}
        options = {"initial_state": state, **masks, **weights, **host}
        return differentiable_problem(query, key, value, feature_map, **options)

    return problem_of


def _linear(feature_map: Any, known: Any, host: Any, return_state: bool) -> tuple[Any, Any]:
    problem_of = _linear_problem(feature_map, known, host)

    def attend(arrays: Any) -> Any:
        return solve(problem_of(arrays), return_state=return_state)[:2]

    def pull(arrays: Any, log_scale: Any, cotangents: Any) -> Any:
        grad_output, grad_state = cotangents
        before, weights = arrays[3:5]
        pullback = pullback_of(problem_of(arrays), weights, log_scale)
        gradients = pullback(grad_output, None if grad_state is None else grad_state.kvz)
        *qkv, given = (*gradients[:3], iter(gradients[3:]))
        state = None
        if before is not None:
            state = before._replace(kvz=next(given), log_scale=None, length=None, log_decay=None)
        return (*qkv, state, dict(zip(weights, given, strict=True)), None, None)

    return attend, pull


def _linear_in_chunks(
    feature_map: Any, known: Any, host: Any, return_state: bool
) -> tuple[Any, Any]:
    problem_of = _linear_problem(feature_map, known, host)
    numbers = {name: host[name] for name in ("is_causal", "chunk_size", "normalize")}

    def chunks_of(arrays: Any) -> tuple[_chunks.Chunks, Any]:
        problem = problem_of(arrays)
        first = initial_state(problem)

        def part_of(tokens: Any, state: Any, start: Any) -> Any:
            before = State(state[0], state[1], first.length + start)
            return differentiable_problem(
                **tokens, **numbers, feature_map=feature_map, initial_state=before
            )

        def solve_chunk(*chunk: Any) -> Any:
            output, after, _ = solve(part_of(*chunk), return_state=True)
            assert after is not None
            return output, (after.kvz, after.log_scale)

        def pull_chunk(tokens: Any, state: Any, start: Any, after: Any, *cotangents: Any) -> Any:
            """Let JAX differentiate the chunk; its state is on the scale that it had."""
            rest = {name: a for name, a in tokens.items() if name == "key_mask"}

            def attend(tokens: Any, kvz: Any) -> Any:
                output, found = solve_chunk(tokens | rest, (kvz, state[1]), start)
                log = jnp.where(after[1] == -jnp.inf, 0, found[1] - after[1])
                return output, found[0] * jnp.exp(log)[..., None]

            learned = {name: a for name, a in tokens.items() if name not in rest}
            return jax.vjp(attend, learned, state[0])[1](cotangents)

        chunks = _chunks.Chunks.of(solve_chunk, pull_chunk, _tokens_of(problem))
        return chunks, (first.kvz, first.log_scale)

    def attend(arrays: Any) -> Any:
        chunks, first = chunks_of(arrays)
        output, (kvz, log_scale) = chunks.attend(first)
        length = chunks.length + (0 if arrays[3] is None else arrays[3].length)
        return output, State(kvz, log_scale, length) if return_state else None

    def pull(arrays: Any, log_scale: Any, cotangents: Any) -> Any:
        (chunks, first), (grad_output, grad_state) = chunks_of(arrays), cotangents
        after = jnp.zeros_like(first[0]) if grad_state is None else grad_state.kvz
        found, grad_first = chunks.pull_back(first, grad_output, after)
        before, weights = arrays[3:5]
        given = {n: _like(n, found[n][..., None], array) for n, array in weights.items()}
        state = None
        if before is not None:
            grad_first = sum_to(grad_first, before.kvz.shape[:-2], 2)
            state = before._replace(kvz=grad_first, log_scale=None, length=None, log_decay=None)
        return (*(found[n] for n in ("query", "key", "value")), state, given, None, None)

    return attend, pull


def _tokens_of(problem: Any) -> dict[str, tuple[Any, int]]:
    """Return the arrays of a causal problem that have an axis of tokens, with the axis."""
    mask, bias, decay, _ = problem.weights
    length = problem.key.shape[-2]
    if mask is None and length % _chunks.CHUNK:
        mask = jnp.ones((length, 1), dtype=bool)
    rows = {"key_mask": mask, "key_bias": bias}
    if decay is not None:
        rows["log_decay"] = jnp.broadcast_to(decay, (*decay.shape[:-2], length, 1))
    tokens = {n: (getattr(problem, n), -2) for n in ("query", "key", "value")}
    return tokens | {n: (a[..., 0], -1) for n, a in rows.items() if a is not None}


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
    """:func:`linattn.softmax_attention` on JAX arrays, with a gradient in linear memory.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.softmax_attention`.
    key : jax.Array, (..., S, d)
        Same dtype and device.
    value : jax.Array, (..., S, e)
        Same dtype and device.
    scale, is_causal, key_mask, key_bias, key_lengths, local_window_size, sinks
        As for :func:`linattn.softmax_attention`. Gradients flow through ``key_bias``.
    key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linattn.softmax_attention`; their values are needed, outside of any trace.
    window_bias, far_bias
        As for :func:`linattn.softmax_attention`; constants in the gradient.

    Returns
    -------
    jax.Array, (..., L, e)
        As of :func:`linattn.softmax_attention`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`.

    Notes
    -----
    Works under ``jax.jit`` and ``jax.vmap``. For forward-mode derivatives, or derivatives of the
    gradient, use :func:`linattn.softmax_attention` itself.
    """
    host, weights = _numbers_and_arrays(key_bias=key_bias)
    host |= {"scale": scale, "is_causal": is_causal, "cu_seqlens": cu_seqlens}
    host |= {"key_stop": key_stop, "prefix_length": prefix_length, "causal_block": causal_block}
    host |= {"local_window_size": local_window_size, "sinks": sinks}
    sides = enumerate(far_bias) if isinstance(far_bias, tuple | list) else ()
    ends = {f"far_bias[{i}]": side for i, side in sides}
    numbers, biases = _numbers_and_arrays(window_bias=window_bias, **ends)
    lengths = None if key_lengths is None else jnp.asarray(key_lengths)
    qkv = _taken(query=query, key=key, value=value)
    given = (host, numbers, tuple(ends), None if ends else far_bias)
    arrays = (*qkv, weights, *_taken(key_mask=key_mask), lengths, biases)
    return attention_of(_softmax, given)(arrays)


def _softmax(host: Any, numbers: Any, ends: Any, far_bias: Any) -> tuple[Any, Any]:
    def problem_of(arrays: Any) -> Any:
        query, key, value, weights, *masks, biases = jax.tree.map(as_jax, arrays)
        options = dict(zip(("key_mask", "key_lengths"), masks, strict=True))
        biases = {"window_bias": None, **numbers, **biases}
        biases["far_bias"] = tuple(biases.pop(name, None) for name in ends) or far_bias
        return exact_problem(query, key, value, **biases, **weights, **options, **host)

    def attend(arrays: Any) -> Any:
        return solve(problem_of(arrays), return_state=False)[0]

    def pull(arrays: Any, _: Any, grad_output: Any) -> Any:
        weights = arrays[3]
        gradients = pullback_of(problem_of(arrays), weights)(grad_output)
        given = dict(zip(weights, gradients[3:], strict=True))
        return (*gradients[:3], given, None, None, None)

    return attend, pull


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
    """:func:`linattn.linear_recurrence` on JAX arrays, with a gradient that keeps no chunk.

    Parameters
    ----------
    query : jax.Array or ndarray, (..., L, d)
        As for :func:`linattn.linear_recurrence`.
    key : jax.Array, (..., L, d)
        Same dtype and device.
    value : jax.Array, (..., L, e)
        Same dtype and device.
    update_rule, log_decay, beta, erase_key, read_key, key_mask, key_lengths, scale
        As for :func:`linattn.linear_recurrence`. Gradients flow through all floating arrays.
    initial_state, return_state, return_states_every, chunk_size, cu_seqlens
        As for :func:`linattn.linear_recurrence`.

    Returns
    -------
    jax.Array, (..., L, e), or the tuple ``(output, state)``
        As of :func:`linattn.linear_recurrence`.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_recurrence`.

    Notes
    -----
    The backward pass solves the recurrence again; nothing but the arguments is stored. Works under
    ``jax.jit`` and ``jax.vmap``. For forward-mode derivatives, or derivatives of the gradient, use
    :func:`linattn.linear_recurrence` itself.
    """
    options: dict[str, Any] = {
        **{"update_rule": update_rule, "scale": scale, "chunk_size": chunk_size},
        **{"cu_seqlens": cu_seqlens, "return_state": return_state},
        "return_states_every": return_states_every,
    }
    gates = {
        **{"log_decay": log_decay, "beta": beta, "initial_state": initial_state},
        **{"erase_key": erase_key, "read_key": read_key},
    }
    named = {"query": query, "key": key, "value": value}
    named |= {name: array for name, array in gates.items() if array is not None}
    arrays = dict(zip(named, _taken(**named), strict=True))
    # By JAX itself: what is 0 at its end changes no state in the loop over chunks.
    masks = (None if key_mask is None else as_jax(key_mask)), key_lengths
    mask = mask_of(arrays["key"], *masks, cu_seqlens)
    for name in arrays:
        if mask is not None and name not in ("query", "initial_state"):
            is_number = name in ("log_decay", "beta") and arrays[name].ndim < arrays["key"].ndim
            arrays[name] = jnp.where(mask[..., 0] if is_number else mask, arrays[name], 0)
    if update_rule == "dplr" and beta is not None and erase_key is not None:
        rates = arrays.pop("beta")
        rates = rates if rates.ndim == arrays["key"].ndim else rates[..., None]
        arrays["erase_key"] = rates * arrays["erase_key"]
    is_whole = cu_seqlens is not None or return_states_every is not None
    in_chunks = None if is_whole else _recurrence_in_chunks
    return attention_of(_recurrence, (options,), in_chunks)(arrays)


def _recurrence(options: Any) -> tuple[Any, Any]:
    def attend(arrays: Any) -> Any:
        return recurrences.linear_recurrence(**jax.tree.map(as_jax, arrays), **options)

    def pull(arrays: Any, _: Any, cotangents: Any) -> Any:
        arrays = jax.tree.map(as_jax, arrays)
        pullback = recurrences.linear_recurrence_vjp(**arrays, **options)[1]
        has_many = options["return_state"] or options["return_states_every"] is not None
        grad_output, *rest = cotangents if has_many else (cotangents,)
        grad_state = rest.pop(0) if options["return_state"] else None
        names = [name for name in (*Recurrence.TOKENS, "initial_state") if name in arrays]
        return dict(zip(names, pullback(grad_output, grad_state, *rest), strict=True))

    return attend, pull


def _recurrence_in_chunks(options: Any) -> tuple[Any, Any]:
    numbers = {name: options[name] for name in ("update_rule", "scale", "chunk_size")}

    def chunks_of(arrays: Any) -> tuple[_chunks.Chunks, Any]:
        arrays = jax.tree.map(as_jax, arrays)
        qkv = [arrays[name] for name in ("query", "key", "value")]
        beside = (*Recurrence.TOKENS[3:], "initial_state")
        gates = {name: arrays.get(name) for name in beside}
        problem = recurrence_problem(qkv, cu_seqlens=None, **numbers, **gates)
        names = [name for name in Recurrence.TOKENS if name in arrays]

        def solve_chunk(tokens: Any, state: Any, _: Any) -> Any:
            return recurrences.linear_recurrence(
                **tokens, **numbers, initial_state=state, return_state=True
            )

        def pull_chunk(tokens: Any, state: Any, _: Any, __: Any, *cotangents: Any) -> Any:
            given = {**tokens, **numbers, "initial_state": state}
            pullback = recurrences.linear_recurrence_vjp(**given, return_state=True)[1]
            *found, grad_state = pullback(*cotangents)
            return dict(zip(names, found, strict=True)), grad_state

        tokens = {name: (getattr(problem, name), -2) for name in names}
        tokens |= {"beta": (problem.beta[..., 0], -1)} if problem.beta is not None else {}
        if problem.log_decay is not None and arrays["log_decay"].ndim < qkv[1].ndim:
            tokens["log_decay"] = problem.log_decay[..., 0], -1
        shape = (*problem.state_lead, qkv[1].shape[-1], qkv[2].shape[-1])
        first = jnp.zeros(shape, problem.dtype)
        if problem.initial_state is not None:
            first = first + problem.initial_state
        return _chunks.Chunks.of(solve_chunk, pull_chunk, tokens), first

    def attend(arrays: Any) -> Any:
        chunks, first = chunks_of(arrays)
        output, state = chunks.attend(first)
        return (output, state) if options["return_state"] else output

    def pull(arrays: Any, _: Any, cotangents: Any) -> Any:
        chunks, first = chunks_of(arrays)
        grad_output, grad_state = cotangents if options["return_state"] else (cotangents, None)
        grad_state = jnp.zeros_like(first) if grad_state is None else grad_state
        found, grad_first = chunks.pull_back(first, grad_output, grad_state)
        found["initial_state"] = grad_first
        return {n: sum_to(found[n], a.shape, 0).astype(a.dtype) for n, a in arrays.items()}

    return attend, pull


def _numbers_and_arrays(**named: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into numbers, which have no gradient, and arrays; leave out None."""
    given = {name: a for name, a in named.items() if a is not None}
    numbers = {name: a for name, a in given.items() if not hasattr(a, "shape")}
    arrays = {n: a for n, a in given.items() if n not in numbers}
    return numbers, {n: _taken(**{n: a})[0] if a.ndim else as_jax(a) for n, a in arrays.items()}


def _taken(**named: Any) -> tuple[Any, ...]:
    """Check arrays and convert NumPy arrays to JAX; None stays None."""
    return tuple(None if a is None else as_jax(_checks.check_array(n, a)) for n, a in named.items())


def _as_jax_state(state: Any) -> tuple[Any, dict[str, Any]]:
    """Check an initial state; return it with JAX arrays, and its fields that must not be traced."""
    if state is None:
        return None, {}
    _checks.check_state_record("initial_state", state)
    native = {name: as_jax(getattr(state, name)) for name in ("kvz", "log_scale")}
    # A trace would take these for numbers.
    known = {name: getattr(state, name) for name in ("fingerprint", "num_sequences")}
    return state._replace(**native, **dict.fromkeys(known)), known
