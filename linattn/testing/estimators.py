"""Test the mean of any function that returns random estimates.

Letters: ``n`` draws X of an array of any shape ``(...)``, ``mu`` their claimed mean, ``alpha`` the
false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._doubts import warn_of_dependence, warn_of_seed, warn_of_variance
from linattn.testing._evidence import Evidence, UntestableError, check_function, fail
from linattn.testing._means import (
    CONFIDENCE,
    Floats,
    Noise,
    detectable_share,
    explain,
    in_standard_deviations,
    measure,
    moves,
    scale_of,
    seen,
    smallest_count,
    visible,
    worst,
)
from linattn.testing._numbers import Draws, for_each, numbers
from linattn.testing.statistics import score_test

__all__ = ["assert_draws", "assert_estimator", "claimed", "draws_for"]

CHECK = "assert_estimator"

ROUNDING = {8: 1e-9, 4: 1e-5}
"""Relative, by the bytes of a float: how far rounding may move a draw whose variance is 0."""


@_arrays.on_array_device
def assert_estimator(
    draw: Callable[[np.random.Generator], Any],
    expected: ArrayLike | Callable[[], ArrayLike],
    *,
    variance: ArrayLike | None = None,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    kurtosis: float | None = None,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that the mean of what a function draws is the one expected, entry by entry.

    .. math:: \mathrm{E}\, X = \mu

    Parameters
    ----------
    draw : callable
        ``draw(rng)`` returns one estimate X, an array or a number of any library, from a NumPy
        Generator. A function that takes a seed is wrapped:
        ``lambda rng: f(seed=int(rng.integers(2**31)))``.
    expected : array_like (...) or callable
        mu, of the shape of a draw; or a function of nothing that returns it.
    variance : array_like (...), optional
        Exact variance of one draw, or an upper bound of it; a number, or one for each entry.
    bounds : tuple of two array_like (...), optional
        The smallest and the largest value that a draw can take.
    kurtosis : float, optional
        Upper bound of ``E (X - mu)^4 / Var(X)^2`` for one draw: 3 for Gaussian noise, 15 for the
        product of two Gaussians, 1/p for an event of probability p. Try 25. Together with
        ``bounds`` the smaller of both limits of the variance holds.
    num_draws : int, optional
        n. Default 4000.
    false_alarm : float, optional
        alpha, the probability that a right estimator fails, all entries together. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0: the same draws each time. None for fresh ones.

    Returns
    -------
    Evidence
        ``detail`` says the power first, with the unit and the entry, then the bias that was seen.
        ``detectable`` is the relative bias that is found with
        99 %, at the entry where it is largest; where mu is near 0, below a tenth of its largest
        entry or half of a draw's standard deviation, it is a share of that.
        ``detectable_sd`` is the bias in standard deviations of one draw, as measured, at the entry
        where it is smallest. ``estimate`` is the bias that was seen, in the unit of a draw,
        ``interval`` holds the true one with 95 %, ``entry`` says where.

    Warns
    -----
    UserWarning
        The test passed, but a stated variance is smaller than the draws', neighbouring draws are
        correlated (each said wrongly with a probability of at most 1e-9), or one seed gave two
        results.

    Raises
    ------
    AssertionError
        The mean is not mu, a draw is NaN, or a draw is outside its bounds.
    UntestableError
        No claim about the noise was made; the draws are too few to see a bias of 100 %; every draw
        is the same although they are claimed to differ.
    TypeError, ValueError
        Not a function; complex numbers; draws of another shape than mu; a variance beside other
        claims; a negative variance; mu outside the bounds; a kurtosis of 1 or less; a number of
        draws that is not whole and positive; a rate outside (0, 1).

    Notes
    -----
    False-alarm rate: rigorous for every distribution of that variance, of those bounds, or of at
    most that kurtosis, however the entries depend on each other
    (:func:`linattn.testing.statistics.score_test`). With a variance the smallest bias is about
    ``1.6 sqrt(2 log(2 k / alpha) Var / n)`` for k entries. With bounds or a kurtosis half of the
    draws go into an upper bound of the variance, and the smallest bias is 1.5 to 2.5 times as
    large. :func:`draws_for` plans. A finite variance is needed in every case: no test of a mean is
    valid without one.

    Time n draws and O(n size), memory O(n size).

    References
    ----------
    Catoni, "Challenging the empirical mean and empirical variance: a deviation study" (2012),
    section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import assert_estimator
    >>> evidence = assert_estimator(lambda rng: rng.exponential(2.0), 2.0, variance=4.0)
    >>> evidence.detail.partition(";")[0]
    'sees a relative bias of 16.8 % with probability 0.99: 4000 draws of 1 entry'
    >>> low, high = evidence.interval
    >>> bool(low < 0 < high), bool(low < evidence.estimate < high)
    (True, True)
    """
    check_function("draw", draw, "(rng) -> array")
    _checks.check_positive_int("num_draws", num_draws)
    want = numbers("expected", expected() if callable(expected) else expected)
    noise = claimed(want, variance, bounds, kurtosis)
    source = Draws(draw, want.shape, as_generator(rng))
    warn_of_seed(CHECK, source.once)
    return assert_draws(CHECK, source.take, want, noise, num_draws, false_alarm)


def assert_draws(
    check: str,
    take: Callable[[int], NDArray[Any]],
    want: Floats,
    noise: Noise,
    num_draws: int,
    false_alarm: float,
) -> Evidence:
    """Test draws that ``take(count)`` returns, ``(count, ...)``: the body of `assert_estimator`."""
    rounding = [ROUNDING[8]]

    def draw(count: int) -> Floats:
        draws = take(count)
        rounding[0] = ROUNDING[draws.itemsize]
        if noise.bounds is not None:
            _check_bounds(check, draws, *noise.bounds, rounding[0])
        return draws.astype(np.float64, copy=False)

    measured = [np.asarray(noise.variance)]

    def mean_square(count: int) -> Floats:
        measured[0] = np.asarray(np.mean((draw(count) - want) ** 2, axis=0))
        return measured[0]

    power = measure(noise, mean_square, want, num_draws, false_alarm)
    scale = scale_of(want, power.variance)
    share = detectable_share(scale, power)
    smallest = float(np.max(share, initial=0.0))
    if smallest >= 1:
        _too_few(share, measured[0], want, noise, num_draws, false_alarm)
    draws = draw(power.num_draws)
    slack = rounding[0] * (np.abs(want) + 1e-3 * np.max(np.abs(draws), axis=0))
    slack = slack + 1e-5 * rounding[0] * np.max(np.abs(want), initial=0.0)
    test = score_test(
        draws - want, power.variance, false_alarm_rate=power.false_alarm, rounding=slack
    )
    size = f"{want.size} {'entry' if want.size == 1 else 'entries'}"
    sees = f"sees {visible(want, power.variance, share)} with probability 0.99"
    if not test.passed:
        at = worst(test.score)
        entry = f"entry {list(at)}, the worst of {size}," if at else "the estimate"
        message = (
            f"{explain(at, draws, want, power, (entry, 'expected value'))} A right estimator "
            f"fails in at most {false_alarm:.1g} of all runs. This test {sees}"
        )
        fail(check, message)
    if np.all(draws == draws[0]) and not np.all(np.abs(draws[0] - want) <= slack):
        raise UntestableError(
            "every draw is the same; draw(rng) must take its random numbers from rng"
        )
    if noise.variance is not None:
        warn_of_variance(check, draws, want, noise.variance)
    warn_of_dependence(check, draws, want, power.variance)
    note = "" if noise.variance is not None else f" ({power.origin})"
    in_sd = in_standard_deviations(share * scale, draws, want, power.variance)
    at = worst(test.score) if want.size else ()
    found, (low, high) = seen(at, draws, want, power.variance) if want.size else (0.0, (0.0, 0.0))
    where = f" at entry {list(at)}" if at else ""
    detail = (
        f"{sees}: {num_draws} draws of {size}{note}; seen: a bias of {found:+.2g}{where}, from "
        f"{low:+.2g} to {high:+.2g} with {CONFIDENCE:g}"
    )
    still = np.argwhere(np.all(draws == draws[0], axis=0) & moves(power.variance, want))
    detail += f"; no draw differs at entry {still[0].tolist()}" if len(still) else ""
    return Evidence(check, detail, false_alarm, smallest, in_sd, found, (low, high), at)


def draws_for(
    bias: float,
    expected: ArrayLike = 1.0,
    *,
    variance: ArrayLike | None = None,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    kurtosis: float | None = None,
    false_alarm: float = 1e-9,
) -> int:
    """Return how many draws :func:`assert_estimator` needs to see a relative bias with 99 %.

    Parameters
    ----------
    bias : float
        Relative to ``expected``: 0.03 for 3 %.
    expected : array_like (...), optional
        mu. Default 1.
    variance : array_like (...), optional
        Of one draw. Beside ``bounds`` or ``kurtosis`` it is a guess, which makes the answer one.
    bounds, kurtosis, false_alarm
        As for :func:`assert_estimator`.

    Returns
    -------
    int
        n, to 1 %.

    Raises
    ------
    UntestableError
        No claim, or a kurtosis without a guess of the variance.
    TypeError, ValueError
        A bias that is not positive; claims as for :func:`assert_estimator`; more than 2^40 draws.

    Examples
    --------
    >>> from linattn.testing import draws_for
    >>> round(draws_for(0.03, expected=2.0, variance=4.0), -4)
    120000
    """
    _checks.check_finite_number("bias", bias, positive=True)
    want = numbers("expected", expected)
    guess = None if variance is None else claimed(want, variance, None, None).variance
    is_guess = bounds is not None or kurtosis is not None
    noise = claimed(want, None if is_guess else variance, bounds, kurtosis)
    if guess is None and noise.bounds is not None:
        guess = (want - noise.bounds[0]) * (noise.bounds[1] - want)
    if guess is None:
        raise UntestableError("variance must be given beside kurtosis: a guess of that of one draw")
    typical = np.broadcast_to(guess, want.shape)

    def share(n: int) -> float:
        power = measure(noise, lambda _: typical, want, n, false_alarm)
        return float(np.max(detectable_share(scale_of(want, typical), power), initial=0.0))

    return smallest_count(bias, share)


def _check_bounds(
    check: str, draws: NDArray[Any], low: Floats, high: Floats, rounding: float
) -> None:
    slack = rounding * np.maximum(np.abs(low), np.abs(high))
    outside = (draws < low - slack) | (draws > high + slack)
    if np.any(outside):
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        limits = [float(np.broadcast_to(limit, draws.shape)[at]) for limit in (low, high)]
        message = (
            f"a draw is {draws[at]:.6g}, outside its bounds {limits[0]:.6g} and {limits[1]:.6g}"
            f"{f', at entry {list(at[1:])}' if at[1:] else ''}"
        )
        fail(check, message)


def claimed(want: Floats, variance: Any, bounds: Any, kurtosis: float | None) -> Noise:
    """Check the claim about the noise."""
    given = [
        name
        for name, claim in (("variance", variance), ("bounds", bounds), ("kurtosis", kurtosis))
        if claim is not None
    ]
    if not given:
        raise UntestableError(
            "one of variance=, bounds= or kurtosis= must be given: without any, no test of a mean "
            "is valid; where nothing is known try kurtosis=25"
        )
    if len(given) > 1 and variance is not None:
        raise ValueError(
            f"variance= must be given alone, got {' and '.join(given)}; the others measure one"
        )
    if not np.all(np.isfinite(want)):
        raise ValueError("expected must be finite, got NaN or inf: no mean is")
    tails = None if kurtosis is None else float(kurtosis)
    if bounds is not None:
        low, high = (for_each("bounds", limit, want) for limit in bounds)
        if not np.all((low <= want) & (want <= high)):
            raise ValueError("bounds must be (smallest, largest) with expected between them")
        return Noise(bounds=(low, high), kurtosis=tails)
    if tails is not None:
        return Noise(kurtosis=tails)
    stated = for_each("variance", variance, want)
    if not np.all(stated >= 0):
        raise ValueError(f"variance must not be negative or NaN, got {float(np.min(stated)):.3g}")
    return Noise(variance=stated)


def _too_few(
    share: Floats, seen: Floats, want: Floats, noise: Noise, num_draws: int, false_alarm: float
) -> None:
    """Say that the test would be blind, where most, and how many draws would do."""
    at = [int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape)]
    largest = float(np.max(share))
    could = f"a relative bias of {100 * largest:.3g} %" if largest < np.inf else "any bias"

    def of_draws(n: int) -> float:
        power = measure(noise, lambda _: seen, want, n, false_alarm)
        return float(np.max(detectable_share(scale_of(want, seen), power)))

    where = f" at entry {at}" if at else ""
    raise UntestableError(
        f"num_draws is too small, got {num_draws}: {could} could pass{where}; num_draws of about "
        f"{smallest_count(0.5, of_draws):,} would show a bias of 50 %; "
        f"linattn.testing.draws_for plans"
    )
