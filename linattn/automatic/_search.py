"""Choose a method for each head: fit landmarks, estimate errors, take the cheapest sufficient one.

A head is a number here: the leading axes of inputs, broadcast and flattened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.automatic._costs import (
    FIRST_ROWS,
    MAX_PROMISED,
    MIN_FEATURES,
    Work,
    cost_of,
    exact_pairs,
    first_features,
    fit_work,
    may_search,
    num_rows_of,
    read_work,
    window_of,
)
from linattn.automatic._curves import ErrorCurve
from linattn.typing import Problem

__all__ = [
    "LEVELS",
    "MAX_FEATURES",
    "MIN_FEATURES",
    "PROBABILITY",
    "Choice",
    "Found",
    "choose_landmarks",
    "largest_trial",
    "rows_wanted",
]

Floats = NDArray[np.float64]

MAX_FEATURES = 2048

PROBABILITY = 0.95
"""Probability of meeting the tolerance, for each head."""

LEVELS = (*range(5), *range(6, 25, 2), *range(28, 49, 4), *range(56, 81, 8), 96, 112, 128)
"""Numbers of exact clusters to choose from: at most half of the clusters."""

EXPONENT, SHARE_EXPONENT = 0.5, 0.75
"""Powers of the number of landmarks. At a given share of exact keys, errors fall at least with the
first; at a given error, shares fall with the second in the mean. From heads of two kinds of text,
7,168 to 65,536 tokens."""

MARGIN = 1.25
"""Assumed ratio of a bound to its error."""


SMALL_SHARE, MIN_STRUCTURE = 1 / 16, 2.75
"""More landmarks are expected to help if clusters of a given number of keys reduce the squared
error by at least this factor over as many random keys. Measured: 3.4 and more in the 81 heads of
four kinds of text that they helped; 2.4 and less in Gaussian noise."""

MIN_GAIN = 0.85
"""More landmarks are tried if their expected cost over the known cost is below this. Gains are
mostly smaller than expected, and trials take longer than counted."""


class Choice(NamedTuple):
    """The method chosen for one head.

    Attributes
    ----------
    trial : int
        Number of the fit; -1 for exact attention.
    clusters : int
        Number of exact clusters.
    window : int
        Block length of the exact window, 0 for none.
    error, bound : float
        Estimated relative error, and its upper bound.
    share : float
        Share of all keys that are in exact clusters.
    cost : float
        Remaining work, in pairs of exact attention.
    """

    trial: int
    clusters: int
    window: int
    error: float
    bound: float
    share: float
    cost: float


EXACT = Choice(-1, 0, 0, 0.0, 0.0, 0.0, np.inf)


class Trial(NamedTuple):
    """One fit.

    Attributes
    ----------
    num_features : int
        m.
    heads : sequence of int
        The fitted heads.
    fit : object
        The map.
    curves : list of ErrorCurve
        Error curves of these heads.
    """

    num_features: int
    heads: Sequence[int]
    fit: Any
    curves: list[ErrorCurve]


class Found(NamedTuple):
    """Result of a search.

    Attributes
    ----------
    trials : list of Trial
        All fits, in order.
    choices : list of Choice
        Choice of each head.
    work : list of Work
        Work of each head: the search and the remaining work.
    """

    trials: list[Trial]
    choices: list[Choice]
    work: list[Work]


Try = Callable[[int, Sequence[int]], tuple[Any, list[ErrorCurve]]]


def choose_landmarks(
    problem: Problem,
    num_heads: int,
    tolerance: float | Sequence[float] | None,
    num_rows: int,
    try_: Try,
    *,
    max_features: int = MAX_FEATURES,
    first: int = MIN_FEATURES,
) -> Found:
    """Fit the first number of landmarks to all heads, then the number that each seems to need.

    ``try_(m, heads)`` returns a map of these heads and their curves. The tolerance is one for all
    heads or one for each; without a tolerance the first fit is accepted. A second fit has at most
    ``max_features`` landmarks.
    """
    all_heads = range(num_heads)
    trials = [Trial(first, all_heads, *try_(first, all_heads))]
    spent = [fit_work(problem, first, curve.rows) for curve in trials[0].curves]
    # What promises less than a quarter is as often slower: small clusters take longer than counted.
    exact = EXACT._replace(cost=MAX_PROMISED * exact_pairs(problem))
    if tolerance is None:
        curves = trials[0].curves
        choices = [_choice(problem, trials, 0, x, len(x.error) - 1, 0) for x in curves]
    else:
        tolerances = np.broadcast_to(tolerance, (num_heads,)).tolist()
        choices = [_cheapest(problem, trials, i, tolerances[i], exact) for i in all_heads]
        limits = first, min(largest_trial(problem, max(tolerances), num_rows), max_features)
        groups = defaultdict(list)
        for head, curve in enumerate(trials[0].curves):
            m = _best_number(problem, curve, tolerances[head], num_rows, choices[head].cost, limits)
            if m is not None:
                groups[m].append(head)
        for m, heads in sorted(groups.items()):
            trials.append(Trial(m, heads, *try_(m, heads)))
            for head, curve in zip(heads, trials[-1].curves, strict=True):
                spent[head] = spent[head].plus(fit_work(problem, m, curve.rows))
                choices[head] = _cheapest(problem, trials, head, tolerances[head], exact)
    work = [w.plus(_rest(problem, trials, c)) for w, c in zip(spent, choices, strict=True)]
    return Found(trials, choices, work)


def largest_trial(problem: Problem, tolerance: float | None, num_rows: int) -> int:
    """Return the largest number of landmarks to try, 0 if exact attention is as cheap."""
    m = first_features(problem, tolerance)
    first = fit_work(problem, m, num_rows if tolerance is None else min(num_rows, FIRST_ROWS))
    exact = exact_pairs(problem)
    whole = first.plus(read_work(problem, m, 0.0, window_of(problem)))
    if not may_search(problem, whole if tolerance is None else first, tolerance):
        return 0
    while (
        tolerance is not None
        and 2 * m <= MAX_FEATURES
        and cost_of(first, problem) + _total(problem, 2 * m, num_rows) < exact
    ):
        m *= 2
    return m


def rows_wanted(
    problem: Problem,
    limits: tuple[int, int],
    tolerance: float,
    num_rows: int,
    curve: ErrorCurve,
) -> int:
    """Return how many rows should judge a head, from its curve on the first rows.

    0 if more landmarks, between the two ``limits``, are expected to cost less. 0 also if the head
    stays expensive with the smallest plausible error. At most enough to leave half of the
    squared tolerance for the error.
    """
    m = limits[0]
    exact = EXACT._replace(cost=exact_pairs(problem))

    def cheapest(error: Floats, dearest: Choice) -> Choice:
        bound = np.hypot(error, max(curve.floor, tolerance / 2**0.5))
        trial = Trial(m, [0], None, [curve._replace(bound=bound)])
        return _cheapest(problem, [trial], 0, tolerance, dearest)

    cost = cheapest(MARGIN * curve.error, exact).cost
    if _best_number(problem, curve, tolerance, num_rows, cost, limits) is not None:
        return 0
    rows = num_rows * 2 * (curve.floor / tolerance) ** 2
    rows = min(num_rows, max(num_rows_of(problem, None), ceil(min(rows, num_rows))))
    spent = rows * float(problem.key.shape[-2])
    dear = exact._replace(cost=MAX_PROMISED * exact.cost - spent)
    return 0 if cheapest(curve.error / MARGIN, dear) is dear else rows


def _total(problem: Problem, m: int, num_rows: int) -> float:
    work = fit_work(problem, m, num_rows).plus(read_work(problem, m, 0.0, 0))
    return cost_of(work, problem)


def _rest(problem: Problem, trials: list[Trial], choice: Choice) -> Work:
    """Return the remaining work after a head's choice is made."""
    if choice.trial < 0:
        return Work(exact=exact_pairs(problem))
    return read_work(problem, trials[choice.trial].num_features, choice.share, choice.window)


def _choice(
    problem: Problem, trials: list[Trial], trial: int, curve: ErrorCurve, way: int, level: int
) -> Choice:
    share, window = float(curve.share[level]), (0, window_of(problem))[way]
    cost = cost_of(read_work(problem, trials[trial].num_features, share, window), problem)
    error, bound = float(curve.error[way, level]), float(curve.bound[way, level])
    return Choice(trial, LEVELS[level], window, error, bound, share, cost)


def _cheapest(
    problem: Problem, trials: list[Trial], head: int, tolerance: float, exact: Choice
) -> Choice:
    """Choose the cheapest method within the tolerance, among all fits of a head."""
    found = [exact]
    for i, trial in enumerate(trials):
        if head not in trial.heads:
            continue
        curve = trial.curves[trial.heads.index(head)]
        # From the most exact one down to the first that fails: so all may be judged at the
        # probability of one.
        for way, bounds in enumerate(curve.bound):
            level = len(bounds)
            while level and bounds[level - 1] <= tolerance:
                level -= 1
                found.append(_choice(problem, trials, i, curve, way, level))
    return min(found, key=lambda choice: choice.cost)


def _best_number(
    problem: Problem,
    curve: ErrorCurve,
    tolerance: float,
    num_rows: int,
    cost: float,
    limits: tuple[int, int],
) -> int | None:
    """Return the number of landmarks with the least expected cost, if that is much below the cost.

    The number is between ``limits``: the number tried first, and the largest.
    """
    if not _has_structure(curve):
        return None
    best, cost, (first, most) = None, MIN_GAIN * cost, limits
    m = 2 * first
    while m <= most:
        floor = max(curve.floor, tolerance / 2**0.5)
        allowed, more = max(tolerance**2 - floor**2, 0) ** 0.5 / MARGIN, m / first
        for way, errors in enumerate(curve.error):
            share = _expected_share(curve.share, errors, allowed * more**EXPONENT)
            known = _expected_share(curve.share, errors, allowed)
            if known < 1:
                share = min(share, known / more**SHARE_EXPONENT)
            read = read_work(problem, m, share, (0, window_of(problem))[way])
            expected = cost_of(fit_work(problem, m, num_rows).plus(read), problem)
            if share < 1 and expected < cost:
                best, cost = m, expected
        m *= 2
    return best


def _has_structure(curve: ErrorCurve) -> bool:
    """Whether the first chosen keys hold much more of the error than random keys."""
    few = np.flatnonzero(curve.share <= SMALL_SHARE)[-1] or 1
    if few >= len(curve.share):
        return True
    first, left = curve.error[0, [0, few]] ** 2
    return bool(first - left >= MIN_STRUCTURE * curve.share[few] * first)


def _expected_share(shares: Floats, errors: Floats, error: float) -> float:
    """Return the share of exact keys that reaches an error, by interpolating logs; 1 for none."""
    passed = np.flatnonzero(errors <= error)
    if not len(passed):
        return 1.0
    i = int(passed[0])
    if i == 0:
        return 0.0
    logs: Floats = np.log(np.maximum(errors[i - 1 : i + 1], 1e-300))
    part = (logs[0] - np.log(error)) / (logs[0] - logs[1])
    low, high = shares[i - 1 : i + 1]
    return float(low + part * (high - low))
