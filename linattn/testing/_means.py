"""The test of a mean, whatever was drawn: its noise, its power, and what a failure says.

Letters: ``n`` draws of an array of any shape ``(...)``, ``mu`` their claimed mean, ``alpha`` the
false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.testing.statistics import (
    _log_odds,
    _psi,
    detectable_shift,
    mean_bound,
    variance_factor,
)

Floats = NDArray[np.float64]

STATED = "as stated"
"""Origin of a variance that was given."""

MIN_RELATIVE_VARIANCE = 1e-12
"""Below it, relative to the square of the mean, only rounding moves an estimate."""

NEAR_ZERO = 0.1
"""Share of the largest mean below which a bias is absolute, in that mean."""

NEAR_NOISE = 0.5
"""Share of one draw's standard deviation below which a bias is absolute, in that deviation."""

MAX_DRAWS = 2**40
"""Draws beyond which :func:`smallest_count` gives up."""


CONFIDENCE = 0.95
"""Of the interval that a passed test says."""


class Noise(NamedTuple):
    """The claim about the noise of a draw: a variance, or else bounds, a kurtosis, or both."""

    variance: Floats | None = None
    """Exact, or an upper bound."""
    bounds: tuple[Floats, Floats] | None = None
    """Smallest and largest draw."""
    kurtosis: float | None = None
    """Upper bound of ``E (X - mu)^4 / Var(X)^2``."""
    origin: str = STATED


class Power(NamedTuple):
    """Variance, draws and false-alarm rate that remain for the test of the mean."""

    variance: Floats
    num_draws: int
    false_alarm: float
    origin: str


def measure(
    noise: Noise,
    mean_square: Callable[[int], Floats],
    expected: Floats,
    num_draws: int,
    false_alarm: float,
) -> Power:
    """Return a variance that holds, and the draws and false-alarm rate left for the mean.

    Parameters
    ----------
    noise : Noise
        With a variance nothing is measured. Otherwise half of the draws and half of alpha go into
        an upper bound of the variance: the smaller one of two if there are bounds and a kurtosis.
    mean_square : callable
        ``mean_square(n)`` gives the mean of ``(X - mu)^2`` over n new draws, (...).
    expected : ndarray, (...)
        mu.
    num_draws : int
        n.
    false_alarm : float
        alpha.

    Notes
    -----
    Of all distributions on [a, b] with mean mu the one on a and b alone has the largest variance,
    ``(mu - a)(b - mu)``; where the draws say less, their bound is taken
    (:func:`linattn.testing.statistics.mean_bound`).
    """
    if noise.variance is not None:
        return Power(noise.variance, num_draws, false_alarm, noise.origin)
    rest, rate = -(-num_draws // 2), false_alarm / 2
    each = rate if noise.bounds is None or noise.kurtosis is None else rate / 2
    squares, limits, origins = mean_square(rest), [], []
    if noise.bounds is not None:
        low, high = noise.bounds
        widest = np.maximum(high - expected, expected - low)
        largest = np.where(widest > 0, widest**2, 1.0)
        limits += [
            (expected - low) * (high - expected),
            mean_bound(squares, largest, rest, false_alarm_rate=each),
        ]
        origins.append("at most that of its bounds, measured")
    if noise.kurtosis is not None:
        factor = variance_factor(noise.kurtosis, rest, max(1, squares.size), each)
        limits.append(squares * factor if factor < np.inf else np.full(squares.shape, np.inf))
        origins.append(f"variance measured, for a kurtosis of at most {noise.kurtosis:g}")
    return Power(np.minimum.reduce(limits), rest, rate, ", and ".join(origins))


def smallest_count(bias: float, share: Callable[[int], float]) -> int:
    """Return the smallest n, to 1 %, for which ``share(n)``, the bias that is seen, is enough.

    Raises
    ------
    ValueError
        No number of draws up to 2^40 is.
    """
    high = 1
    while not share(high) <= bias:
        high *= 2
        if high > MAX_DRAWS:
            raise ValueError(
                f"bias must be large enough for {MAX_DRAWS:,} draws to show it, got {bias!r}"
            )
    low = high // 2
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) <= bias else (middle, high)
    return high


def moves(variance: Floats, mean: Floats) -> NDArray[np.bool_]:
    """Whether draws differ by more than rounding."""
    return np.asarray(variance > MIN_RELATIVE_VARIANCE * mean**2)


def scale_of(expected: Floats, variance: Floats) -> Floats:
    """Return the unit of a bias: the mean, or a larger scale where the mean is near 0."""
    size = np.abs(np.broadcast_to(expected, np.broadcast_shapes(expected.shape, variance.shape)))
    largest, deviation = np.max(size, initial=0.0), np.sqrt(variance)
    scale = np.where(size < NEAR_NOISE * deviation, deviation, size)
    return np.where(size < NEAR_ZERO * largest, np.maximum(largest, deviation), scale)


def detectable_share(scale: Floats, power: Power) -> Floats:
    """Smallest bias that is found with 99 %, as a share of the scale."""
    shift = detectable_shift(
        power.variance,
        power.num_draws,
        false_alarm_rate=power.false_alarm,
        num_tests=max(1, np.broadcast(scale, power.variance).size),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(np.isfinite(shift), shift / scale, np.inf)
        return np.where(shift > 0, share, 0.0)


def visible(expected: Floats, variance: Floats, share: Floats) -> str:
    """Say the largest bias that could pass: for each unit in use the share, and at which entry.

    Where the unit is not the mean, the share of the mean is said too, and where it is largest.
    """
    scale, size = scale_of(expected, variance), np.abs(np.broadcast_to(expected, share.shape))
    deviation = np.broadcast_to(np.sqrt(variance), share.shape)
    units = {
        "a relative bias of {} %{}": scale == size,
        "a bias of {} % of a draw's standard deviation{}": (scale != size) & (scale == deviation),
        "a bias of {} % of the largest mean{}": (scale != size) & (scale != deviation),
    }
    told: list[str] = []
    for words, entries in units.items():
        if not np.any(entries):
            continue
        at = worst(np.where(entries, share, -1.0))
        where = f" at entry {list(at)}" if at else ""
        of_mean = share * scale / np.where(entries & (size > 0), size, np.inf)
        last = worst(of_mean)
        if of_mean[last] > 0 and size[last] != scale[last]:
            there = "there" if last == at else f"at entry {list(last)}"
            where += f" ({100 * of_mean[last]:.3g} % of the mean {there})"
        told.append(words.format(f"{100 * share[at]:.3g}", where))
    return " and ".join(told) or "a relative bias of 0 %"


def mean_interval(
    samples: Floats, variance: float, *, miss_rate: float = 0.05, num_tests: int = 1
) -> tuple[float, float]:
    r"""Interval that holds a mean: :func:`linattn.testing.statistics.score_test`, inverted.

    .. math:: \Bigl|\sum_i \psi(a (X_i - \theta))\Bigr| < n \log(1 + L / n) + L

    Parameters
    ----------
    samples : ndarray, (n,)
        Independent draws.
    variance : float
        Of one draw, or an upper bound of it.
    miss_rate : float, optional
        Probability that the mean is outside, for all tests together. Default 0.05.
    num_tests : int, optional
        Intervals that share the rate. Default 1.

    Returns
    -------
    low, high : float
        All theta that the test does not reject.

    Raises
    ------
    ValueError
        A rate outside (0, 1).

    Notes
    -----
    Rigorous for every distribution of that variance, and therefore wider than Student's interval:
    2.7 standard errors to each side at the default. Time O(n).

    References
    ----------
    Catoni, "Challenging the empirical mean and empirical variance: a deviation study" (2012),
    section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing._means import mean_interval
    >>> x = np.random.default_rng(0).standard_normal(1000)
    >>> low, high = mean_interval(x, 1.0)
    >>> round(low, 2), round(high, 2)
    (-0.13, 0.04)
    """
    x, n = samples, samples.shape[0]
    L = _log_odds(miss_rate, num_tests, 2)
    mean = float(np.mean(x))
    if not variance > 0:
        return mean, mean
    a, limit = np.sqrt(2 * L / (n * variance)), n * np.log1p(L / n) + L
    ends = []
    for side in (-1, 1):
        step = np.sqrt(variance / n)
        while side * float(np.sum(_psi(a * (x - mean - side * step)))) > -limit:
            step *= 2
        inner, outer = 0.0, step
        for _ in range(30):
            middle = (inner + outer) / 2
            is_inside = side * float(np.sum(_psi(a * (x - mean - side * middle)))) > -limit
            inner, outer = (middle, outer) if is_inside else (inner, middle)
        ends.append(float(mean + side * outer))
    return ends[0], ends[1]


def seen(
    at: tuple[int, ...], draws: Floats, expected: Floats, variance: Floats
) -> tuple[float, tuple[float, float]]:
    """Return the mean less its claim at one entry, and an interval that holds for all entries."""
    drawn = np.moveaxis(draws, 0, -1)[at]
    want, noise = (float(np.broadcast_to(x, draws.shape[1:])[at]) for x in (expected, variance))
    off = drawn - want
    low, high = mean_interval(off, noise, miss_rate=1 - CONFIDENCE, num_tests=max(1, draws[0].size))
    return float(np.mean(off)), (low, high)


def in_standard_deviations(shift: Floats, draws: Floats, mean: Floats, variance: Floats) -> float:
    """Smallest bias that is found, in the measured standard deviations of one draw."""
    if not np.any(moves(variance, mean)):
        return 0.0
    deviation = np.std(draws, axis=0)
    moving = moves(deviation**2, mean)
    return float(np.min(shift[moving] / deviation[moving], initial=np.inf))


def worst(score: Floats) -> tuple[int, ...]:
    """Index of the entry that is furthest from its claim."""
    flat = int(np.argmax(np.where(np.isnan(score), np.inf, score)))
    return tuple(int(i) for i in np.unravel_index(flat, score.shape))


def percent(got: float, want: float) -> str:
    """Say by how much one number is off another."""
    return f"{100 * (got / want - 1):+.3g} %" if want else "no ratio"


def explain(
    at: tuple[int, ...], draws: Floats, expected: Floats, power: Power, words: tuple[str, str]
) -> str:
    """Say what was seen and wanted at one entry, and how far apart, in standard errors.

    ``words``: what was averaged, and what its mean is called.
    """
    drawn = np.moveaxis(draws, 0, -1)[at]
    average, want, variance = (
        float(np.broadcast_to(array, draws.shape[1:])[at])
        for array in (np.mean(draws, axis=0), expected, power.variance)
    )
    error = float(np.sqrt(variance / drawn.size))
    if moves(np.asarray(variance), np.asarray(want)):
        distance = (
            f"{abs(average - want) / error:.1f} standard errors away. One standard error is "
            f"{error:.3g}, from a variance of {variance:.3g} ({power.origin}); these draws have "
            f"{np.var(drawn):.3g}"
        )
    else:
        distance = f"where no draw may differ from it (variance 0, {power.origin})"
    return (
        f"mean of {words[0]} over {drawn.size} draws is {average:.6g}, the {words[1]} is "
        f"{want:.6g} ({percent(average, want)}): {distance}."
    )
