"""Merge outputs of attention over different keys into the output over all keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from linattn import _arrays, _checks
from linattn._numerics import finite_shift, ignore_fp_warnings
from linattn.typing import Array, ArrayT

__all__ = ["merge_outputs"]


def merge_outputs(parts: Iterable[tuple[ArrayT, Array]]) -> tuple[ArrayT, Array]:
    r"""Merge outputs of the same queries over different keys into the output over all of them.

    .. math::
        o_i = \sum_p \frac{e^{z^p_i}}{\sum_r e^{z^r_i}} \, o^p_i, \qquad
        z_i = \log \sum_p e^{z^p_i}

    with log normalizers z. Letters: ``L`` queries, ``e`` value dim, ``p`` parts.

    Parameters
    ----------
    parts : iterable of tuple (output, log_normalizer)
        What :func:`linattn.softmax_attention` and :func:`linattn.linear_attention` return with
        ``return_log_normalizer=True``: ``(..., L, e)`` and ``(..., L)``, -inf where the query sees
        no key of the part. Leading axes of different parts broadcast.

    Returns
    -------
    output : array, (..., L, e)
        In the library, dtype and device of the outputs; 0 for a query that sees no key of any part.
    log_normalizer : array, (..., L)
        The log normalizer over all keys, in the accumulation dtype. Results may be merged again,
        in any grouping.

    Raises
    ------
    TypeError
        Not arrays, or of different libraries; a part that is no pair.
    ValueError
        No parts; a log normalizer with another shape than its output has rows; dtypes, devices or
        shapes that do not fit.

    Notes
    -----
    The weights of all parts must be on one scale. Exact attention and maps of the softmax kernel
    with the same ``scale`` agree. Time and memory O(p L e) for each head. float16 and bfloat16 are
    merged in float32.

    The output of a part without keys is ignored. NaN in a log normalizer, or in an output of a
    part with keys, stays NaN.

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Juravsky et al.,
    "Hydragen" (2024), section 3.1, for keys that many queries share.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> parts = [
    ...     linattn.softmax_attention(query, key[rows], value[rows], return_log_normalizer=True)
    ...     for rows in (slice(0, 30), slice(30, 100))
    ... ]
    >>> output, log_normalizer = linattn.merge_outputs(parts)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    checked = _check_parts(parts)
    xp = _arrays.namespace(checked[0][0])
    dtype = _arrays.accumulation_dtype(xp, checked[0][0].dtype, None)
    with ignore_fp_warnings():
        logs = [xp.astype(log, dtype, copy=False)[..., None] for _, log in checked]
        most = logs[0]
        for log in logs[1:]:
            most = xp.maximum(most, log)
        shift = finite_shift(most, xp)
        total = numerator = None
        for (output, _), log in zip(checked, logs, strict=True):
            weight = xp.exp(log - shift)
            rows = xp.astype(output, dtype, copy=False)
            # No key of this part is seen: what it holds does not count, NaN included.
            rows = xp.where(log == -xp.inf, xp.zeros_like(rows), rows) * weight
            numerator = rows if numerator is None else numerator + rows
            total = weight if total is None else total + weight
        nothing = total == 0
        merged = numerator / xp.where(nothing, xp.ones_like(total), total)
        log_normalizer = (shift + xp.log(total))[..., 0]
        return cast("Any", xp.astype(merged, checked[0][0].dtype, copy=False)), log_normalizer


def _check_parts(parts: Any) -> list[tuple[Array, Array]]:
    """Check the pairs one by one, and that they fit each other."""
    parts = list(parts)
    if not parts:
        raise ValueError("parts must hold at least one (output, log_normalizer), got none")
    for part in parts:
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise TypeError(
                f"parts must be pairs (output, log_normalizer), as attention returns them with "
                f"return_log_normalizer=True, got {type(part).__name__}"
            )
    _, outputs = _checks.check_arrays(
        **{f"parts[{i}][0]": output for i, (output, _) in enumerate(parts)}
    )
    lengths = {tuple(output.shape[-2:]) for output in outputs}
    if len(lengths) > 1:
        raise ValueError(
            f"outputs of all parts must have one length and value dim, got {sorted(lengths)}"
        )
    _checks.check_leading_axes(
        **{f"parts[{i}][0]": tuple(output.shape[:-2]) for i, output in enumerate(outputs)}
    )
    return [
        (output, _check_log(f"parts[{i}]", output, log))
        for i, (output, (_, log)) in enumerate(zip(outputs, parts, strict=True))
    ]


def _check_log(name: str, output: Array, log: Any) -> Array:
    """Check one number for each row of an output, of its library but not of its dtype."""
    log = _checks.check_array(f"{name}[1]", log)
    # An axis more: there may be no rows.
    _checks.check_arrays(1, **{f"{name}[1]": log[..., None]})
    _checks.check_together(f"{name}[0]", output, f"{name}[1]", log)
    if tuple(log.shape) != tuple(output.shape[:-1]):
        raise ValueError(
            f"{name}[1] must be a log normalizer for each row of its output, shape "
            f"{tuple(output.shape[:-1])}, got {tuple(log.shape)}"
        )
    return log
