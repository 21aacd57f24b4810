"""The options of a call, and which keys they let a query see."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.typing import Array, State, Visible


class _KeyOptions(TypedDict, total=False):
    """Which keys a query sees, and what they weigh."""

    is_causal: bool | Literal["lower_right"]
    key_mask: Array | None
    key_bias: Array | None
    key_lengths: Any
    key_stop: Any
    prefix_length: Any
    causal_block: int | None
    cu_seqlens: Any


class _OffsetOptions(TypedDict, total=False):
    """What depends on the offset of the key from the query."""

    sinks: int | None
    window_bias: Array | None
    far_bias: tuple[Any, Any] | None


class InteropOptions(_KeyOptions, total=False):
    """Keyword arguments that torch's and JAX's gradients take too, for type checkers."""

    log_decay: Array | float | None
    normalize: bool
    initial_state: State | None
    chunk_size: int | None


class GradientOptions(InteropOptions, _OffsetOptions, total=False):
    """Keyword arguments of :func:`linattn.linear_attention_vjp`, for type checkers."""

    exact_window: int | None


class WindowOptions(GradientOptions, total=False):
    """Keyword arguments of :func:`linattn.linear_attention`, for type checkers."""

    exact_clusters: int | None


class SoftmaxOptions(_KeyOptions, _OffsetOptions, total=False):
    """Keyword arguments of :func:`linattn.softmax_attention`, for type checkers."""

    scale: float | None
    local_window_size: int | tuple[int | None, int | None] | None


class Options(NamedTuple):
    """Options of a call of attention, by the names that they have in the driver."""

    is_causal: Any = False
    key_mask: Any = None
    key_bias: Any = None
    key_lengths: Any = None
    key_stop: Any = None
    prefix_length: Any = None
    causal_block: Any = None
    cu_seqlens: Any = None
    log_decay: Any = None
    normalize: Any = True
    initial_state: Any = None
    state_name: str = "initial_state"
    chunk_size: Any = None
    want_log: Any = False
    exact_window: Any = None
    exact_clusters: Any = None
    sinks: Any = None
    window_bias: Any = None
    far_bias: Any = None
    local_window_size: Any = None
    """Of softmax attention, as the scale."""
    scale: Any = None
    one_token: bool = False
    """Whether key and value may not add leading axes to the state."""
    reads: bool = True
    """Whether there are queries at all."""

    @property
    def has_window(self) -> bool:
        """Whether a query sees keys, or weighs them, as its position says."""
        windows = self.exact_window, self.local_window_size, self.window_bias
        return any(window is not None for window in windows)


# Which keys queries see ---------------------------------------------------------------------------

Integers = NDArray[np.int64]

LOWER_RIGHT = 'is_causal="lower_right"'


def pairs_tokens(sees: Visible) -> bool:
    """Whether each query goes along a key of its own."""
    return sees.is_causal and sees.option != LOWER_RIGHT


def check_one_sequence(name: str, sees: Visible, query: Array, key: Array) -> None:
    """Check that an option that asks for positions finds queries and keys at them."""
    if query.shape[-2] != key.shape[-2] and sees.option in ("", "is_causal"):
        raise ValueError(
            f"under {name} query and key must have equal length, got {query.shape[-2]} and "
            f'{key.shape[-2]}: both are one sequence there; is_causal="lower_right" takes the '
            f"queries for the last positions of the keys"
        )


def visibility(query: Array, key: Array, options: Options) -> Visible:
    """Check the options that say which keys queries see; at most one of them may."""
    lower_right = isinstance(options.is_causal, str) and options.is_causal == "lower_right"
    if not lower_right and not isinstance(options.is_causal, bool | np.bool_):
        got = options.is_causal
        raise TypeError(
            f'is_causal must be True, False or "lower_right", got '
            f"{type(got).__name__ if hasattr(got, 'shape') else repr(got)}; which keys each query "
            f"sees is said by key_stop"
        )
    is_causal = lower_right or bool(options.is_causal)
    named = {
        "is_causal": is_causal or None,
        "key_stop": options.key_stop,
        "prefix_length": options.prefix_length,
        "causal_block": options.causal_block,
    }
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"at most one of {', '.join(named)} must be given, got {' and '.join(given)}: each "
            f"says which keys a query sees; for the keys that both allow pass their key_stop alone"
        )
    option = given[0] if given else ""
    length, num_keys = int(query.shape[-2]), int(key.shape[-2])
    borders = None
    if options.cu_seqlens is not None:
        if length != num_keys:
            raise ValueError(
                f"under cu_seqlens query and key must have equal length, got {length} and "
                f"{num_keys}: both are the same packed sequences"
            )
        borders = _checks.check_cu_seqlens(options.cu_seqlens, num_keys)
        if options.key_lengths is not None:
            raise ValueError(
                "key_lengths must be None with cu_seqlens, whose borders are the lengths of the "
                "sequences; leave keys at their ends out by key_mask"
            )
        if options.exact_clusters is not None:
            raise ValueError(
                "exact_clusters must be None with cu_seqlens: keys are sorted by cluster along one "
                "sequence; make one call for each sequence"
            )
    if option in ("", "is_causal") and not (lower_right and length != num_keys):
        return Visible(right=0 if is_causal else None, cu_seqlens=borders, option=option)
    shown = LOWER_RIGHT if lower_right else option
    _check_alone(shown, options)
    start = num_keys - length if lower_right else 0
    if lower_right and options.has_window:
        return Visible(right=0, query_start=start, option=shown)
    stops = _stops(option, options, length, num_keys)
    if stops.ndim == 1 and (stops == num_keys).all():
        return Visible(query_start=start, option=shown)
    if length == num_keys and stops.ndim == 1 and (stops == np.arange(1, length + 1)).all():
        return Visible(right=0, option=shown)
    return Visible(key_stop=stops, query_start=start, option=shown)


def _check_alone(option: str, options: Options) -> None:
    """Check that an option with stops of keys comes without clusters and packed sequences."""
    if options.exact_clusters is not None:
        raise ValueError(
            f"exact_clusters must be None with {option}: queries choose clusters among all keys; "
            f"use exact_window or leave exact_clusters out"
        )
    if options.cu_seqlens is not None:
        raise ValueError(
            f"cu_seqlens must be None with {option}: {option} counts the keys of one sequence, and "
            f"these borders hold several; use is_causal=True, or one call for each sequence"
        )


def _stops(option: str, options: Options, length: int, num_keys: int) -> Integers:
    """Return the stop of each query, without leading axes if all heads share them."""
    position = np.arange(length)
    if option == "key_stop":
        stops = _checks.check_integers("key_stop", options.key_stop)
        _check_stops(stops, length, num_keys)
    elif option == "is_causal":
        stops = np.clip(position + 1 + num_keys - length, 0, num_keys)
    else:
        if length != num_keys:
            raise ValueError(
                f"under {option} query and key must have equal length, got {length} and "
                f"{num_keys}: both are one sequence there; give key_stop for other lengths"
            )
        if option == "causal_block":
            block = _checks.check_positive_int(option, options.causal_block)
            stops = np.minimum(block * (position // block + 1), num_keys)
        else:
            prefix = _checks.check_integers(option, options.prefix_length)
            _check_range(option, prefix, num_keys)
            stops = np.maximum(prefix[..., None], position + 1)
    if stops.ndim > 1:
        first = stops[(0,) * (stops.ndim - 1)] if stops.size else stops.reshape(-1)[:0]
        if stops.size == 0 and length:
            first = np.zeros(length, dtype=np.int64)
        if (stops == first).all():
            return first
    return stops


def _check_range(name: str, stops: Integers, num_keys: int) -> None:
    if stops.size and (stops.min() < 0 or stops.max() > num_keys):
        wrong = stops[(stops < 0) | (stops > num_keys)].flat[0]
        raise ValueError(
            f"{name} must be between 0 and the number of keys, {num_keys}, got {wrong}"
        )


def _check_stops(stops: Integers, length: int, num_keys: int) -> None:
    if stops.ndim == 0 or stops.shape[-1] != length:
        raise ValueError(
            f"key_stop must have shape ({length},) or (..., {length}), one for each query, got "
            f"shape {stops.shape}"
        )
    _check_range("key_stop", stops, num_keys)
    falls = np.argwhere(np.diff(stops, axis=-1) < 0)
    if len(falls):
        *lead, i = falls[0].tolist()
        first, second = stops[(*lead, slice(i, i + 2))].tolist()
        raise ValueError(
            f"key_stop must not decrease along the queries, got {first} and then {second} at "
            f"{i + 1}: a state takes up keys and never lets go of one"
        )


def with_local_window(size: Any, query: Array, key: Array, sees: Visible, sinks: int) -> Visible:
    """Check how many keys a query sees to its left and right, beside sinks."""
    if size is None:
        return sees
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an integer or a pair (left, right), got {size!r}"
        )
    check_one_sequence("local_window_size", sees, query, key)
    most = max(query.shape[-2], key.shape[-2], 1) - 1
    left, right = (
        most
        if side is None
        else min(_checks.check_positive_int(f"local_window_size[{i}]", side, least=0), most)
        for i, side in enumerate(sides)
    )
    if left == most and (sees.is_causal or right == most) and not sees.query_start:
        return sees
    if sees.is_causal:
        return sees._replace(left=left, right=0)
    return sees._replace(left=left, right=right, sinks_ahead=sinks > 0)


def check_stop_axes(stops: Integers | None, state_lead: tuple[int, ...]) -> None:
    """Check that stops differ only where states do."""
    if stops is None or stops.ndim == 1:
        return
    lead = stops.shape[:-1]
    fits = len(lead) <= len(state_lead) and all(
        a in (1, b) for a, b in zip(lead, state_lead[len(state_lead) - len(lead) :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"leading axes of key_stop must broadcast to those of key and value, {state_lead}, got "
            f"{lead}: queries that share their keys share a state, and see the same of it; for "
            f"other stops repeat the keys along that axis"
        )
