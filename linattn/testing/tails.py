"""Test how often an error is large: the promise of sketches and samplers with high probability."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log, log1p
from typing import Any

import numpy as np

from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._doubts import warn_of_seed
from linattn.testing._evidence import Evidence, UntestableError, check_function, fail
from linattn.testing._means import CONFIDENCE, worst
from linattn.testing._numbers import Draws
from linattn.testing.statistics import at_most_test, mean_bound

__all__ = ["assert_at_most"]

CHECK = "assert_at_most"

MISS_RATE = 0.01
"""Of the frequency that a passed test would have found."""


@_arrays.on_array_device
def assert_at_most(
    error: Callable[[np.random.Generator], Any],
    eps: float,
    delta: float,
    *,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that an error is at most eps with a probability of at least ``1 - delta``.

    .. math:: P(|X| > \varepsilon) \le \delta

    Parameters
    ----------
    error : callable
        ``error(rng)`` returns the error X of one run from a NumPy Generator: a number, or an array
        (...) of any library, of which every entry is held to the promise on its own.
        ``numpy.max`` of it holds them all at once.
    eps : float
        The largest error promised; 0 or more.
    delta : float
        Probability with which the error may be larger, between 0 and 1.
    num_draws : int, optional
        n. Default 4000.
    false_alarm : float, optional
        alpha, the probability that a right promise fails, all entries together. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0: the same draws each time. None for fresh ones.

    Returns
    -------
    Evidence
        ``detail`` says which frequency of larger errors would have been found with 99 %.
        ``detectable`` is its excess over delta, relative to delta. ``estimate`` is the measured
        frequency less delta, ``interval`` holds the true difference with 95 %.

    Raises
    ------
    AssertionError
        Errors above eps are too frequent. NaN counts as one.
    UntestableError
        The draws are too few to fail even if every error were above eps.
    TypeError, ValueError
        Not a function; complex numbers; draws of several shapes; eps below 0; a delta or a rate
        outside (0, 1); a number of draws that is not whole and positive.

    Warns
    -----
    UserWarning
        One seed gave two results.

    Notes
    -----
    False-alarm rate: rigorous for independent runs
    (:func:`linattn.testing.statistics.at_most_test`): a frequency of ``q > delta`` has a
    probability of at most ``exp(-n KL(q || delta))``. Twice delta is found from about
    ``80 / delta`` draws on. Time n draws.

    References
    ----------
    Hoeffding, "Probability inequalities for sums of bounded random variables" (1963), eq. 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import assert_at_most
    >>> def error(rng):  # of a Johnson-Lindenstrauss projection of one unit vector to 64 rows
    ...     return np.sum(rng.standard_normal(64) ** 2) / 64 - 1
    >>> assert_at_most(error, eps=0.4, delta=0.05, num_draws=1000).detail.partition(";")[0]
    'sees errors above 0.4 in 13.1 % of runs in place of 5 %: 1000 runs of 1 entry'
    """
    check_function("error", error, "(rng) -> number or array")
    _checks.check_finite_number("eps", eps)
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, got {eps!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be a probability between 0 and 1, got {delta!r}")
    _checks.check_positive_int("num_draws", num_draws)
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm must be a float between 0 and 1, got {false_alarm!r}")
    shape = tuple(np.shape(error(np.random.default_rng(0))))
    source = Draws(error, shape, as_generator(rng), "the first one")
    warn_of_seed(CHECK, source.once)
    above = (~(np.abs(source.take(num_draws)) <= eps)).astype(np.float64)
    tests = max(1, above[0].size)
    need = log(tests / false_alarm)
    if num_draws * -log(delta) <= need:
        raise UntestableError(
            f"num_draws is too small, got {num_draws}: even errors that are always above eps could "
            f"pass; about {ceil(80 / delta):,} draws would show twice delta"
        )
    limit = _limit(delta, num_draws, need)
    found = float(mean_bound(limit, 1.0, num_draws, false_alarm_rate=MISS_RATE))
    test = at_most_test(above, delta, 1.0, false_alarm_rate=false_alarm)
    size = f"{num_draws} runs of {tests} {'entry' if tests == 1 else 'entries'}"
    at = worst(-test.log_p)
    often = float(np.mean(above, axis=0)[at])
    where = f" at entry {list(at)}" if at else ""
    if not test.passed:
        message = (
            f"errors are above {eps:.6g} in {100 * often:.3g} % of {size}{where}, at most "
            f"{100 * delta:.3g} % are promised. A right promise fails in at most "
            f"{false_alarm:.1g} of all runs"
        )
        fail(CHECK, message)
    rate = (1 - CONFIDENCE) / 2 / tests
    high = float(mean_bound(often, 1.0, num_draws, false_alarm_rate=rate))
    low = 1 - float(mean_bound(1 - often, 1.0, num_draws, false_alarm_rate=rate))
    detail = (
        f"sees errors above {eps:.6g} in {100 * found:.3g} % of runs in place of "
        f"{100 * delta:.3g} %: {size}; seen: {100 * often:.3g} %{where}, from {100 * low:.3g} to "
        f"{100 * high:.3g} % with {CONFIDENCE:g}"
    )
    interval = (low - delta, high - delta)
    return Evidence(
        CHECK, detail, false_alarm, found / delta - 1, 0.0, often - delta, interval, at
    )  # fmt: skip


def _limit(delta: float, num_draws: int, need: float) -> float:
    """Return the frequency at which the test turns: ``n KL(q || delta) = need``, or 1."""
    low, high = delta, 1.0
    for _ in range(60):
        q = (low + high) / 2
        rest = (1 - q) * (log1p(-q) - log1p(-delta)) if q < 1 else 0.0
        is_enough = num_draws * (q * log(q / delta) + rest) >= need
        low, high = (low, q) if is_enough else (q, high)
    return high
