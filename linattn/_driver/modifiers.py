"""What changes the weights that a map gives: options as fields of a problem, checked."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from linattn import _arrays, _checks
from linattn._driver.options import Options
from linattn.typing import Array, Problem

__all__ = ["decay_of_rows", "keys_inside", "mask_and_bias", "total_decay", "weight_fields"]


def weight_fields(
    xp: ModuleType, arrays: Sequence[Array], dtype: Any, options: Options
) -> dict[str, Any]:
    """Fields of a problem that say which keys count, and how much, beside the map."""
    query, key, _ = arrays
    mask, bias = mask_and_bias(
        xp, key, dtype, options.key_mask, options.key_bias, query_len=query.shape[-2]
    )
    return {
        "key_mask": keys_inside(xp, key, options.key_lengths, mask),
        "key_bias": bias,
        "log_decay": _log_decay(xp, arrays, dtype, options),
        "normalize": _checks.check_flag("normalize", options.normalize),
    }


def _log_decay(
    xp: ModuleType, arrays: Sequence[Array], dtype: Any, options: Options
) -> Array | None:
    """Check how the state decays: with time, or in full attention with distance."""
    if options.log_decay is None:
        return None
    query, key, _ = arrays
    decay = _checks.check_state_decay(options.log_decay, key, xp, dtype)
    if options.exact_clusters is not None and options.exact_window is None:
        message = (
            f"exact_clusters needs exact_window under log_decay, got exact_clusters="
            f"{options.exact_clusters} alone: near keys, which decay least, must be exact too"
        )
        raise ValueError(message)
    if options.window_bias is not None:
        message = (
            "window_bias must be None with log_decay: both are weights of offsets; use one of the "
            "two, softmax_attention for any bias of offsets"
        )
        raise ValueError(message)
    if options.is_causal or not options.reads:
        return decay
    lengths = query.shape[-2], key.shape[-2]
    if lengths[0] != lengths[1]:
        message = (
            f"under log_decay query and key must have equal length, got {lengths[0]} and "
            f"{lengths[1]}: they are one sequence, in which weights decay with distance"
        )
        raise ValueError(message)
    if decay.shape[-2] != 1:
        message = (
            f"log_decay must be a number or one a head in full attention, where it acts in both "
            f"directions, got shape {tuple(options.log_decay.shape)}, one a token; use is_causal"
        )
        raise ValueError(message)
    return decay


def keys_inside(
    xp: ModuleType, key: Array, key_lengths: Any, key_mask: Array | None
) -> Array | None:
    """Check lengths of keys, and take what lies beyond out of a mask."""
    if key_lengths is None:
        return key_mask
    inside = _checks.check_key_lengths(key_lengths, key, xp)
    return inside if key_mask is None else key_mask & inside


def mask_and_bias(
    xp: ModuleType, key: Array, dtype: Any, key_mask: Any, key_bias: Any, *, query_len: int
) -> tuple[Array | None, Array | None]:
    """Check which keys count and how much; a key of bias -inf is masked as any other."""
    if key_mask is not None:
        key_mask = _checks.check_key_mask(key_mask, key, xp, query_len=query_len)
    if key_bias is None:
        return key_mask, None
    key_bias = _checks.check_key_bias(key_bias, key, xp, dtype, query_len=query_len)
    counts = key_bias > -xp.inf
    if _arrays.is_lazy(key_bias) or not bool(xp.all(counts)):
        key_mask = counts if key_mask is None else key_mask & counts
    return key_mask, key_bias


def decay_of_rows(problem: Problem, rows: slice) -> Array:
    """Log decay of some tokens, ``(..., n, 1)``."""
    decay: Any = problem.log_decay
    if decay.shape[-2] < problem.key.shape[-2]:
        return problem.xp.broadcast_to(decay, (*decay.shape[:-2], rows.stop - rows.start, 1))
    return decay[..., rows, :]


def total_decay(problem: Problem, rows: slice) -> Array:
    """Log decay of some tokens in all, ``(...)``."""
    return problem.xp.sum(decay_of_rows(problem, rows), axis=(-2, -1))
