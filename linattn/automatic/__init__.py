"""Softmax attention that chooses its method for a tolerance."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from linattn import _arrays, _checks, _dispatch
from linattn.automatic._call import Call
from linattn.automatic._heads import Given, Heads, check_given
from linattn.automatic._report import AttentionReport, HeadRecord, make_report
from linattn.sampling import Seed
from linattn.typing import Array, ArrayT

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
    r"""Return softmax attention to a tolerance: exact for short inputs, else in less time.

    .. math::
        o_i = \sum_j \mathrm{softmax}_j(s\, q_i \cdot k_j + b_j) \, v_j

    Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``m`` clusters,
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
        True = attend. If L = S, queries at masked positions are not used to find clusters or to
        estimate the error.
    key_bias : floating array, of the shapes that a mask may have, optional
        b_j, added to the logits of key j. -inf masks a key, but not the query at its position.
        Default 0.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    tolerance : float or None, optional
        Largest relative output error of a head, kept with probability 0.95 for each head: the norm
        of the error of all outputs over the norm of the outputs, their mean included. If only their
        variation matters, subtract the mean value first and add it to the output. A head gets exact
        attention if no cheaper method meets it. Default 0.1. None: take the result of 64
        clusters, 4 of them exact, if the sequence is long enough for them to be cheaper; causal
        attention is exact.
    rng : int, Generator, SeedSequence or None, optional
        Seed of clusters, and of the rows held out.
    return_report : bool, optional
        Also return an :class:`AttentionReport`. Default False.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the inputs; or ``(output, report)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`. The tolerance or scale is not positive.

    Warns
    -----
    UserWarning
        A search found no cheaper method for some head, which got exact attention in quadratic time.
        With ``tolerance=None``: the estimated error of a head is above 0.1.

    See Also
    --------
    linear_attention, softmax_attention, CoresetAttention : methods for your own choice.
    linattn.diagnostics.held_out_error : the estimate of the error.

    Notes
    -----
    *Full attention* groups the keys of a head into m clusters. Each query attends exactly to the
    keys of up to 128 exact clusters, and to every other cluster c as one key:

    .. math::
        e^{s\, q_i \cdot k_j + b_j} \approx e^{s\, (q_i - \bar q) \cdot K_c}
        e^{s\, \bar q \cdot k_j + b_j}, \qquad
        K_c = \frac{\sum_{j \in c} e^{s\, \bar q \cdot k_j + b_j} k_j}
        {\sum_{j \in c} e^{s\, \bar q \cdot k_j + b_j}}

    with the mean query ``q'``, written with a bar. Nothing changes if one vector is added to all
    queries and the biases make up for it, or to all keys. Query i chooses the clusters with the
    largest expected error: the mean weight of a cluster's keys times the root mean square of their
    logits about the logit of K_c. If L = S, the exact weight of key i counts too: a query whose own
    key would be missed chooses its cluster.

    Clusters are found from at most 12 m keys: k-means++, then Lloyd steps. Distances are in the
    covariance of the queries: the variance over queries of the difference of two logits. Half of a
    key's odds to be drawn are proportional to its squared distance to the mean key. Up to 16 keys
    become clusters of their own, beside the m: keys whose logits differ most from their
    cluster's, and whose values differ most from the mean. Rare queries read such keys. Traced
    arrays have no values to inspect: they get exact attention. So do torch tensors while gradients
    are recorded, as clusters have none: call under ``torch.no_grad()``.

    *Causal attention* is divided into squares. The later half of the queries sees all keys of the
    earlier half. That square is full attention, with clusters found from the earlier half only.
    Both halves are divided in the same way, while squares are large enough; the rest near the
    diagonal is exact. Without a tolerance all heads are exact. Given the chosen methods (which
    rows of the whole sequence decide), output i depends on no later token.

    *Search.* Heads are tried with m = 64. 64 exact rows give the error for every
    number of exact clusters. Errors fall about with the square root of m at a given share of exact
    keys. So a head may be tried once more, with the power of 2 of the least expected cost. If one
    of the two promises to be cheaper than exact attention, fresh rows judge the head, as many as
    the tolerance needs, and the cheapest number of exact clusters within the tolerance is taken.
    Exact rows are not thrown away: they are rows of the output, whether the head passes or not. Of
    a causal head that passes they are not, as later tokens change which rows are drawn.

    The first trial is made only if it takes at most 0.2 of the time of exact attention (causal: of
    its square). A causal call makes it only if a head that needs no exact clusters would gain, with
    all its exact rows counted: these have gaps between them, and are no rows of the output. Useless
    work of a call, of trials and of judging, takes at most a tenth of exact
    attention, plus what other heads save. Other heads and shorter sequences get exact attention
    directly. The squares of a head share its tolerance: their squared errors sum to half of its
    square. Their joint output is judged by fresh rows.

    *Error.* It is always estimated, from rows of exact attention that no choice of clusters
    depends on: a 32nd of all, at least 64 and at most 128 a head, and more if the tolerance needs
    them. They are drawn with odds ``1 / 2 + l_i / (2 mean l)`` and weighed by the inverse odds.
    ``l_i = x_i.((X^T X)^-1 x_i)`` is the leverage of x_i, the query less the mean query. Outlying
    queries are exact rows in every case, at most a 32nd of all: their leverages, over the mean, are
    above ``(1 + sqrt(2 log L / d))^2``, which the most distant of L normal queries has. In causal
    attention there are none, as later tokens would decide.

    The tolerance is compared with the ``bound`` of :func:`linattn.diagnostics.held_out_error` at a
    probability of 0.95. The bound uses a rule of three: rows that were not drawn count as wrong by
    the mean output, times 2 for their odds. It may miss rows with larger errors. In full attention
    the same rows choose the number of exact clusters and judge it, from the most exact down to the
    first that fails.

    The error of clusters is a bias and does not average out. Attention without structure
    (independent Gaussian keys with logits of standard deviation 1 and more) defeats every linear
    method.

    Time O((L + S) m (d + e)) and memory O((L + S) (d + e)) a head. For h held-out rows O(h S (d +
    e)) more time and O(h m e) more memory a head. Clusters and held-out rows are computed on the
    host.

    References
    ----------
    Derived in this project. Drawn keys: Bachem, Lucic, Krause, "Scalable k-Means Clustering via
    Lightweight Coresets" (2018), section 3; queries in clusters: Vyas et al., "Fast Transformers
    with Clustered Attention" (2020), section 3.2, whose exact keys are those of most weight.

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
    arrays = Heads(query, key, value, key_mask, key_bias)
    given = check_given(arrays, is_causal, scale, tolerance, rng)
    problem = given.problem
    # Lazy arrays have no values.
    call = Call(given) if given.num_heads and not problem.policy.lazy else None
    if call is None or not call.is_worth_a_search():
        output, heads = given.exact(), [HeadRecord.exact(problem)] * given.num_heads
    else:
        with _dispatch.limited_threads():
            output, heads = call.attend()
        message = _warning(given, heads)
        if message:
            warnings.warn(message, UserWarning, stacklevel=_arrays.caller_level())
    return (output, make_report(problem, heads)) if return_report else output


def _warning(given: Given, heads: list[HeadRecord]) -> str:
    """Return the text of the warning, "" for none."""
    if given.tolerance is None:
        errors = [0.0 if np.isnan(head.error) else head.error for head in heads]
        worst = int(np.argmax(errors))
        count = sum(error > MIN_ERROR_OF_WARNING for error in errors)
        if not errors[worst] > MIN_ERROR_OF_WARNING:
            return ""
        name = f" of head {given.unravel(worst)}" if given.problem.lead else ""
        return (
            f"the error{name} is estimated at {errors[worst]:.2g} of the output; errors "
            f"are above {MIN_ERROR_OF_WARNING:g} in {count} of {len(heads)} heads: pass a "
            f"tolerance, which takes more clusters, or exact attention where they do not "
            f"suffice, or use softmax_attention"
        )
    exact = [head for head in heads if not head.num_features]
    if not exact:
        return ""
    counted = "" if len(exact) == len(heads) else f" for {len(exact)} of {len(heads)} heads"
    worst_head, reason = max(exact, key=lambda head: head.bound), "no cheaper way is within it"
    if worst_head.bound > given.tolerance:
        # In as many digits as show that it is above.
        digits = (f"{worst_head.bound:.{n}g}" for n in range(2, 18))
        bound = next(text for text in digits if float(text) > given.tolerance)
        reason = (
            f"the error of clusters was estimated at {worst_head.error:.2g}, but rows that were "
            f"not computed exactly may make it {bound}"
        )
    return (
        f"tolerance={given.tolerance:g} takes exact attention{counted}, in quadratic time: {reason}"
    )
