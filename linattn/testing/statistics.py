"""Thresholds: how far chance may go, with a false-alarm rate that is proved, not fitted.

Letters: ``n`` independent draws X_1..X_n of mean mu and variance sigma^2, ``alpha`` the false-alarm
rate, ``L = log(2 / alpha)``.

The kit's own assertions use :func:`score_test`. It needs the exact variance (or an upper bound of
it) and no more, however heavy the tails are: ``|sum psi(a (X_i - mu))|`` exceeds its
threshold with a probability of at most alpha. Near the mean it acts as a sample mean that may be
``sqrt(2 L)`` standard errors away: 6.54 for alpha = 1e-9, where a Gaussian would need 6.11. Where
no variance is known, :func:`variance_bound` bounds it from draws, given a bound of the kurtosis;
:func:`betting_test` needs none, if draws are bounded. The other two bound a sample mean:
:func:`moment_bound` from exact moments, :func:`bernstein_bound` for bounded draws.

Several quantities of the same draws are tested together by the average of their e-values, which are
never negative and have a mean of at most 1 where all is right: so has their average, however they
depend on each other, and it reaches ``1 / alpha`` with a probability of at most alpha (Markov). A
union bound rejects only where one of k e-values reaches ``k / alpha``; then the average does too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, isfinite, lgamma, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "AtMostTest",
    "ScoreTest",
    "at_most_test",
    "bernstein_bound",
    "betting_test",
    "detectable_shift",
    "mean_bound",
    "moment_bound",
    "score_test",
    "variance_bound",
    "variance_factor",
]

Floats = NDArray[np.float64]


class ScoreTest(NamedTuple):
    """What :func:`score_test` and :func:`betting_test` find.

    Attributes
    ----------
    score : ndarray, (...)
        Of each entry the larger of both sides' scores; NaN where a draw is NaN.
    threshold : float
        One score at or above it refutes the claim, and so does NaN.
    passed : bool
        Whether all entries together are below: the average of their e-values is less than
        ``1 / alpha``. Several scores just below the threshold do not pass.
    """

    score: Floats
    threshold: float
    passed: bool


class AtMostTest(NamedTuple):
    """What :func:`at_most_test` finds.

    Attributes
    ----------
    log_p : ndarray, (...)
        Upper bound of the log probability of means as large as these.
    threshold : float
        At or below it the claim is refuted.
    passed : bool
        Whether every entry is above.
    """

    log_p: Floats
    threshold: float
    passed: bool


def _check_rate(name: str, rate: float) -> float:
    """Check a probability strictly between 0 and 1."""
    if not (isinstance(rate, float) and 0 < rate < 1):
        raise ValueError(f"{name} must be a float between 0 and 1, got {rate!r}")
    return rate


def _log_odds(false_alarm_rate: float, num_tests: int, sides: int) -> float:
    _check_rate("false_alarm_rate", false_alarm_rate)
    return log(sides * num_tests / false_alarm_rate)


def _psi(x: Floats) -> Floats:
    return np.sign(x) * np.log1p(np.abs(x) + x * x / 2)


def _below(log_e_values: list[Floats], false_alarm_rate: float) -> bool:
    """Whether the average e-value is less than ``1 / alpha``; NaN is not."""
    flat = np.concatenate([np.ravel(values) for values in log_e_values])
    with np.errstate(invalid="ignore"):
        total = float(np.logaddexp.reduce(flat, initial=-inf))
    return total - log(max(1, flat.size)) < -log(false_alarm_rate)


def score_test(
    deviations: ArrayLike,
    variance: ArrayLike,
    *,
    false_alarm_rate: float = 1e-9,
    rounding: ArrayLike = 0.0,
    side: str = "both",
) -> ScoreTest:
    r"""Test a mean by a bounded-influence score: rigorous for every distribution of that variance.

    .. math::
        S = \sum_i \psi(a (X_i - \mu)), \qquad \psi(t) = \mathrm{sgn}(t) \log(1 + |t| + t^2 / 2),
        \qquad a = \sqrt{2 L / (n \sigma^2)}

    Parameters
    ----------
    deviations : array_like, (n, ...)
        ``X_i - mu``, mu the claimed mean; independent along the first axis. The trailing entries
        may depend on each other.
    variance : array_like, (...)
        The claimed variance, or an upper bound of it.
    false_alarm_rate : float, optional
        alpha, of all entries together. Default 1e-9.
    rounding : array_like, (...), optional
        How far rounding may have moved a draw. Default 0.
    side : {"both", "above"}, optional
        Whether a mean that is too small counts. Default "both".

    Returns
    -------
    ScoreTest

    Raises
    ------
    ValueError
        A rate outside (0, 1), an unknown side.

    Notes
    -----
    False-alarm rate: rigorous. ``psi(t) <= log(1 + t + t^2 / 2)``, so that ``E exp(S)`` is at most
    ``(1 + a^2 sigma^2 / 2)^n``, and ``exp(S) / (1 + a^2 sigma^2 / 2)^n`` is an e-value; the same
    for -S. With k entries and both sides ``L = log(2 k / alpha)``: one entry alone fails at
    ``S >= n log(1 + a^2 sigma^2 / 2) + L``, several that agree fail below it, since e-values are
    averaged. What one entry detects: :func:`detectable_shift`. Time O(n) an entry.

    References
    ----------
    Catoni, "Challenging the empirical mean and empirical variance: a deviation study" (2012),
    section 2, whose estimator of a mean this turns into a test.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import statistics
    >>> x = np.random.default_rng(0).standard_normal(1000)
    >>> bool(statistics.score_test(x, 1.0).passed)
    True
    """
    if side not in ("both", "above"):
        raise ValueError(f"side must be 'both' or 'above', got {side!r}")
    d = np.asarray(deviations, dtype=np.float64)
    n, sides = d.shape[0], 2 if side == "both" else 1
    L = _log_odds(false_alarm_rate, max(1, d[0].size), sides)
    slack = np.asarray(rounding, dtype=np.float64)
    tiny = np.finfo(np.float64).tiny
    a = np.sqrt(2 * L / (n * np.maximum(np.asarray(variance), np.maximum(slack**2, tiny))))
    with np.errstate(over="ignore", invalid="ignore"):
        scores = [np.sum(_psi(a * (d - slack)), axis=0)]
        if side == "both":
            scores.append(-np.sum(_psi(a * (d + slack)), axis=0))
        allowance = n * log1p(L / n)
        passed = _below([score - allowance for score in scores], false_alarm_rate)
    return ScoreTest(np.max(np.stack(scores), axis=0), allowance + L, passed)


def betting_test(
    deviations: ArrayLike, bound: ArrayLike, *, false_alarm_rate: float = 1e-9
) -> ScoreTest:
    r"""Test a mean of bounded draws of unknown variance: rigorous for every such distribution.

    .. math::
        S = \sum_i \log(1 \pm \lambda_i (X_i - \mu)), \qquad
        \lambda_i = \min\Bigl(\frac{3}{4 b}, \sqrt{2 L / (n v_{i-1})}\Bigr), \qquad
        v_i = \frac{b^2 / 4 + \sum_{j \le i} (X_j - \mu)^2}{i + 1}

    Parameters
    ----------
    deviations : array_like, (n, ...)
        ``X_i - mu``, mu the claimed mean; independent along the first axis. The trailing entries
        may depend on each other.
    bound : array_like, (...)
        b, the largest possible ``|X - mu|``.
    false_alarm_rate : float, optional
        alpha, of all entries together. Default 1e-9.

    Returns
    -------
    ScoreTest

    Raises
    ------
    ValueError
        A rate outside (0, 1), a deviation above the bound.

    Notes
    -----
    False-alarm rate: rigorous. ``exp(S)`` is what a bet of the share lambda_i of one's money on
    each draw makes of 1; the shares are fixed before their draw, so that its mean is 1. Entries and
    sides are averaged. It is as sharp as a test that is given the variance where that is large
    beside ``b sqrt(L / n)``; from ``n`` of about ``2 L b / shift`` on it sees any shift that is
    large beside the spread. Time O(n) an entry.

    References
    ----------
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024),
    section 4.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import statistics
    >>> x = np.random.default_rng(0).standard_normal(1000)
    >>> bool(statistics.betting_test(np.clip(x, -1, 1), 1.0).passed)
    True
    """
    d = np.asarray(deviations, dtype=np.float64)
    b = np.asarray(bound, dtype=np.float64)
    if np.any(np.abs(d) > b * (1 + 1e-9)):
        raise ValueError(f"deviations must be at most bound, got {np.max(np.abs(d) - b):.3g} more")
    n = d.shape[0]
    L = _log_odds(false_alarm_rate, max(1, d[0].size), 2)
    before = np.cumsum(d * d, axis=0) - d * d
    v = (b * b / 4 + before) / np.arange(1, n + 1).reshape(-1, *(1 for _ in d.shape[1:]))
    bets = np.minimum(0.75 / b, np.sqrt(2 * L / (n * v))) * d
    scores = [np.sum(np.log1p(sign * bets), axis=0) for sign in (1, -1)]
    return ScoreTest(np.max(np.stack(scores), axis=0), L, _below(scores, false_alarm_rate))


def variance_bound(
    squares: ArrayLike, kurtosis: float, *, false_alarm_rate: float = 1e-9
) -> Floats:
    r"""Upper bound of a variance from draws, for distributions whose kurtosis has a bound.

    .. math::
        \sigma^2 \le \frac{1}{\kappa q} \frac{1}{n} \sum_i (X_i - \mu)^2, \qquad
        n\, \mathrm{KL}(q \,\|\, 1 / \kappa) = \log(k / \alpha), \quad q < 1 / \kappa

    Parameters
    ----------
    squares : array_like, (n, ...)
        ``(X_i - mu)^2``, mu the mean; independent along the first axis.
    kurtosis : float
        kappa, at least ``E (X - mu)^4 / sigma^4``; above 1.
    false_alarm_rate : float, optional
        alpha: that one of the k entries has a larger variance. Default 1e-9.

    Returns
    -------
    ndarray, (...)
        inf where the draws are too few: fewer than about ``kappa log(k / alpha)``.

    Raises
    ------
    ValueError
        A rate outside (0, 1), a kurtosis of 1 or less.

    Notes
    -----
    Rigorous. Of all distributions on [0, inf) with mean 1 and second moment kappa the two-point
    distribution on 0 and kappa has the largest ``E exp(-s Y)`` for every s > 0 (``1 - exp(-s y)``
    lies above the parabola through 0 that touches it at kappa), so that a mean of squares is at
    most ``kappa q sigma^2`` with probability at most ``exp(-n KL(q || 1 / kappa))``; entries by a
    union bound.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import statistics
    >>> x = np.random.default_rng(0).standard_normal(1000)
    >>> round(float(statistics.variance_bound(x**2, kurtosis=3.0)), 2)
    1.33
    """
    y = np.asarray(squares, dtype=np.float64)
    factor = variance_factor(kurtosis, y.shape[0], max(1, y[0].size), false_alarm_rate)
    return np.mean(y, axis=0) * factor if factor < inf else np.full(y.shape[1:], inf)


def variance_factor(
    kurtosis: float, num_draws: int, num_tests: int, false_alarm_rate: float
) -> float:
    """``1 / (kappa q)`` of :func:`variance_bound`; inf where the draws are too few."""
    _check_rate("false_alarm_rate", false_alarm_rate)
    if not kurtosis > 1:
        raise ValueError(f"kurtosis must be above 1, got {kurtosis!r}")
    p, need = 1 / kurtosis, _log_odds(false_alarm_rate, num_tests, 1) / num_draws
    low, high = 0.0, p
    for _ in range(60):
        q = (low + high) / 2
        divergence = q * log(q / p) + (1 - q) * (log1p(-q) - log1p(-p))
        low, high = (q, high) if divergence >= need else (low, q)
    # Below the root, where the bound is safe; at 0 no frequency is rare enough.
    return p / low if low > 0 else inf


def detectable_shift(
    variance: ArrayLike,
    num_draws: int,
    *,
    false_alarm_rate: float = 1e-9,
    num_tests: int = 1,
    miss_rate: float = 0.01,
) -> Floats:
    """Smallest error of the mean that :func:`score_test` finds with these draws.

    Parameters
    ----------
    variance : array_like
        Of one draw.
    num_draws : int
        n.
    false_alarm_rate : float, optional
        alpha. Default 1e-9.
    num_tests : int, optional
        Entries that share alpha. Default 1.
    miss_rate : float, optional
        Probability that such an error is not found. Default 0.01.

    Returns
    -------
    ndarray
        In the units of the mean; inf where the draws are too few to find anything.

    Raises
    ------
    ValueError
        Rates outside (0, 1).

    Notes
    -----
    Rigorous if the variance of the wrong distribution is at most ``variance``: for a shift b,
    ``P(S < T) <= exp(T - n (a b - a^2 b^2 / 2 - a^2 sigma^2 / 2))``, which is solved for b. It is
    about ``1.6 sqrt(2 L / n)`` standard deviations.

    Examples
    --------
    >>> from linattn.testing import statistics
    >>> round(float(statistics.detectable_shift(1.0, 1000)), 2)
    0.34
    """
    L = _log_odds(false_alarm_rate, num_tests, 2)
    _check_rate("miss_rate", miss_rate)
    need = (num_draws * log1p(L / num_draws) + 2 * L - log(miss_rate)) / num_draws
    u = 1 - sqrt(1 - 2 * need) if need < 0.5 else inf
    sigma = np.sqrt(np.asarray(variance, dtype=np.float64))
    with np.errstate(invalid="ignore"):
        return np.where(sigma > 0, u * sigma * sqrt(num_draws / (2 * L)), sigma)


def at_most_test(
    samples: ArrayLike, mean: ArrayLike, bound: ArrayLike, *, false_alarm_rate: float = 1e-9
) -> AtMostTest:
    """Test that a mean of non-negative draws is at most a claim: rigorous for every distribution.

    Parameters
    ----------
    samples : array_like, (n, ...)
        Non-negative draws, independent along the first axis; they are cut off at ``bound``.
    mean : array_like, (...)
        The largest mean claimed.
    bound : array_like, (...)
        Where draws are cut off, above ``mean``.
    false_alarm_rate : float, optional
        Of all entries together. Default 1e-9.

    Returns
    -------
    AtMostTest

    Raises
    ------
    ValueError
        A rate outside (0, 1).

    Notes
    -----
    False-alarm rate: rigorous. Cutting off only lowers the mean, and of all distributions on [0, b]
    of mean p b the two-point distribution has the largest moment generating function, so that the
    mean reaches ``q b >= p b`` with probability at most ``exp(-n KL(q || p))``. An excess of the
    cut-off mean by about ``sqrt(2 (b / mean) log(1 / alpha) / n)`` of the mean is seen.

    References
    ----------
    Hoeffding, "Probability inequalities for sums of bounded random variables" (1963), eq. 2.1.
    """
    y = np.asarray(samples, dtype=np.float64)
    L = _log_odds(false_alarm_rate, max(1, y[0].size), 1)
    limit = np.asarray(bound, dtype=np.float64)
    q = np.mean(np.minimum(y, limit), axis=0) / limit
    p = np.asarray(mean, dtype=np.float64) / limit
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(q < 1, (1 - q) * np.log((1 - q) / (1 - p)), 0.0)
        divergence = np.where(q > p, q * np.log(q / p) + rest, q - q)
    log_p = np.asarray(-y.shape[0] * divergence)
    return AtMostTest(log_p, -L, bool(np.all(log_p > -L)))


def mean_bound(
    average: ArrayLike, bound: ArrayLike, num_draws: int, *, false_alarm_rate: float = 1e-9
) -> Floats:
    r"""Upper bound of a mean of draws on [0, b]: :func:`at_most_test` of ``b - Y``, inverted.

    .. math:: n\, \mathrm{KL}(\bar Y / b \,\|\, p) = \log(k / \alpha), \quad
        \mathrm{E}\, Y \le p\, b

    Parameters
    ----------
    average : array_like, (...)
        Of n independent draws from 0 to b.
    bound : array_like, (...)
        b.
    num_draws : int
        n.
    false_alarm_rate : float, optional
        alpha: that one of the k entries has a larger mean. Default 1e-9.

    Returns
    -------
    ndarray, (...)

    Raises
    ------
    ValueError
        A rate outside (0, 1).

    Notes
    -----
    Rigorous for every distribution on [0, b].

    References
    ----------
    Hoeffding, "Probability inequalities for sums of bounded random variables" (1963), eq. 2.1.

    Examples
    --------
    >>> from linattn.testing import statistics
    >>> round(float(statistics.mean_bound(0.5, 1.0, 1000)), 2)
    0.6
    """
    y, b = np.asarray(average, dtype=np.float64), np.asarray(bound, dtype=np.float64)
    need = _log_odds(false_alarm_rate, max(1, y.size), 1) / num_draws
    q = np.clip(y / b, 0.0, 1.0)
    low, high = q, np.ones_like(q)
    for _ in range(60):
        p = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.where(q > 0, q * np.log(q / p), 0.0)
            outside = np.where(q < 1, (1 - q) * np.log((1 - q) / (1 - p)), 0.0)
        is_refuted = inside + outside >= need
        low, high = np.where(is_refuted, low, p), np.where(is_refuted, p, high)
    return np.asarray(high * b)


def moment_bound(
    central_moments: Sequence[float], num_draws: int, *, false_alarm_rate: float = 1e-9
) -> float:
    r"""How far a sample mean may be from the mean, from exact moments.

    .. math:: t = \min_k (\mathrm{E} (\bar X - \mu)^{2k} / \alpha)^{1 / 2k}

    Parameters
    ----------
    central_moments : sequence of float
        ``E (X - mu)^p`` of one draw for p = 0, 1, 2, ..., such as
        :func:`linattn.testing.moments.exponential_moments`. More of them, up to about 50, give a
        tighter bound.
    num_draws : int
        n.
    false_alarm_rate : float, optional
        alpha. Default 1e-9.

    Returns
    -------
    float
        t; ``P(|mean - mu| >= t) <= alpha``.

    Raises
    ------
    ValueError
        A rate outside (0, 1), or fewer than three moments.

    Notes
    -----
    False-alarm rate: rigorous (Markov's inequality on every even moment; the choice of k does not
    depend on the draws). A bias of 2 t is missed with probability at most alpha. The moments of the
    mean come from the n-th power of the moment generating function, as a power series.
    """
    _check_rate("false_alarm_rate", false_alarm_rate)
    if len(central_moments) < 3:
        raise ValueError(
            f"central_moments must have at least 3 entries, got {len(central_moments)}"
        )
    # The series of E exp(t (X - mu) sqrt(n) / n sigma): in standard errors nothing overflows early.
    unit = sqrt(central_moments[2] * num_draws)
    a = [_over(m, k, unit) for k, m in enumerate(central_moments)]
    power = [1.0]
    for k in range(1, len(a)):
        terms = ((j * num_draws - (k - j)) * a[j] * power[k - j] for j in range(1, k + 1))
        power.append(sum(terms) / k)
    best = inf
    for k in range(2, len(power), 2):
        if isfinite(power[k]) and power[k] > 0:
            best = min(best, exp((log(power[k]) + lgamma(k + 1) - log(false_alarm_rate)) / k))
    return best * unit / num_draws


def _over(moment: float, order: int, unit: float) -> float:
    if moment == 0 or not isfinite(moment):
        return moment
    size = log(abs(moment)) - lgamma(order + 1) - order * log(unit)
    return (1.0 if moment > 0 else -1.0) * (exp(size) if size < 700 else inf)


def bernstein_bound(
    variance: float, bound: float, num_draws: int, *, false_alarm_rate: float = 1e-9
) -> float:
    r"""How far a sample mean of bounded draws may be from the mean.

    .. math:: t = L b / (3 n) + \sqrt{(L b / (3 n))^2 + 2 \sigma^2 L / n}

    Parameters
    ----------
    variance : float
        sigma^2 of one draw, or an upper bound of it.
    bound : float
        b, the largest possible ``|X - mu|``.
    num_draws : int
        n.
    false_alarm_rate : float, optional
        alpha. Default 1e-9.

    Returns
    -------
    float
        t; ``P(|mean - mu| >= t) <= alpha``.

    Raises
    ------
    ValueError
        A rate outside (0, 1).

    Notes
    -----
    False-alarm rate: rigorous. A bias of 2 t is missed with probability at most alpha.

    References
    ----------
    Boucheron, Lugosi and Massart, "Concentration Inequalities" (2013), corollary 2.11.

    Examples
    --------
    >>> from linattn.testing import statistics
    >>> round(statistics.bernstein_bound(1.0, 4.0, 1000), 2)
    0.24
    """
    L = _log_odds(false_alarm_rate, 1, 2)
    linear = L * bound / (3 * num_draws)
    return linear + sqrt(linear**2 + 2 * variance * L / num_draws)
