"""What changes the weights that a map gives: options as fields of a problem, checked."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from linattn import _arrays, _checks
from linattn._driver.options import Options
from linattn.typing import Array

__all__ = ["keys_inside", "mask_and_bias", "weight_fields"]


def weight_fields(
    xp: ModuleType, arrays: Sequence[Array], dtype: Any, options: Options
) -> dict[str, Any]:
    """Fields of a problem that say which keys count, and how much, beside the map."""
    query, key, _ = arrays
    mask, bias = mask_and_bias(
        xp, key, dtype, options.key_mask, options.key_bias, query_len=query.shape[-2]
    )
    return {"key_mask": keys_inside(xp, key, options.key_lengths, mask), "key_bias": bias}


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
