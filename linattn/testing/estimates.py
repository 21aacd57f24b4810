"""Assertions about the distribution of an estimate: unbiased, of the mean and the variance claimed.

Letters: ``P`` pairs of vectors, ``d`` dim, ``n`` draws of the map, ``K`` the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from linattn import _arrays, _checks
from linattn.feature_maps._projected import SoftmaxKernelFeatures
from linattn.sampling import Seed
from linattn.testing._doubts import CUT_OFF_VARIANCES
from linattn.testing._draws import Floats, MapOrFactory, MapSource, need_pair_kernel
from linattn.testing._evidence import Evidence, UntestableError, fail, on_host
from linattn.testing._means import (
    STATED,
    Noise,
    detectable_share,
    explain,
    in_standard_deviations,
    measure,
    moves,
    percent,
    scale_of,
    seen,
    worst,
)
from linattn.testing._pairs import (
    Pairs,
    check_power,
    checked_variance,
    claim_or_method,
    evaluate,
    variance_or_bound,
)
from linattn.testing.moments import block_kurtosis
from linattn.testing.statistics import at_most_test, detectable_shift, score_test
from linattn.typing import Array

__all__ = ["Claim", "assert_mean", "assert_unbiased", "assert_variance"]

Claim: TypeAlias = "Callable[[Array, Array], Array] | ArrayLike"
"""A claim: ``claim(x, y)`` with shapes as ``kernel``, or a number for each pair."""


@_arrays.on_array_device
def assert_unbiased(
    map_or_factory: MapOrFactory,
    x: Array | None = None,
    y: Array | None = None,
    *,
    kernel: Claim | None = None,
    variance: Claim | None = None,
    kurtosis: float | None = None,
    num_draws: int = 4000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that the mean of ``phi(x) . psi(y)`` over draws is the kernel.

    Parameters
    ----------
    map_or_factory : feature map or callable
        A map that ``redraw(rng)`` draws again, or ``factory(rng)`` that makes one. A map with
        neither is deterministic: its features must give the kernel to rounding.
    x, y : array, (P, d), optional
        Pairs. Default: pairs with ``scale |x + y|^2 <= 1/2`` along axes, diagonals and in general
        position, and opposite ones.
    kernel : callable or array_like (P,), optional
        K. Default ``map.kernel``.
    variance : callable or array_like (P,), optional
        Exact variance of one draw, or an upper bound of it. Default ``map.variance``; the variance
        of a single row for maps of linattn without that method.
    kurtosis : float, optional
        For maps whose variance is not known: an upper bound of ``E (X - K)^4 / Var(X)^2`` of one
        draw. Half of the draws then bound the variance, the others test the mean. It is an
        assumption of yours: 25 holds for one positive feature, and so for the average of any number
        of independent ones, at the default pairs.
    num_draws : int, optional
        n. Default 4000.
    false_alarm_rate : float, optional
        alpha. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0: the same draws each time. None for fresh ones.

    Returns
    -------
    Evidence
        ``detectable`` is the relative bias that is found with 99 %, at the pair where it is
        largest. Where the kernel at a pair is near 0, below a tenth of the largest
        kernel or half of a draw's standard deviation, it is a share of that. ``detail`` names the
        default pairs that were left out.
        ``detectable_sd`` is the bias in standard deviations of one draw, as measured, at the pair
        where it is smallest. Pairs whose draws do not differ do not count for either.

    Raises
    ------
    AssertionError
        The mean is not the kernel, or the variance is larger than claimed.
    UntestableError
        No valid test exists: pairs of positive features of the softmax kernel with
        ``v = scale |x + y|^2`` above 2, where a few huge draws make up the mean; so few draws that
        a bias of 100 % would pass (50 % at every default pair); neither a variance nor a kurtosis
        known.
    TypeError, ValueError
        Not a map or factory; no pairs ``(P, d)``; a negative variance; a number of draws that is
        not whole and positive, a rate outside (0, 1), a kurtosis of 1 or less.

    Notes
    -----
    False-alarm rate: rigorous, for any distribution
    (:func:`linattn.testing.statistics.score_test`), and with ``kurtosis`` for any distribution of
    at most that kurtosis (:func:`linattn.testing.statistics.variance_bound`). The smallest relative
    bias is about ``1.6 sqrt(2 log(2 P / alpha) Var / n) / K``: for m independent positive features
    at v = 1/2, m = 32 and the defaults, 2.5 %; with a measured variance 2.5 times that.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import assert_unbiased
    >>> evidence = assert_unbiased(PositiveFeatures(4, num_features=8, rng=0), num_draws=200)
    >>> evidence.check
    'assert_unbiased'
    """
    claim = _MeanClaim("assert_unbiased", "kernel", kernel, variance, kurtosis)
    return _assert_mean(claim, map_or_factory, x, y, num_draws, false_alarm_rate, rng)


@_arrays.on_array_device
def assert_mean(
    map_or_factory: MapOrFactory,
    x: Array | None = None,
    y: Array | None = None,
    *,
    mean: Claim | None = None,
    variance: Claim | None = None,
    kurtosis: float | None = None,
    num_draws: int = 4000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that the mean over draws is the one claimed: for maps whose bias is known.

    Parameters
    ----------
    map_or_factory, x, y, variance, kurtosis, num_draws, false_alarm_rate, rng
        As :func:`assert_unbiased`.
    mean : callable or array_like (P,), optional
        Default ``map.mean``.

    Returns
    -------
    Evidence
        As :func:`assert_unbiased`.

    Raises
    ------
    AssertionError, UntestableError, TypeError, ValueError
        As :func:`assert_unbiased`.

    Notes
    -----
    False-alarm rate and smallest bias as :func:`assert_unbiased`.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import assert_mean
    >>> phi = PositiveFeatures(4, num_features=8, rng=0)
    >>> assert_mean(phi, mean=phi.kernel, num_draws=200).check
    'assert_mean'
    """
    claim = _MeanClaim("assert_mean", "mean", mean, variance, kurtosis)
    return _assert_mean(claim, map_or_factory, x, y, num_draws, false_alarm_rate, rng)


class _MeanClaim(NamedTuple):
    """What an assertion about a mean was given."""

    check: str
    word: str
    """What the mean is called, and the argument and method that state it."""
    mean: Any
    variance: Any
    kurtosis: float | None


def _assert_mean(
    claim: _MeanClaim,
    map_or_factory: Any,
    x: Any,
    y: Any,
    num_draws: int,
    false_alarm_rate: float,
    rng: Seed,
) -> Evidence:
    _checks.check_positive_int("num_draws", num_draws)
    source = MapSource(map_or_factory, rng)
    need_pair_kernel(source.first)
    pairs = Pairs(source, x, y)
    mean = claim_or_method(source.first, claim.word, claim.mean, f"{claim.word}=")
    if not source.is_random:
        return _assert_equal_features(claim, pairs, mean)
    pairs.add_differences(mean)
    expected = evaluate(pairs, claim.word, mean)
    known, origin = variance_or_bound(pairs, claim.variance, claim.kurtosis)
    if known is None:
        noise = Noise(kurtosis=float(claim.kurtosis or 0))
    else:
        noise = Noise(checked_variance(pairs, known, expected), origin=origin)

    def mean_square(count: int) -> Floats:
        products = source.products(pairs.x, pairs.y, count)
        return np.asarray(np.mean((products - expected) ** 2, axis=0))

    power = measure(noise, mean_square, expected, num_draws, false_alarm_rate)
    # Of the default pairs those that show nothing are left out.
    scale = scale_of(expected, power.variance)
    detectable = detectable_share(scale, power)
    check_power(pairs, detectable, moves(power.variance, expected))
    left_out = pairs.describe(detectable >= pairs.blind, detectable)
    index = pairs.keep(detectable < pairs.blind)
    expected, scale = expected[index], scale[index]
    power = power._replace(variance=power.variance[index])
    detectable = detectable_share(scale, power)
    products = source.products(pairs.x, pairs.y, power.num_draws)
    rounding = pairs.rounding * (np.abs(expected) + 1e-3 * np.max(np.abs(products), axis=0))
    test = score_test(
        products - expected,
        power.variance,
        false_alarm_rate=power.false_alarm,
        rounding=rounding,
    )
    if not test.passed:
        at = worst(test.score)
        message = (
            f"{explain(at, products, expected, power, ('phi(x) . psi(y)', claim.word))} A map with "
            f"this {claim.word} and variance fails in at most {false_alarm_rate:.1g} of all runs. "
            f"{pairs.name(at)}"
        )
        fail(claim.check, message)
    smallest = float(np.max(detectable))
    note = f" ({power.origin})" if power.origin != STATED else ""
    detail = f"{num_draws} draws, {index.size} pairs; sees a bias of {smallest:.1%}{note}{left_out}"
    in_sd = in_standard_deviations(detectable * scale, products, expected, power.variance)
    at = worst(test.score)
    found = seen(at, products, expected, power.variance)
    return Evidence(claim.check, detail, false_alarm_rate, smallest, in_sd, *found, at)


def _assert_equal_features(claim: _MeanClaim, pairs: Pairs, mean: Any) -> Evidence:
    expected = evaluate(pairs, claim.word, mean)
    got = pairs.source.products(pairs.x, pairs.y, 1)[0]
    allowed = pairs.rounding * np.maximum(np.abs(expected), np.abs(got)) + 1e-300
    difference = np.abs(got - expected)
    if not np.all(difference <= allowed):
        at = worst(np.asarray(difference / allowed))
        want = np.broadcast_to(expected, got.shape)[at]
        message = (
            f"phi(x) . psi(y) = {got[at]:.9g}, {claim.word} {want:.9g} at {pairs.name(at)}; the "
            f"map is deterministic here: a random map needs redraw(rng) or a factory"
        )
        fail(claim.check, message)
    detail = f"deterministic: {got.size} products to rounding"
    return Evidence(claim.check, detail, 0.0, pairs.rounding)


@_arrays.on_array_device
def assert_variance(
    map_or_factory: MapOrFactory,
    x: Array | None = None,
    y: Array | None = None,
    *,
    variance: Claim | None = None,
    relation: str = "equal",
    mean: Claim | None = None,
    kurtosis: Claim | None = None,
    num_draws: int = 8000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that the variance over draws equals, or is at most, a claim.

    Parameters
    ----------
    map_or_factory, x, y, false_alarm_rate, rng
        As :func:`assert_unbiased`. Pairs without variance are left out.
    variance : callable or array_like (P,), optional
        The claim. Default ``map.variance``.
    relation : {"equal", "at_most"}, optional
        Default "equal".
    mean : callable or array_like (P,), optional
        Exact mean. Default ``map.mean``, or ``map.kernel``.
    kurtosis : callable or array_like (P,), optional
        ``E (X - K)^4 / Var(X)^2`` of one draw, or an upper bound. By default exact for the
        exponential and trigonometric maps of linattn with independent or orthogonal rows.
    num_draws : int, optional
        n. Default 8000.

    Returns
    -------
    Evidence
        ``detectable`` is the relative error of the variance that is found with 99 %.

    Raises
    ------
    AssertionError
        The variance differs from the claim.
    UntestableError
        As :func:`assert_unbiased`; a variance twice the claim could pass at every pair; the map is
        deterministic.
    TypeError, ValueError
        An unknown relation; arguments as :func:`assert_unbiased`.

    Notes
    -----
    The squares ``(X - K)^2`` are tested against the claim by
    :func:`linattn.testing.statistics.score_test`, whose variance is
    ``(kurtosis - 1) Var^2``. False-alarm rate: rigorous with a known kurtosis; smallest relative
    error about ``1.7 sqrt(2 log(2 P / alpha) (kurtosis - 1) / n)``, 18 % for a kurtosis of 3 and
    the defaults.

    Without one, "at_most" is still rigorous: squares cut off at 20 variances, by
    :func:`linattn.testing.statistics.at_most_test`; it finds about 50 %. "equal" then takes twice
    the kurtosis of a pilot of a quarter of the draws: its false-alarm rate is approximate.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import assert_variance
    >>> evidence = assert_variance(PositiveFeatures(4, num_features=8, rng=0), num_draws=500)
    >>> evidence.check
    'assert_variance'
    """
    check = "assert_variance"
    if relation not in ("equal", "at_most"):
        raise ValueError(f"relation must be 'equal' or 'at_most', got {relation!r}")
    _checks.check_positive_int("num_draws", num_draws)
    source = MapSource(map_or_factory, rng)
    if not source.is_random:
        raise UntestableError(
            "map_or_factory must be random: a map with redraw(rng), or factory(rng)"
        )
    pairs = Pairs(source, x, y)
    mean, variance = _claimed_moments(pairs, mean, variance)
    given = kurtosis is not None
    tails = pairs.claim(kurtosis, "kurtosis") if given else _known_kurtosis(pairs)
    squares = (source.products(pairs.x, pairs.y, num_draws) - mean) ** 2
    if tails is None and relation == "at_most":
        return _assert_at_most(check, pairs, squares, variance, false_alarm_rate)
    note = "" if tails is not None else " (approximate rate)"
    if tails is None:
        squares, tails = _pilot_kurtosis(squares)
    num = squares.shape[0]
    detectable = detectable_shift(
        tails - 1, num, false_alarm_rate=false_alarm_rate, num_tests=max(1, squares[0].size)
    )
    smallest = float(np.min(detectable))
    if smallest >= 1:
        raise UntestableError(
            f"num_draws is too small: a variance {1 + smallest:.3g} times the claim could pass at "
            f"every pair"
        )
    test = score_test(
        squares - variance,
        (tails - 1) * variance**2,
        false_alarm_rate=false_alarm_rate,
        side="both" if relation == "equal" else "above",
    )
    if not test.passed:
        at, words = worst(test.score), relation.replace("_", " ")
        _fail_variance(check, pairs, at, squares, variance, words, false_alarm_rate)
    detail = f"{num} draws, {len(pairs.index)} pairs; sees an error of {smallest:.0%}{note}"
    at = worst(test.score)
    found = seen(at, squares, variance, (tails - 1) * variance**2)
    return Evidence(check, detail, false_alarm_rate, smallest, 0.0, *found, at)


def _claimed_moments(pairs: Pairs, mean: Any, variance: Any) -> tuple[Floats, Floats]:
    """Mean and variance claimed at the pairs that have a variance; only these pairs stay."""
    feature_map = pairs.source.first
    variance = claim_or_method(feature_map, "variance", variance, "variance=")
    word = "mean" if mean is not None or hasattr(feature_map, "mean") else "kernel"
    expected = evaluate(pairs, "mean", claim_or_method(feature_map, word, mean, "mean="))
    variance = checked_variance(pairs, variance, expected)
    moving = moves(variance, expected)
    check_power(pairs, np.zeros_like(variance), moving)
    index = pairs.keep(moving & (pairs.given | (variance < 50 * expected**2)))
    if not index.size:
        raise UntestableError("x and y must have pairs at which the claimed variance is not 0")
    return expected[index], variance[index]


def _assert_at_most(
    check: str, pairs: Pairs, squares: Floats, variance: Floats, rate: float
) -> Evidence:
    """Test of a variance without a kurtosis: squares are cut off."""
    num = squares.shape[0]
    test = at_most_test(squares, variance, CUT_OFF_VARIANCES * variance, false_alarm_rate=rate)
    if not test.passed:
        _fail_variance(check, pairs, worst(-test.log_p), squares, variance, "at most", rate)
    seen = float(np.sqrt(2 * CUT_OFF_VARIANCES * np.log(squares[0].size / rate) / num))
    detail = f"{num} draws, {len(pairs.index)} pairs; sees an excess of {2 * seen:.0%}"
    return Evidence(check, detail, rate, 2 * seen)


def _pilot_kurtosis(squares: Floats) -> tuple[Floats, Floats]:
    """Set a quarter of the draws aside; return the others, and twice the quarter's kurtosis."""
    num_draws = squares.shape[0]
    num = num_draws - num_draws // 4
    if num == num_draws:
        raise UntestableError(f"num_draws is too small to know the kurtosis, got {num_draws}")
    pilot = squares[num:]
    return squares[:num], 2 * np.mean(pilot**2, axis=0) / np.mean(pilot, axis=0) ** 2


def _fail_variance(
    check: str,
    pairs: Pairs,
    at: tuple[int, ...],
    squares: Floats,
    variance: Floats,
    relation: str,
    rate: float,
) -> None:
    got = np.mean(squares, axis=0)[at]
    want = np.broadcast_to(variance, squares[0].shape)[at]
    error = np.std(squares, axis=0)[at] / np.sqrt(squares.shape[0])
    message = (
        f"variance of phi(x) . psi(y) over {squares.shape[0]} draws is {got:.6g}, want {relation} "
        f"{want:.6g} ({percent(got, want)}); a standard error, as measured, is {error:.3g}. A map "
        f"with this mean and variance fails in at most {rate:.1g} of all runs. {pairs.name(at)}"
    )
    fail(check, message)


def _known_kurtosis(pairs: Pairs) -> Floats | None:
    """Exact kurtosis where rows are independent or orthogonal and there is one tilt."""
    feature_map: Any = pairs.source.first
    name = getattr(getattr(feature_map, "sampler", None), "name", None)
    name = name or getattr(feature_map, "sampler", None)
    if not isinstance(feature_map, SoftmaxKernelFeatures) or name not in ("gaussian", "orthogonal"):
        return None
    tilts = np.unique(getattr(feature_map, "_A", 0.0))
    if tilts.size > 1 or tilts[0] >= 1 / 16:
        return None
    sq_norms = feature_map._square_norm(on_host(pairs.x), on_host(pairs.y))[..., 0, 0]
    rows = feature_map.projection.shape[-2]
    kurtosis = np.vectorize(
        lambda v: block_kurtosis(
            feature_map._kind,
            max(float(v), 1e-3),
            rows,
            feature_map.dim,
            orthogonal=name == "orthogonal",
            A=float(tilts[0]),
        ),
        otypes=[np.float64],
    )
    return np.asarray(kurtosis(sq_norms))
