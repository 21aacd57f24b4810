"""A recurrence of yours against the loop: any framework, any layout.

Letters: ``B`` batch, ``H`` heads of states, ``L`` tokens, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from linattn import _arrays, _checks
from linattn.testing._evidence import Evidence, check_function, check_not_empty
from linattn.testing._recurrence_checks import (
    CHECKS,
    OWN_LENGTHS,
    RTOL,
    RULES,
    Cases,
    Floats,
    Kernel,
)
from linattn.testing.backend import BackendReport
from linattn.testing.check import SKIPPED, Row, check_on_fail, outcome, row_of

__all__ = ["LAYOUTS", "RecurrenceLayout", "RecurrenceReport", "check_recurrence"]


@dataclass(frozen=True)
class RecurrenceLayout:
    """How a kernel wants its arrays: from ``(B, H, L, n)`` and back.

    Attributes
    ----------
    tokens : callable
        ``tokens(x)`` of queries, keys, values and gates a channel ``(B, H, L, n)``.
    numbers : callable
        ``numbers(x)`` of one number a token ``(B, H, L)``.
    output : callable
        ``output(y, heads)`` gives ``(B, H, L, e)`` back.
    group : int
        Query heads that share a head of keys, values and states, next to each other.
    packed_states : callable
        ``packed_states(s)`` of the states ``(n, H, d, e)`` of n packed sequences.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import RecurrenceLayout
    >>> def swap(x):
    ...     return np.swapaxes(x, 1, 2)
    >>> layout = RecurrenceLayout(swap, swap, lambda y, heads: swap(y))
    >>> layout.tokens(np.zeros((1, 2, 5, 4))).shape
    (1, 5, 2, 4)
    """

    tokens: Callable[[Floats], Floats]
    numbers: Callable[[Floats], Floats]
    output: Callable[[Floats, int], Floats]
    group: int = 1
    packed_states: Callable[[Floats], Floats] = field(default_factory=lambda: np.asarray)


def _heads_last(x: Floats) -> Floats:
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def _packed_heads(x: Floats) -> Floats:
    return _heads_last(x).reshape(x.shape[0], x.shape[2], -1)


LAYOUTS = {
    "linattn": RecurrenceLayout(
        lambda x: x, lambda x: x, lambda y, heads: y, packed_states=lambda s: s[:, None]
    ),
    "fla": RecurrenceLayout(_heads_last, _heads_last, lambda y, heads: np.swapaxes(y, 1, 2)),
    "onnx": RecurrenceLayout(
        _packed_heads,
        _heads_last,
        lambda y, heads: np.swapaxes(y.reshape(*y.shape[:2], heads, -1), 1, 2),
        group=2,
    ),
}
"""``linattn``, ``(B, H, L, d)``; ``fla``, ``(B, L, H, d)``; ``onnx``, ``(B, L, H d)``."""


class RecurrenceReport(BackendReport):
    """What :func:`check_recurrence` found, a row a property; printed, a table of 80 columns."""


@_arrays.on_array_device
def check_recurrence(
    function: Callable[..., Any],
    *,
    update_rule: str,
    layout: str | RecurrenceLayout = "linattn",
    by_channel: bool = False,
    vjp: Callable[..., Any] | None = None,
    asarray: Callable[[Any], Any] = np.asarray,
    dtype: str = "float32",
    dim: int | None = None,
    value_dim: int | None = None,
    lengths: Sequence[int] | None = None,
    rtol: float | None = None,
    skip: Collection[str] = (),
    on_fail: str = "raise",
) -> RecurrenceReport:
    """Try a kernel for a gated or delta recurrence against the loop over tokens.

    Compared are outputs and states with :func:`linattn.reference.recurrence` in float64 and with
    two tokens worked out by hand; whole sequences with any split and with single tokens; what
    changed tokens do to earlier outputs; d and e up to 256, up to 2,100 tokens, lengths around
    every size of chunk from 16 to 256; log decays of 0, -0.0001, -30 and -50, beta of 0 and 2; keys
    that have not norm 1, nearly parallel and zero keys; 65,537 sequences, packed sequences, arrays
    that are not contiguous; gradients. Each row says at which lengths, heads, sizes and gates it
    tried the kernel.

    Parameters
    ----------
    function : callable
        ``function(query, key, value, log_decay=, beta=, erase_key=, read_key=, initial_state=)``
        returns ``(output, state)``; it is given what the rule has, and multiplies outputs with
        ``1 / sqrt(d)``. States are ``(B, H, d, e)``. For the check "packed" it is also given
        ``cu_seqlens=``, a list.
    update_rule : {"linear", "gated", "delta", "gated_delta", "dplr"}
        As for :func:`linattn.linear_recurrence`. "dplr" always has decays here, and beta in the
        check "beta" only.
    layout : {"linattn", "fla", "onnx"} or RecurrenceLayout, optional
        Of tokens: ``(B, H, L, d)``; ``(B, L, H, d)``, as in flash-linear-attention; or
        ``(B, L, H d)``, as in ONNX's LinearAttention, with two query heads for each head of the
        state. Numbers a token are ``(B, H, L)``, in the other two ``(B, L, H)``. Default "linattn".
    by_channel : bool, optional
        Whether decays have a number for each key channel. Default False.
    vjp : callable, optional
        ``vjp(query, key, value, ...)`` gives ``(output, pullback)``, and ``pullback(grad_output)``
        the gradients by query, key, value, ``log_decay``, ``beta``, ``erase_key``, ``read_key`` and
        ``initial_state``, in this order, those that were given. If it gives ``((output, state),
        pullback)``, gradients through the final state are compared too: ``pullback(grad_output,
        grad_state)``.
    asarray : callable, optional
        Makes an array of the kernel's framework of a NumPy array, such as ``torch.from_numpy``.
    dtype : {"float16", "bfloat16", "float32", "float64"}, optional
        Of queries, keys, values and ``grad_output``. Beside 16 bits, all others are float32. For
        "bfloat16", ``asarray`` is given float32 and its arrays are cast; NumPy needs ``ml_dtypes``
        imported. Default "float32".
    dim, value_dim : int, optional
        The only d, and the only e, for a kernel that is made for one, such as 128. Default: many.
    lengths : sequence of int, optional
        The only numbers of tokens, for a kernel that takes multiples of a chunk. The checks that
        need others are skipped: golden, split, step, borders, many, packed. Default: many.
    rtol : float, optional
        Largest difference, in terms of the largest entry but at least 1. Default 1e-9 in float64,
        2e-5 in float32, 4e-3 in float16 and 2e-2 in bfloat16; for gradients in 16 bits four times
        as much, since rounding errors of successive products add up.
    skip : collection of str, optional
        Checks to leave out, such as "packed".
    on_fail : {"raise", "return"}, optional
        Whether a failed check raises at the end, or is only in the report. Default "raise".

    Returns
    -------
    RecurrenceReport
        ``report.passed``; printed, a table.

    Raises
    ------
    CheckFailedError
        A check failed: an AssertionError, whose message is the whole table.
    TypeError, ValueError
        Not a function, an unknown rule, layout, dtype or check; sizes that are not positive; no
        lengths.

    Examples
    --------
    >>> from functools import partial
    >>> import linattn
    >>> from linattn.testing import check_recurrence
    >>> kernel = partial(linattn.linear_recurrence, update_rule="delta", return_state=True)
    >>> check_recurrence(kernel, update_rule="delta").passed
    True
    """
    check_on_fail(on_fail)
    check_function("function", function, "(query, key, value, ...) -> (output, state)")
    check_function("asarray", asarray, "(array) -> array")
    if vjp is not None:
        check_function("vjp", vjp, "(query, key, value, ...) -> (output, pullback)")
    _checks.check_flag("by_channel", by_channel)
    for name, value, known in (
        ("update_rule", update_rule, RULES),
        ("dtype", dtype, tuple(RTOL)),
        *(("skip", check, tuple(CHECKS)) for check in skip),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        layout = LAYOUTS[layout]
    for name, size in (
        ("dim", dim),
        ("value_dim", value_dim),
        *(("lengths", n) for n in lengths or ()),
    ):
        if size is not None:
            _checks.check_positive_int(name, size)
    if lengths is not None:
        check_not_empty("lengths", lengths)
        lengths = tuple(lengths)
    allowed = RTOL[dtype] if rtol is None else _checks.check_finite_number("rtol", rtol)
    kernel = Kernel(
        *(function, update_rule, by_channel, layout, asarray, dtype, allowed, vjp),
        *(dim, value_dim, lengths),
    )
    title = f"{getattr(function, '__name__', type(function).__name__)}, {update_rule}, {dtype}"
    rows = (
        _row(name, what, check, kernel)
        for name, (what, check) in CHECKS.items()
        if name not in skip
    )
    return outcome(RecurrenceReport(title, tuple(rows)), on_fail)


def _row(name: str, what: str, check: Callable[[Kernel], str | Cases], kernel: Kernel) -> Row:
    def checked() -> Evidence:
        with np.errstate(all="ignore"):
            found = check(kernel)
            if not isinstance(found, str):
                found = ", ".join(filter(None, [kernel.check(*case) for case in found]))
            return Evidence(name, found or "the loop in float64")

    kernel.tried.clear()
    if kernel.lengths is not None and name in OWN_LENGTHS:
        return Row(name, what, SKIPPED, "lengths were given")
    row = row_of(name, what, checked)
    return replace(row, detail=f"{row.detail}; {kernel.seen()}") if kernel.tried else row
