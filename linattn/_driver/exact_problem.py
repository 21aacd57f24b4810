"""From the arguments of softmax attention to a :class:`~linattn.typing.Problem`."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn import _arrays, _checks, _settings
from linattn._driver.modifiers import keys_inside, mask_and_bias
from linattn._driver.problem import check_pairing
from linattn._driver.relative_bias import check_relative_bias
from linattn._driver.visibility import Visibility, check_stop_axes, visibility
from linattn.typing import Exact, Problem

__all__ = ["ExactOptions", "exact_problem"]


class ExactOptions(NamedTuple):
    """What softmax attention is called with beside arrays, by the names it has here."""

    scale: Any = None
    is_causal: Any = False
    key_mask: Any = None
    key_bias: Any = None
    key_lengths: Any = None
    key_stop: Any = None
    prefix_length: Any = None
    causal_block: Any = None
    cu_seqlens: Any = None
    local_window_size: Any = None
    window_bias: Any = None
    far_bias: Any = None
    want_log: Any = False


def exact_problem(query: Any, key: Any, value: Any, **options: Any) -> Problem:
    """Check the arguments of softmax attention and describe the computation.

    ``options`` are those of :class:`ExactOptions`.
    """
    given = ExactOptions(**options)
    xp, (query, key, value) = _checks.check_arrays(query=query, key=key, value=value)
    windows = {name: getattr(given, name) for name in ("local_window_size", "window_bias")}
    sees = visibility(query, key, given, **windows)
    remedy = 'pass equal lengths, or is_causal="lower_right" for the last positions of the keys'
    check_pairing(query, key, value, is_causal=sees.pairs_tokens, remedy=remedy)
    scale = query.shape[-1] ** -0.5 if given.scale is None else given.scale
    spec = Exact(_checks.check_finite_number("scale", scale))
    settings = _settings.current_settings()
    dtype = _arrays.accumulation_dtype(xp, query.dtype, settings.precision)
    mask, key_bias = mask_and_bias(
        xp, key, dtype, given.key_mask, given.key_bias, query_len=query.shape[-2]
    )
    shapes = {"key": tuple(key.shape[:-2]), "value": tuple(value.shape[:-2])}
    lead = _checks.check_leading_axes(query=tuple(query.shape[:-2]), **shapes)
    state_lead = _checks.check_leading_axes(**shapes)
    check_stop_axes(sees.key_stop, state_lead)
    window = _check_local_window(given.local_window_size, query, key, sees)
    bias = check_relative_bias(
        given.window_bias, given.far_bias, query=query, lead=lead, dtype=dtype
    )
    if bias is not None:
        sees.check_one_sequence("window_bias", query, key)
    return Problem(
        xp=xp,
        dtype=dtype,
        query=query,
        key=key,
        value=value,
        key_mask=keys_inside(xp, key, given.key_lengths, mask),
        query_spec=spec,
        key_spec=spec,
        num_features=0,
        state_lead=state_lead,
        lead=lead,
        query_change=None,
        key_change=None,
        state=None,
        **sees.fields(),
        chunk_size=None,
        want_log=_checks.check_flag("return_log_normalizer", given.want_log),
        lazy=_arrays.is_lazy(query),
        num_threads=settings.num_threads,
        tf32=settings.precision == "tf32",
        key_bias=key_bias,
        local_window=window,
        relative_bias=bias,
    )


def _check_local_window(
    size: Any, query: Any, key: Any, sees: Visibility
) -> tuple[int, int] | None:
    """Check how many keys a query sees to its left and right; None where that is all of them."""
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        message = f"local_window_size must be an integer or a pair (left, right), got {size!r}"
        raise ValueError(message)
    sees.check_one_sequence("local_window_size", query, key)
    most = max(query.shape[-2], key.shape[-2], 1) - 1
    left, right = (
        most
        if side is None
        else min(_checks.check_positive_int(f"local_window_size[{i}]", side, least=0), most)
        for i, side in enumerate(sides)
    )
    right = 0 if sees.is_causal else right
    sees_all = left == most and right == (0 if sees.is_causal else most)
    return None if sees_all and not sees.query_start else (left, right)
