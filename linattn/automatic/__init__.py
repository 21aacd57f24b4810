"""Attention for someone who does not want to choose how."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from linattn import _arrays, _checks, _dispatch
from linattn._driver.problem import exact_problem
from linattn.automatic import _causal, _full
from linattn.automatic._heads import Given
from linattn.automatic._report import AttentionReport, HeadRecord, make_report
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, ArrayT, Problem

__all__ = ["AttentionReport", "attention"]

MIN_ERROR_OF_WARNING = 0.1
"""Estimated error of a head above which a call without a tolerance warns."""


class _Options(TypedDict, total=False):
    is_causal: bool
    key_mask: Array | None
    key_bias: Array | None
    scale: float | None
    tolerance: float | None
    rng: Seed


@overload
def attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_report: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...


@overload
def attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_report: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, AttentionReport]: ...


@overload
def attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_report: bool = False,
    **options: Unpack[_Options],
) -> Any: ...


@_arrays.as_autocast("query", "key", "value")
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    tolerance: float | None = 0.1,
    rng: Seed = None,
    return_report: bool = False,
) -> Any:
    r"""Softmax attention: exact where that is cheap, else in linear time without retraining.

    .. math::
        o_i = \sum_j \mathrm{softmax}_j(s\, q_i \cdot k_j + b_j) \, v_j

    Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``m`` landmarks or entries,
    ``s`` scale, ``b`` biases of keys, 0 unless given.

    Parameters
    ----------
    query : array, (..., L, d)
        float16, bfloat16, float32 or float64, of any array-API library.
    key : array, (..., S, d)
        Same library, dtype and device.
    value : array, (..., S, e)
        Same library, dtype and device.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend. Where L = S, masked tokens are not used as queries either: not to fit to,
        and not to estimate the error.
    key_bias : floating array, of the shapes that a mask may have, optional
        b_j, added to the logits of key j. -inf masks a key, and not the query beside it. Default 0.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    tolerance : float or None, optional
        Largest relative output error of a head, kept with probability 0.95 for each; heads that
        meet it in no cheaper way are attended to exactly. Default 0.1. None accepts whatever 64
        landmarks give, on every sequence long enough for them to be cheaper; causal: exact.
    rng : int, Generator, SeedSequence or None, optional
        Seed of landmarks, or of the coreset, and of the rows held out.
    return_report : bool, optional
        Also return an :class:`AttentionReport`. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the inputs; or ``(output, report)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`; a tolerance or scale that is not positive; NaN or inf
        in tokens that are not masked, where landmarks are fitted.

    Warns
    -----
    UserWarning
        After a search it took exact attention, in quadratic time, for some head. With
        ``tolerance=None``: the estimated error of a head is above 0.1.

    See Also
    --------
    linear_attention, softmax_attention, CoresetAttention : to choose oneself.
    linattn.diagnostics.held_out_error : the estimate.

    Notes
    -----
    Full attention is by :class:`linattn.feature_maps.LandmarkFeatures` with 128 probes, with up to
    128 exact clusters (``exact_clusters`` of :func:`linattn.linear_attention`); without a tolerance
    there are no clusters but, where L = S, an exact window of 32 tokens. Of more than ``16 m`` keys
    (at least 1,024) so many are sampled to find landmarks, with odds of which half go by a key's
    squared distance to the mean key, and more landmarks of a head have the probes of the first.
    From 8,192 queries on, with a tolerance, queries choose of 512 and more clusters together: they
    are ordered so that those with like logits lie side by side, and each run of 8 chooses the
    clusters with the largest sums, over its queries, of a cluster's largest weight by its landmark
    over that of the query's largest, times what ``exact_clusters`` ranks by but the query, biases
    of keys included. Queries that are masked come last. Traced arrays, at which nothing can be
    fitted, take exact attention.

    *Causal attention.* The later half of the queries sees all keys of the earlier half: that square
    is full attention, by landmarks with exact clusters, fitted to keys and queries of the earlier
    half alone. So it goes on within both halves while squares are large enough; what is left near
    the diagonal is exact. A head for which few entries are expected to do, by the error of 64
    landmarks for the largest square, is attended to by :class:`linattn.CoresetAttention`, with
    blocks of 128 tokens, or of m where that is more. Without a tolerance all heads are exact.
    What was chosen, of which the exact rows of the whole sequence decide, an output of token i
    depends on no later token.

    *Search.* All heads are tried with m = 64, in full attention beyond some 14,000 keys with 128
    and beyond some 39,000 with 256. The exact rows tell the error for every number of exact
    clusters at once, and the cheapest that meets the tolerance is taken. A head is tried once more
    with the power of 2 at which it is expected to cost least, because errors fall with about the
    square root of m; what does not promise to be cheaper than exact attention is not tried. Heads
    of one number are worked on together. The first trial is made where it takes at most 0.15 of the
    time of exact attention (causal: 0.1 of that of a square, and so any other) even if it is in
    vain: a head is judged by 64 of its rows, and by as many as the tolerance needs if these promise
    to save a quarter and no more landmarks to save much more. Shorter sequences are attended to
    exactly at once. More landmarks are tried only where the squared error falls 2.75 times as fast
    with the first clusters as with as many keys at random. Squares share the tolerance, of which
    the sum of their squared errors is; the output of all is judged by other rows, at least twice as
    many.

    *Error.* It is always estimated, from rows of exact attention that nothing was fitted to: a 32nd
    of all, at least 64 and at most 256 a head, and up to a quarter of all where the tolerance needs
    them. They are drawn with odds ``1 / 2 + l_i / (6 mean l) + s_i / (3 mean s)`` and weighed by
    one over them. ``l_i = x_i.((X^T X)^-1 x_i)`` is the leverage of the query less the mean query,
    and ``s_i = w_i / (1 + w_i)`` with the weight ``w_i = exp(s q_i.k_i + b_i - found_i)`` of the
    query's own key over what the first landmarks find for all keys (without own keys, ``l_i / 2``).
    What is compared with the tolerance is the ``bound`` of
    :func:`linattn.diagnostics.held_out_error` at a probability of ``1 - 0.05 / n``, where n is how
    many trials a head may have, so that one that is taken by luck has a probability of 0.05 in all.
    Its rule of three says how little rows that agree can promise: rows that were not drawn count as
    far off as the mean output, times 2 for their odds. The bound may miss rows that are further off
    than that. In full attention the same rows choose how many clusters are exact, and judge.

    Biased: the error is that of the landmarks, and does not average out. Attention without
    structure (independent Gaussian keys with logits of standard deviation 1 and more) defeats every
    linear method.

    Time O((L + S) (m + p) (d + e)) and memory O(m (d + e)) beyond inputs and outputs, p probes, and
    for h held-out rows O(h S (d + e)) and O(S (e + h)) of a head. Held-out rows are worked out on
    the host.

    Examples
    --------
    >>> import linattn
    >>> query, key, value = linattn.datasets.pretrained_qkv()
    >>> output, report = linattn.attention(query, key, value, rng=0, return_report=True)
    >>> report.method
    'exact'
    """
    return_report = _checks.check_flag("return_report", return_report)
    is_causal = _checks.check_flag("is_causal", is_causal)
    problem = exact_problem(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        key_mask=key_mask,
        key_bias=key_bias,
    )
    scale = problem.query.shape[-1] ** -0.5 if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    if tolerance is not None:
        tolerance = _checks.check_finite_number("tolerance", tolerance, positive=True)
    given = Given(problem, key_mask, scale, tolerance, as_generator(rng), key_bias)
    way = _way_to_choose(problem)
    if way is None or not given.num_heads or not way.is_worth_a_search(given):
        output = given.exact(range(given.num_heads))
        heads = [HeadRecord.exact(problem)] * given.num_heads
    else:
        with _dispatch.limited_threads():
            output, heads = way.attend(given)
        message = _warning(given, heads)
        if message:
            warnings.warn(message, UserWarning, stacklevel=_arrays.caller_level())
    return (output, make_report(problem, heads)) if return_report else output


def _way_to_choose(problem: Problem) -> ModuleType | None:
    """Return what finds a way for each head; None where nothing can be fitted."""
    if problem.policy.lazy:
        return None
    return _causal if problem.sees.is_causal else _full


def _warning(given: Given, heads: list[HeadRecord]) -> str:
    """Say what a caller has to know; "" for nothing."""
    if given.tolerance is None:
        errors = [0.0 if np.isnan(head.error) else head.error for head in heads]
        worst = int(np.argmax(errors))
        count = sum(error > MIN_ERROR_OF_WARNING for error in errors)
        if not errors[worst] > MIN_ERROR_OF_WARNING:
            return ""
        name = f" of head {given.unravel(worst)}" if given.problem.lead else ""
        return (
            f"the error{name} is estimated at {errors[worst]:.2g} of the output, above "
            f"{MIN_ERROR_OF_WARNING:g} like those of {count} of {len(heads)} heads: pass "
            f"tolerance= for more columns, or exact attention where they do not do, or use "
            f"softmax_attention"
        )
    exact = [head for head in heads if not head.num_features]
    if not exact:
        return ""
    counted = "" if len(exact) == len(heads) else f" for {len(exact)} of {len(heads)} heads"
    worst_head = max(exact, key=lambda head: head.bound)
    return (
        f"tolerance={given.tolerance:g} takes exact attention{counted}, in quadratic time: the "
        f"error of a cheaper way was estimated at {worst_head.error:.2g}, and at most "
        f"{worst_head.bound:.2g}"
    )
