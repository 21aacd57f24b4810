"""Attention for someone who does not want to choose how."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _dispatch
from linattn._driver.exact_problem import exact_problem
from linattn._driver.tasks import take_problem, task_index
from linattn.coreset import CoresetAttention
from linattn.diagnostics import held_out_error, held_out_rows
from linattn.feature_maps import LandmarkFeatures
from linattn.functional import linear_attention, softmax_attention
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, ArrayT, Problem

__all__ = ["AttentionReport", "attention"]

MIN_FEATURES = 64
PROBES = 128
WINDOW = 32
CORESET_BLOCK = 128

HELD_OUT = 64
"""Exact rows of each head from which the error of a call without a tolerance is estimated."""

ROWS_A_FEATURE = 4
"""Exact rows for each column where there is a tolerance: a fifth of the time, whatever m is."""

PROBABILITY = 0.95
"""Of meeting a tolerance in every head; the numbers of columns that may be tried share the rest."""

MIN_ERROR_OF_WARNING = 0.1
"""Estimated error of a head above which a call without a tolerance warns."""

OVERHEAD = 4.0
"""Pairs of exact attention that take the time of one pair of the others, on a CPU core."""


class AttentionReport(NamedTuple):
    """What :func:`linattn.attention` did.

    Attributes
    ----------
    method : str
        "exact", "landmarks" or "coreset".
    num_features : int or None
        Landmarks, or entries of the coreset; None when exact.
    exact_window : int or None
        Block length of the exact window, or of the coreset's exact blocks; None for none.
    error : ndarray, (...)
        Estimated relative output error of each head, from held-out exact rows; 0 when exact.
    cost : float
        Pairs worked out, over those of exact attention: fitting and exact rows included.
    bound : ndarray, (...)
        Upper bound of the error of each head, which is what a tolerance is compared with.
    """

    method: str
    num_features: int | None
    exact_window: int | None
    error: NDArray[np.float64]
    cost: float
    bound: NDArray[np.float64]


class _Options(TypedDict, total=False):
    is_causal: bool
    key_mask: Array | None
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


@_arrays.on_array_device
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    rng: Seed = None,
    return_report: bool = False,
) -> Any:
    r"""Softmax attention: exact where that is cheap, else in linear time without retraining.

    .. math::
        o_i = \sum_j \mathrm{softmax}_j(s\, q_i \cdot k_j) \, v_j

    Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``m`` landmarks or entries,
    ``s`` scale.

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
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    tolerance : float, optional
        Largest relative output error of any head, kept with probability 0.95. m is doubled until
        every head's bound is below it, up to exact attention. Default: none, m = 64.
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
        Without a tolerance: the estimated error of a head is above 0.1. With one: it took exact
        attention, in quadratic time, on a sequence long enough for the others.

    See Also
    --------
    linear_attention, softmax_attention, CoresetAttention : to choose oneself.
    linattn.diagnostics.held_out_error : the estimate.

    Notes
    -----
    Full attention is by :class:`linattn.feature_maps.LandmarkFeatures` with 64 landmarks and 128
    probes, and where L = S with an exact window of 32 tokens; causal attention by
    :class:`linattn.CoresetAttention` with 64 entries and blocks of 128. Pairs of a query or key
    and a landmark, probe or near key are counted; exact attention is taken where it works out no
    more than four times as many, and for traced and lazy arrays, at which nothing can be fitted.

    Biased: the error is that of the landmarks, and does not average out. Attention without
    structure (independent Gaussian keys with logits of standard deviation 1 and more) defeats every
    linear method.

    The error is always estimated, from rows of exact attention that landmarks were not fitted to:
    64 a head, or with a tolerance 4 m, drawn anew for each m. An estimate from 64 rows is itself
    off by some 10 %, more where few rows carry the error. A tolerance is compared with
    the ``bound`` of :func:`linattn.diagnostics.held_out_error`, at probability
    ``1 - 0.05 / n`` where n numbers of columns may be tried: so one that is taken by luck has a
    probability of 0.05 in all. Heads share nothing further, because an output is taken only if all
    heads pass, the worst among them. The bound speaks of rows like those drawn; where the
    error of a head is in a few rows among thousands, it may miss them.

    Time O((L + S) (m + p) (d + e)) and memory O(m (d + e)) beyond inputs and outputs, p probes;
    with a tolerance the sum over the m tried, and O(m (L + S) (d + e)) for exact rows.

    Examples
    --------
    >>> import linattn
    >>> query, key, value = linattn.datasets.pretrained_qkv()
    >>> output, report = linattn.attention(query, key, value, rng=0, return_report=True)
    >>> report.method
    'exact'
    """
    return_report = _checks.check_flag("return_report", return_report)
    problem = exact_problem(query, key, value, scale=scale, is_causal=is_causal, key_mask=key_mask)
    scale = problem.query.shape[-1] ** -0.5 if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    if tolerance is not None:
        tolerance = _checks.check_finite_number("tolerance", tolerance, positive=True)
    options: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "scale": scale}
    generator = as_generator(rng)
    exact_pairs, length = _exact_pairs(problem), problem.query.shape[-2]
    trials, query_mask = _trials(problem, tolerance), _query_mask(problem, key_mask)
    probability = 1 - (1 - PROBABILITY) / max(len(trials), 1)
    window, cost = _window(problem), 0.0
    for m in trials:
        num_rows = HELD_OUT if tolerance is None else ROWS_A_FEATURE * m
        cost += _pairs(problem, m) / exact_pairs + num_rows / length
        with _dispatch.limited_threads():
            output, probes = _linear(query, key, value, m, query_mask, window, options, generator)
            error, bound = _estimate(
                output, problem, query_mask, probes, num_rows, probability, generator
            )
        if tolerance is None or np.all(bound <= tolerance):
            if tolerance is None and np.any(error > MIN_ERROR_OF_WARNING):
                warnings.warn(_error_warning(error), UserWarning, stacklevel=3)
            method = "coreset" if is_causal else "landmarks"
            report = AttentionReport(method, m, window, error, cost, bound)
            return (output, report) if return_report else output
    if trials:
        warnings.warn(
            f"tolerance={tolerance:g} takes exact attention, in quadratic time: with {m} columns "
            f"the error was estimated at {np.max(error):.2g}, and at most {np.max(bound):.2g}",
            UserWarning,
            stacklevel=3,
        )
    output = softmax_attention(query, key, value, **options)
    if not return_report:
        return output
    none = np.zeros(problem.lead)
    return output, AttentionReport("exact", None, None, none, 1 + cost, none)


def _trials(problem: Problem, tolerance: float | None) -> list[int]:
    """Numbers of features to try before exact attention is cheaper: the first, or all."""
    if problem.lazy or 0 in problem.lead:
        return []
    exact_pairs, spent, m = _exact_pairs(problem), 0.0, MIN_FEATURES
    found: list[int] = []
    while OVERHEAD * (spent + _pairs(problem, m)) < exact_pairs:
        found.append(m)
        if tolerance is None:
            break
        spent += _pairs(problem, m)
        m *= 2
    return found


def _error_warning(error: NDArray[np.float64]) -> str:
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), 0.0, error)), error.shape)
    head = f" of head {tuple(int(i) for i in worst)}" if error.ndim else ""
    return (
        f"the error{head} is estimated at {error[worst]:.2g} of the output, above "
        f"{MIN_ERROR_OF_WARNING:g}: pass tolerance= for more columns, or exact attention where "
        f"they do not do, or use softmax_attention"
    )


def _linear(
    query: Array,
    key: Array,
    value: Array,
    m: int,
    query_mask: Array | None,
    exact_window: int | None,
    options: dict[str, Any],
    generator: np.random.Generator,
) -> tuple[Array, NDArray[np.float64] | None]:
    """Output of the linear method with m columns, and the probes that it was fitted to."""
    scale, key_mask = options["scale"], options["key_mask"]
    if options["is_causal"]:
        stream = CoresetAttention(m, block_size=CORESET_BLOCK, scale=scale, rng=generator)
        return stream.extend(query, key, value, key_mask=key_mask), None
    phi = LandmarkFeatures.fit(
        query,
        key,
        num_features=m,
        num_probes=max(PROBES, 2 * m),
        key_mask=key_mask,
        query_mask=query_mask,
        scale=scale,
        rng=generator,
    )
    output = linear_attention(query, key, value, phi, key_mask=key_mask, exact_window=exact_window)
    return output, phi.probes


def _estimate(
    output: Array,
    problem: Problem,
    query_mask: Array | None,
    probes: NDArray[np.float64] | None,
    num_rows: int,
    probability: float,
    generator: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Error of each head on rows of its own queries, and its bound; 0 for a head that has none.

    Heads under one mask share their rows.
    """
    length = problem.query.shape[-2]
    valid = np.ones(1, bool) if query_mask is None else _arrays.to_numpy(query_mask)
    masks = valid.shape[:-1]
    valid = np.broadcast_to(valid, (*masks, length))
    error, bound = np.zeros(problem.lead), np.zeros(problem.lead)
    for heads in np.ndindex(masks):
        pairs = zip(heads, masks, strict=True)
        task = tuple(slice(None) if n == 1 else slice(i, i + 1) for i, n in pairs)
        part = take_problem(problem, task)
        taken = None if probes is None else probes[task_index(probes.shape, 2, task)]
        found = held_out_error(
            output[task_index(tuple(output.shape), 2, task)],
            query=part.query,
            key=part.key,
            value=part.value,
            is_causal=part.is_causal,
            key_mask=None if part.key_mask is None else part.key_mask[..., 0],
            scale=part.query_spec.scale,
            rows=_rows(part, np.flatnonzero(valid[heads]), taken, num_rows, generator),
            probability=probability,
        )
        where = task_index(error.shape, 0, task)
        error[where], bound[where] = found.relative, found.bound
    return error, bound


def _rows(
    problem: Problem,
    queries: NDArray[np.intp],
    probes: NDArray[np.float64] | None,
    num_rows: int,
    generator: np.random.Generator,
) -> NDArray[np.intp]:
    """Draw rows of queries that no map was fitted to; all queries where too few are left."""
    rows = queries[held_out_rows(len(queries), 2 * num_rows, generator)]
    if probes is not None:
        rows = _without_probes(problem, rows, probes)
    if len(rows) < num_rows:
        return queries
    return rows[held_out_rows(len(rows), num_rows, generator)]


def _query_mask(problem: Problem, key_mask: Array | None) -> Array | None:
    """Tokens that count as queries to fit to: those that count as keys, where the axes agree."""
    if problem.query.shape[-2] != problem.key.shape[-2]:
        return None
    if key_mask is None or key_mask.ndim == 1:
        return key_mask
    axes = tuple(problem.query.shape[:-1])
    fits = key_mask.ndim == len(axes) and all(
        n in (1, length) for n, length in zip(key_mask.shape, axes, strict=True)
    )
    return key_mask if fits else None


def _without_probes(
    problem: Problem, rows: NDArray[np.intp], probes: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Rows whose query is no probe of the first head: a map is fitted to its probes."""
    first = (0,) * (problem.query.ndim - 2)
    index = problem.xp.asarray(rows, device=array_api_compat.device(problem.query))
    taken = problem.xp.take(problem.query[(*first, ...)], index, axis=-2)
    queries = _arrays.to_numpy(problem.xp.astype(taken, problem.dtype)).astype(np.float64)
    known = {probe.tobytes() for probe in probes[(0,) * (probes.ndim - 2)]}
    return rows[[query.tobytes() not in known for query in queries]]


def _window(problem: Problem) -> int | None:
    if problem.is_causal:
        return CORESET_BLOCK
    return WINDOW if problem.query.shape[-2] == problem.key.shape[-2] else None


def _exact_pairs(problem: Problem) -> float:
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    return L * (L + 1) / 2 if problem.is_causal else float(L * S)


def _pairs(problem: Problem, m: int) -> float:
    """Pairs of a query or key and a column, a probe or a near key."""
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    if problem.is_causal:
        # Each block: its queries read the entries and two blocks; entries and keys meet thrice.
        B = CORESET_BLOCK
        return float(L * (m + 2 * B) + L / B * 3 * m * (m + B))
    probes = max(PROBES, 2 * m)
    near = 3 * WINDOW if _window(problem) else 0
    return float(L * (m + near) + S * (m + 2 * probes))
