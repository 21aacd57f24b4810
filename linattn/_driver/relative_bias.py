"""Log weights of pairs that depend on how far apart they stand, and on nothing else."""

from __future__ import annotations

import numbers
from typing import Any

import array_api_compat

from linattn import _arrays, _checks
from linattn.typing import Array, RelativeBias

__all__ = ["check_relative_bias"]


def check_relative_bias(
    window_bias: Any, far_bias: Any, *, query: Array, lead: tuple[int, ...], dtype: Any
) -> RelativeBias | None:
    """Check a bias of near offsets and one number a side for those beyond; join them."""
    if window_bias is None:
        if far_bias is not None:
            message = "far_bias needs window_bias: it is what lies beyond that on either side"
            raise ValueError(message)
        return None
    xp = _arrays.namespace(query)
    table = _checks.check_array("window_bias", window_bias)
    _checks.check_together("query", query, "window_bias", table)
    _checks.check_log_weights("window_bias", table)
    _check_lead("window_bias", tuple(table.shape[:-1]), lead)
    if table.shape[-1] % 2 == 0:
        message = (
            f"window_bias must have a last axis of 2 r + 1, for offsets of keys from -r to r, got "
            f"{tuple(table.shape)}"
        )
        raise ValueError(message)
    table = xp.astype(table, dtype, copy=False)
    ends = (table[..., :1], table[..., -1:])
    if far_bias is not None:
        ends = _far_ends(far_bias, query, lead, dtype)
    shape = _checks.check_leading_axes(
        window_bias=tuple(table.shape[:-1]),
        **{f"far_bias[{i}]": tuple(end.shape[:-1]) for i, end in enumerate(ends)},
    )
    # Dask's expressions have no `broadcast_to`.
    nothing = xp.zeros((*shape, 1), dtype=dtype, device=array_api_compat.device(query))
    return RelativeBias(xp.concat([part + nothing for part in (ends[0], table, ends[1])], axis=-1))


def _far_ends(far_bias: Any, query: Array, lead: tuple[int, ...], dtype: Any) -> Any:
    """Check two biases, numbers or arrays of heads; each gets an axis for its one offset."""
    if not isinstance(far_bias, tuple | list) or len(far_bias) != 2:
        message = (
            f"far_bias must be a pair (left, right), each a number or an array with one for each "
            f"head, got {far_bias!r}"
        )
        raise TypeError(message)
    xp, ends = _arrays.namespace(query), []
    for i, end in enumerate(far_bias):
        name = f"far_bias[{i}]"
        # A scalar of NumPy is a number beside any library.
        if array_api_compat.is_array_api_obj(end) and not isinstance(end, numbers.Real):
            _checks.check_together("query", query, name, end)
            _checks.check_log_weights(name, end)
            _check_lead(name, tuple(end.shape), lead)
            ends.append(xp.astype(end, dtype, copy=False)[..., None])
        else:
            left_out = isinstance(end, numbers.Real) and end == -float("inf")
            number = -float("inf") if left_out else _checks.check_finite_number(name, end)
            device = array_api_compat.device(query)
            ends.append(xp.full((1,), number, dtype=dtype, device=device))
    return ends


def _check_lead(name: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    fits = len(shape) <= len(lead) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(lead), strict=False)
    )
    if not fits:
        message = (
            f"leading axes of {name} must broadcast to those of the output, {lead}, got {shape}"
        )
        raise ValueError(message)
