"""From a caller's arguments to a :class:`Recurrence`: all checks, no work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from linattn import _arrays, _checks, _settings
from linattn.typing import Array, Recurrence

RULES = ("linear", "gated", "delta", "gated_delta", "dplr")
NEEDED = {
    "log_decay": ("gated", "gated_delta"),
    "beta": ("delta", "gated_delta"),
    "erase_key": ("dplr",),
    "read_key": ("dplr",),
}
"""Rules that need an argument; the others reject it, but for what `OPTIONAL` names."""

OPTIONAL = (("log_decay", "dplr"), ("beta", "dplr"))

MAX_CHUNK = 64
"""Tokens of a chunk: longer chunks multiply more, shorter ones more often."""

MIN_SOLVED, MAX_SOLVED = 16, 32
"""Tokens of a solved triangle: half the dimensions of a key, between these bounds.

More keys lean on each other, and their system is worse conditioned.
"""


def sequences(problem: Recurrence) -> list[Recurrence]:
    """Each packed sequence as a problem of its own."""
    assert problem.borders is not None
    state = problem.initial_state
    return [
        replace(
            tokens_of(problem, slice(start, stop)),
            initial_state=None if state is None else state[i, ...],
            borders=None,
        )
        for i, (start, stop) in enumerate(pairwise(problem.borders))
    ]


def tokens_of(problem: Recurrence, rows: slice) -> Recurrence:
    """Return the problem with some of its tokens."""
    given = [name for name in problem.TOKENS if getattr(problem, name) is not None]
    return replace(problem, **{name: getattr(problem, name)[..., rows, :] for name in given})


def mask_of(key: Array, key_mask: Any, key_lengths: Any, cu_seqlens: Any = None) -> Array | None:
    """Mask of the tokens that count, ``(..., L, 1)``, or None for all of them."""
    if key_lengths is not None and cu_seqlens is not None:
        raise ValueError(
            "key_lengths must be None with cu_seqlens, whose borders are the lengths of the "
            "sequences; leave tokens at their ends out by key_mask"
        )
    xp, masks = _arrays.namespace(key), []
    if key_mask is not None:
        masks.append(_checks.check_key_mask(key_mask, key, xp, query_len=key.shape[-2]))
    if key_lengths is not None:
        masks.append(_checks.check_key_lengths(key_lengths, key, xp))
    if not masks:
        return None
    mask = masks[0] & masks[-1]
    if hasattr(mask, "rechunk"):  # Dask cuts both of two arrays that it joins
        sizes = zip(mask.shape[:-1], key.shape[:-1], mask.chunks, key.chunks, strict=False)
        mask = mask.rechunk((*(k if n == all_ else c for n, all_, c, k in sizes), -1))
    return mask


def recurrence_problem(
    tokens: Iterable[Any],
    *,
    update_rule: Any,
    scale: Any,
    initial_state: Any,
    key_mask: Any = None,
    key_lengths: Any = None,
    chunk_size: Any = None,
    cu_seqlens: Any = None,
    **numbers: Any,
) -> Recurrence:
    """Check the arguments of a recurrence; ``tokens`` are query, key and value.

    A token that is masked changes no state: its arrays are 0 but for the query. ``numbers`` are the
    other arrays with rows of tokens.
    """
    query, key, value = tokens
    xp, (query, key, value) = _checks.check_arrays(query=query, key=key, value=value)
    if query.shape[-2:] != key.shape[-2:] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"query, key and value must have one length, and query and key one dim, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    mask = None
    if key_mask is not None or key_lengths is not None:
        mask = mask_of(key, key_mask, key_lengths, cu_seqlens)
    given = {"key": key, "value": value} | _checked_numbers(numbers, update_rule, key, mask)
    (length, dim), value_dim = key.shape[-2:], value.shape[-1]
    leads = {name: tuple(x.shape[:-2]) for name, x in given.items()}
    settings = _settings.current_settings()
    dtype = _arrays.accumulation_dtype(xp, query.dtype, settings.precision, query)
    if initial_state is not None:
        initial_state = _check_state("initial_state", initial_state, (dim, value_dim), dtype, key)
        leads["initial_state"] = tuple(initial_state.shape[:-2])
    if mask is not None:
        given = {name: xp.where(mask, x, xp.zeros_like(x)) for name, x in given.items()}
    if update_rule == "dplr" and "beta" in given:
        rates = xp.astype(given.pop("beta"), dtype, copy=False)
        given["erase_key"] = rates * xp.astype(given["erase_key"], dtype, copy=False)
    borders = None
    if cu_seqlens is not None:
        borders = _checks.check_cu_seqlens(cu_seqlens, length).tolist()
        if initial_state is not None:
            _check_packed_state(initial_state, len(borders) - 1)
            leads["initial_state"] = leads["initial_state"][1:]
    state_lead = _checks.check_leading_axes(**leads)
    lead = _checks.check_leading_axes(query=tuple(query.shape[:-2]), **leads)
    scale = dim**-0.5 if scale is None else _checks.check_finite_number("scale", scale)
    if chunk_size is None:
        is_solved = "beta" in given or "read_key" in given
        chunk_size = min(max(dim // 2, MIN_SOLVED), MAX_SOLVED) if is_solved else MAX_CHUNK
    chunk_size = _checks.check_positive_int("chunk_size", chunk_size)
    names = ("key", "value", "log_decay", "beta")
    key, value, log_decay, beta = (given.pop(name, None) for name in names)
    return Recurrence(
        *(xp, query, key, value, log_decay, beta, initial_state),
        *(scale, dtype, state_lead, lead, chunk_size, settings.num_threads, borders),
        **given,
    )


def _checked_numbers(
    given: dict[str, Any], update_rule: Any, key: Array, mask: Array | None
) -> dict[str, Array]:
    """Check the arrays that a rule has beside tokens; return those that are given."""
    if update_rule not in RULES:
        raise ValueError(f"update_rule must be one of {', '.join(RULES)}, got {update_rule!r}")
    found = {}
    for name, rules in NEEDED.items():
        array = given.get(name)
        if (array is not None) != (update_rule in rules) and (name, update_rule) not in OPTIONAL:
            wanted = "given" if array is None else "None"
            came = "None" if array is None else "an array"
            raise ValueError(f"{name} must be {wanted} for update_rule={update_rule!r}, got {came}")
        if array is None:
            continue
        if name == "log_decay":
            found[name] = _checks.check_log_decay(array, key, by_channel=True, mask=mask)
        elif name == "beta":
            by_channel = update_rule == "dplr"
            found[name] = _checks.check_token_numbers("beta", array, key, by_channel=by_channel)
        else:
            found[name] = _checks.check_like_key(name, array, key)
            if tuple(array.shape[-2:]) != tuple(key.shape[-2:]):
                raise ValueError(
                    f"{name} must have the length and dim of key, {tuple(key.shape[-2:])}, for its "
                    f"last two axes, got shape {tuple(array.shape)}"
                )
    return found


def _check_packed_state(state: Array, count: int) -> None:
    if state.ndim < 3 or state.shape[0] != count:
        raise ValueError(
            f"initial_state must have an axis of {count} in front, one for each sequence of "
            f"cu_seqlens, got shape {tuple(state.shape)}"
        )


def _check_state(name: str, state: Any, shape: tuple[int, int], dtype: Any, like: Array) -> Array:
    """Check a state of a recurrence, ``(..., d, e)`` in the accumulation dtype."""
    state = _checks.check_like_key(name, state, like)
    if state.ndim < 2 or tuple(state.shape[-2:]) != shape:
        raise ValueError(
            f"{name} must have shape (..., {shape[0]}, {shape[1]}), got {tuple(state.shape)}"
        )
    if state.dtype != dtype:
        raise ValueError(
            f"{name} must have the accumulation dtype {getattr(dtype, '__name__', dtype)}, got "
            f"{state.dtype}; a state is float64 for float64 inputs and float32 for all narrower "
            f"ones"
        )
    return state
