"""Test the variance and the covariance of any function that returns random estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._doubts import warn_of_dependence, warn_of_seed
from linattn.testing._evidence import Evidence, UntestableError, check_function, fail
from linattn.testing._means import CONFIDENCE, Floats, percent, seen, worst
from linattn.testing._numbers import Draws, for_each, numbers
from linattn.testing.statistics import detectable_shift, score_test

__all__ = ["assert_estimator_covariance", "assert_estimator_variance"]


@_arrays.on_array_device
def assert_estimator_variance(
    draw: Callable[[np.random.Generator], Any],
    variance: ArrayLike,
    mean: ArrayLike | None = None,
    *,
    kurtosis: float | None = None,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    relation: str = "equal",
    num_draws: int = 8000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that the variance of what a function draws is the one claimed, entry by entry.

    .. math:: \mathrm{E}\,(X - \mu)^2 = \sigma^2

    Parameters
    ----------
    draw : callable
        ``draw(rng)`` returns one estimate X, as for :func:`assert_estimator`.
    variance : array_like (...)
        sigma^2, of the shape of a draw, or a number for all entries of `mean`. Entries that are 0
        are not tested.
    mean : array_like (...), optional
        mu, where it is known. By default draws are taken in pairs, whose differences have no mean:
        half as many.
    kurtosis : float, optional
        Upper bound of ``E (X - mu)^4 / Var(X)^2``: 3 for Gaussian noise. Try 25.
    bounds : tuple of two array_like (...), optional
        The smallest and the largest value that a draw can take, which bound the kurtosis.
    relation : {"equal", "at_most"}, optional
        Default "equal".
    num_draws : int, optional
        n. Default 8000.
    false_alarm : float, optional
        alpha, the probability that a right claim fails, all entries together. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0: the same draws each time. None for fresh ones.

    Returns
    -------
    Evidence
        ``detectable`` is the relative error that is found with 99 %, at the entry where it is
        largest. ``estimate`` is the measured variance less the claim, ``interval`` holds the true
        difference with 95 %.

    Raises
    ------
    AssertionError
        The variance differs from the claim, or a draw is NaN or outside its bounds.
    UntestableError
        Neither a kurtosis nor bounds; draws so few that a variance twice the claim could pass.
    TypeError, ValueError
        Not a function; complex numbers; draws of another shape; a negative variance; a kurtosis of
        1 or less; an unknown relation; a number of draws that is not whole and positive.

    Warns
    -----
    UserWarning
        Neighbouring draws are correlated, or one seed gave two results.

    Notes
    -----
    False-alarm rate: rigorous for every distribution of at most that kurtosis
    (:func:`linattn.testing.statistics.score_test` of the squares, whose variance is at most
    ``(kurtosis - 1) sigma^4``). The smallest error is about
    ``1.6 sqrt(2 log(2 k / alpha) (kurtosis - 1) / n)`` for k entries. Half the square of the
    difference of two draws has the mean sigma^2 and the kurtosis ``(kurtosis + 3) / 2``.

    Examples
    --------
    >>> from linattn.testing import assert_estimator_variance
    >>> evidence = assert_estimator_variance(lambda rng: rng.normal(1, 2), 4.0, kurtosis=3)
    >>> evidence.detail.partition(";")[0]
    'sees an error of 23.7 % of the variance with probability 0.99: 8000 draws of 1 entry'
    """
    if relation not in ("equal", "at_most"):
        raise ValueError(f"relation must be 'equal' or 'at_most', got {relation!r}")
    check = "assert_estimator_variance"
    claim = numbers("variance", variance)
    center = None if mean is None else numbers("mean", mean)
    shape = claim.shape if center is None else np.broadcast_shapes(claim.shape, center.shape)
    claim = np.broadcast_to(claim, shape)
    off, tails = _deviations(check, draw, claim, center, kurtosis, bounds, num_draws, rng)
    entries = claim > 0
    squares, stated = off[:, entries] ** 2, claim[entries]
    noise = (np.broadcast_to(tails, shape)[entries] - 1) * stated**2
    names = [tuple(int(i) for i in index) for index in np.argwhere(entries)]
    words = ("variance", relation.replace("_", " "))
    return _judge(squares, stated, noise, stated, names, words, num_draws, false_alarm)


@_arrays.on_array_device
def assert_estimator_covariance(
    draw: Callable[[np.random.Generator], Any],
    covariance: ArrayLike,
    mean: ArrayLike | None = None,
    *,
    kurtosis: float | None = None,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    num_draws: int = 8000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that the covariance of what a function draws is the one claimed, pair by pair.

    .. math:: \mathrm{E}\,(X_i - \mu_i)(X_j - \mu_j) = C_{ij}

    Parameters
    ----------
    draw : callable
        ``draw(rng)`` returns one estimate X, a vector (k,).
    covariance : array_like (k, k)
        C, symmetric; independent entries have a diagonal one.
    mean : array_like (k,), optional
        mu, where it is known. By default draws are taken in pairs, as for
        :func:`assert_estimator_variance`.
    kurtosis, bounds, num_draws, false_alarm, rng
        As for :func:`assert_estimator_variance`.

    Returns
    -------
    Evidence
        ``detectable`` is the error that is found with 99 %, in the product of two standard
        deviations as claimed; ``entry`` is the pair (i, j).

    Raises
    ------
    AssertionError, UntestableError, TypeError, ValueError
        As for :func:`assert_estimator_variance`; a covariance that is not square or not symmetric.

    Warns
    -----
    UserWarning
        Neighbouring draws are correlated, or one seed gave two results.

    Notes
    -----
    False-alarm rate: rigorous. By the inequality of Cauchy and Schwarz a product has a variance of
    at most ``kurtosis C_ii C_jj - C_ij^2``. Entries without variance are not tested.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import assert_estimator_covariance
    >>> covariance = np.array([[2.0, 1.0], [1.0, 3.0]])
    >>> root = np.linalg.cholesky(covariance)
    >>> def draw(rng):
    ...     return root @ rng.standard_normal(2)
    >>> assert_estimator_covariance(draw, covariance, mean=[0, 0], kurtosis=3).entry
    (1, 1)
    """
    check = "assert_estimator_covariance"
    claim = numbers("covariance", covariance)
    if claim.ndim != 2 or claim.shape[0] != claim.shape[1]:
        raise ValueError(f"covariance must have shape (k, k), got {claim.shape}")
    if not np.allclose(claim, claim.T, 1e-9, 1e-300):
        raise ValueError("covariance must be symmetric")
    center = None if mean is None else for_each("mean", mean, np.diag(claim))
    diagonal = np.diag(claim)
    off, tails = _deviations(check, draw, diagonal, center, kurtosis, bounds, num_draws, rng)
    first, second = np.triu_indices(len(claim))
    moving = (diagonal[first] > 0) & (diagonal[second] > 0)
    first, second = first[moving], second[moving]
    fourth = np.broadcast_to(tails, diagonal.shape) * diagonal**2
    stated = claim[first, second]
    noise = np.sqrt(fourth[first] * fourth[second]) - stated**2
    names = list(zip(first.tolist(), second.tolist(), strict=True))
    products = off[:, first] * off[:, second]
    unit = np.sqrt(diagonal[first] * diagonal[second])
    words = ("covariance", "equal")
    return _judge(products, stated, noise, unit, names, words, num_draws, false_alarm)


def _deviations(
    check: str,
    draw: Callable[..., Any],
    variance: Floats,
    mean: Floats | None,
    kurtosis: float | None,
    bounds: Any,
    num_draws: int,
    rng: Seed,
) -> tuple[Floats, Floats]:
    """Return deviations of variance ``variance``, and an upper bound of their kurtosis."""
    check_function("draw", draw, "(rng) -> array")
    _checks.check_positive_int("num_draws", num_draws)
    if not np.all(np.isfinite(variance) & (variance >= 0)):
        raise ValueError("variance must be finite and not negative")
    if kurtosis is None and bounds is None:
        raise UntestableError(
            "kurtosis= or bounds= must be given: without either no test of a variance is valid; "
            "where nothing is known try kurtosis=25"
        )
    if kurtosis is not None and not kurtosis > 1:
        raise ValueError(f"kurtosis must be above 1, got {kurtosis!r}")
    source = Draws(draw, variance.shape, as_generator(rng), "the claim")
    warn_of_seed(check, source.once)
    draws = source.take(num_draws).astype(np.float64, copy=False)
    tails = np.full(variance.shape, np.inf if kurtosis is None else float(kurtosis))
    if bounds is not None:
        low, high = (for_each("bounds", limit, variance) for limit in bounds)
        if np.any((draws < low) | (draws > high)):
            fail(check, f"draws go from {draws.min():.6g} to {draws.max():.6g}, outside the bounds")
        farthest = high - low if mean is None else np.maximum(high - mean, mean - low)
        with np.errstate(divide="ignore"):
            tails = np.minimum(tails, np.where(variance > 0, farthest**2 / variance, 1.0))
    if mean is not None:
        return draws - mean, tails
    half = len(draws) // 2
    return (draws[:half] - draws[half : 2 * half]) / np.sqrt(2), (tails + 3) / 2


def _judge(
    products: Floats,
    stated: Floats,
    noise: Floats,
    unit: Floats,
    names: Sequence[tuple[int, ...]],
    words: tuple[str, str],
    num_draws: int,
    false_alarm: float,
) -> Evidence:
    """Test products ``(n, tests)`` against their means."""
    word, relation = words
    check = f"assert_estimator_{word}"
    if not names:
        raise UntestableError(f"{word} must have an entry that is not 0")
    num = len(products)
    shift = (
        detectable_shift(noise, max(1, num), false_alarm_rate=false_alarm, num_tests=len(names))
        / unit
    )
    largest = float(np.max(shift))
    if not (num and largest < 1):
        raise UntestableError(
            f"num_draws is too small, got {num_draws}: a {word} twice the claim could pass at "
            f"entry {list(names[worst(shift)[0]])}"
        )
    side = "both" if relation == "equal" else "above"
    test = score_test(products - stated, noise, false_alarm_rate=false_alarm, side=side)
    (at,) = worst(test.score)
    where = f" at entry {list(names[at])}" if names[at] else ""
    got, want = float(np.mean(products[:, at])), float(stated[at])
    if not test.passed:
        message = (
            f"{word}{where} over {num_draws} draws is {got:.6g}, want {relation} {want:.6g} "
            f"({percent(got, want)}). A right claim fails in at most {false_alarm:.1g} of all runs"
        )
        fail(check, message)
    warn_of_dependence(check, products, stated, noise)
    found, (low, high) = seen((at,), products, stated, noise)
    scale = "of the variance" if word == "variance" else "of the deviations' product"
    size = f"{num_draws} draws of {len(names)} {'entry' if len(names) == 1 else 'entries'}"
    detail = (
        f"sees an error of {100 * largest:.3g} % {scale} with probability 0.99: {size}; seen: "
        f"{found:+.2g}{where}, from {low:+.2g} to {high:+.2g} with {CONFIDENCE:g}"
    )
    return Evidence(check, detail, false_alarm, largest, 0.0, found, (low, high), names[at])
