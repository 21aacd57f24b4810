"""From the arguments of softmax attention to a :class:`~linattn.typing.Problem`."""

from __future__ import annotations

from typing import Any

from linattn import _arrays, _checks, _settings
from linattn._driver.problem import check_pairing
from linattn.typing import Exact, Problem

__all__ = ["exact_problem"]


def exact_problem(
    query: Any, key: Any, value: Any, *, scale: Any, is_causal: bool, key_mask: Any
) -> Problem:
    """Check the arguments of softmax attention and describe the computation."""
    is_causal = _checks.check_flag("is_causal", is_causal)
    xp, (query, key, value) = _checks.check_arrays(query=query, key=key, value=value)
    remedy = "pass equal lengths"
    check_pairing(query, key, value, is_causal=is_causal, remedy=remedy)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    spec = Exact(_checks.check_finite_number("scale", scale))
    settings = _settings.current_settings()
    mask = None
    if key_mask is not None:
        mask = _checks.check_key_mask(key_mask, key, xp, query_len=query.shape[-2])
    shapes = {"key": tuple(key.shape[:-2]), "value": tuple(value.shape[:-2])}
    return Problem(
        xp=xp,
        dtype=_arrays.accumulation_dtype(xp, query.dtype, settings.precision),
        query=query,
        key=key,
        value=value,
        key_mask=mask,
        query_spec=spec,
        key_spec=spec,
        num_features=0,
        state_lead=_checks.check_leading_axes(**shapes),
        lead=_checks.check_leading_axes(query=tuple(query.shape[:-2]), **shapes),
        query_change=None,
        key_change=None,
        state=None,
        is_causal=is_causal,
        chunk_size=None,
        want_log=False,
        lazy=_arrays.is_lazy(query),
        num_threads=settings.num_threads,
        tf32=settings.precision == "tf32",
    )
