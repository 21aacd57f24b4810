"""Assertions about the distribution of an estimate: unbiased, of the mean and the variance claimed.

Letters: ``P`` pairs of vectors, ``d`` dim, ``n`` draws of the map, ``K`` the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _checks
from linattn.feature_maps import Reparametrized
from linattn.feature_maps._projected import ProjectedFeatureMap, SoftmaxKernelFeatures
from linattn.sampling import SAMPLERS, Sampler, Seed
from linattn.testing._draws import (
    Floats,
    MapOrFactory,
    MapSource,
    lead_axes,
    need_pair_kernel,
    standard_pairs,
)
from linattn.testing._evidence import Evidence, UntestableError, fail, on_host
from linattn.testing.moments import block_kurtosis
from linattn.testing.statistics import (
    at_most_test,
    detectable_shift,
    score_test,
    variance_bound,
)
from linattn.typing import Array

__all__ = ["Claim", "assert_mean", "assert_unbiased", "assert_variance"]

Claim: TypeAlias = "Callable[[Array, Array], Array] | ArrayLike"
"""What is claimed: ``claim(x, y)`` with shapes as ``kernel``, or a number for each pair."""

LARGEST_V = 2.0
"""Where sample means of positive features stop telling anything."""

NO_VARIANCE = 1e-12
"""Relative variance of an estimate that only rounding moves."""

STATED = "as stated"
"""Origin of a variance that the caller or the map gave."""

CUT_OFF = 20.0
"""Where squares are cut off, in variances, when their own variance is not known."""


class _Pairs:
    """Pairs of vectors in the shape that maps with heads take, and what is claimed there."""

    def __init__(self, source: MapSource, x: Any, y: Any) -> None:
        self.source = source
        feature_map = source.first
        self.given = x is not None or y is not None
        self.blind = 1.0 if self.given else 0.5
        self.origin = "the pairs given"
        if self.given:
            xp, (x, y) = _checks.check_arrays(x=x, y=y)
            if tuple(x.shape) != tuple(y.shape) or x.ndim != 2:
                message = (
                    f"x and y must be pairs of shape (pairs, dim), got shapes {tuple(x.shape)} and "
                    f"{tuple(y.shape)}"
                )
                raise ValueError(message)
        else:
            scale = float(getattr(feature_map, "scale", 1.0))
            dim = getattr(feature_map, "dim", None) or 4
            seed = int(source.rng.integers(2**32))
            x, y = standard_pairs(dim, scale, seed)
            xp = array_api_compat.array_namespace(x)
            self.origin = f"linattn.testing.standard_pairs({dim}, {scale!r}, {seed})"
        num, dim = x.shape
        self.index = np.arange(num)
        heads = lead_axes(feature_map, dim)
        flat, full = (num, *(1 for _ in heads), 1, dim), (num, *heads, 1, dim)
        self.x, self.y = (xp.broadcast_to(xp.reshape(a, flat), full) for a in (x, y))
        self.rounding = 1e-9 if x.dtype == xp.float64 else 1e-4

    def claim(self, claim: Any) -> Floats:
        """Evaluate a claim to ``(P, ...)``."""
        if callable(claim):
            return on_host(claim(self.x, self.y))[..., 0, 0]
        heads = (1,) * (self.x.ndim - 3)
        flat = np.broadcast_to(np.asarray(claim, dtype=np.float64), (self.x.shape[0],))
        return flat.reshape(-1, *heads)

    def keep(self, wanted: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Keep the pairs (first axis) that are wanted for every head; return their indices."""
        index = np.flatnonzero(np.all(wanted.reshape(wanted.shape[0], -1), axis=-1))
        xp = array_api_compat.array_namespace(self.x)
        rows = xp.asarray(index, device=array_api_compat.device(self.x))
        self.x, self.y = (xp.take(array, rows, axis=0) for array in (self.x, self.y))
        self.index = self.index[index]
        return index

    def name(self, at: tuple[int, ...]) -> str:
        """Show a pair, and say how it is made again."""
        x, y = (
            np.array2string(on_host(a)[at][0], precision=3, threshold=6, edgeitems=2)
            for a in (self.x, self.y)
        )
        head = f" for head {at[1:]}" if len(at) > 1 else ""
        return f"pair {self.index[at[0]]} of {self.origin}{head}: x = {x}, y = {y}"

    def sq_norms(self) -> Floats:
        """``scale |x + y|^2`` of each pair."""
        scale = float(getattr(self.source.first, "scale", 1.0))
        return np.asarray(scale * np.sum((on_host(self.x) + on_host(self.y)) ** 2, axis=-1))


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
        Exact variance of one draw, or an upper bound of it. Default ``map.variance``; for maps of
        linattn that do not know theirs, that of a single row.
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
        largest; ``detectable_sd`` the bias in standard deviations of one draw, as measured, at the
        pair where it is smallest. Pairs whose draws do not differ do not count for either.

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
    """
    return _assert_mean(
        "assert_unbiased", "kernel", map_or_factory, x, y, kernel, variance,
        kurtosis, num_draws, false_alarm_rate, rng,
    )  # fmt: skip


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
    """
    return _assert_mean(
        "assert_mean", "mean", map_or_factory, x, y, mean, variance,
        kurtosis, num_draws, false_alarm_rate, rng,
    )  # fmt: skip


def _assert_mean(
    check: str,
    word: str,
    map_or_factory: Any,
    x: Any,
    y: Any,
    mean: Any,
    variance: Any,
    kurtosis: float | None,
    num_draws: int,
    false_alarm_rate: float,
    rng: Seed,
) -> Evidence:
    _checks.check_positive_int("num_draws", num_draws)
    source = MapSource(map_or_factory, rng)
    need_pair_kernel(source.first)
    pairs = _Pairs(source, x, y)
    mean = _claim_or_method(source.first, word, mean, f"{word}=")
    if not source.is_random:
        return _assert_equal_features(check, word, pairs, mean)
    expected = _evaluate(pairs, "mean", mean)
    known, origin = _variance_or_bound(pairs, variance, kurtosis)
    tested, rate = num_draws, false_alarm_rate
    if known is None:
        tested, rate = -(-num_draws // 2), false_alarm_rate / 2
        pilot = (source.products(pairs.x, pairs.y, tested) - expected) ** 2
        spread = variance_bound(pilot, float(kurtosis or 0), false_alarm_rate=rate)
    else:
        spread = _checked_variance(pairs, known, expected)
    detectable = _detectable(expected, spread, tested, rate)
    _refuse(pairs, detectable, spread > NO_VARIANCE * expected**2)
    index = pairs.keep(detectable < pairs.blind)
    expected, spread = expected[index], spread[index]
    detectable = _detectable(expected, spread, tested, rate)
    products = source.products(pairs.x, pairs.y, tested)
    rounding = pairs.rounding * (np.abs(expected) + 1e-3 * np.max(np.abs(products), axis=0))
    test = score_test(products - expected, spread, false_alarm_rate=rate, rounding=rounding)
    if not test.passed:
        at = _worst(test.score)
        _fail_mean(check, word, pairs, at, products, expected, spread, origin, false_alarm_rate)
    smallest = float(np.max(detectable))
    note = f" ({origin})" if origin != STATED else ""
    detail = f"{num_draws} draws, {index.size} pairs; sees a bias of {smallest:.1%}{note}"
    in_sd = _in_standard_deviations(detectable, products, expected, spread)
    return Evidence(check, detail, false_alarm_rate, smallest, in_sd)


def _fail_mean(
    check: str,
    word: str,
    pairs: _Pairs,
    at: tuple[int, ...],
    products: Floats,
    expected: Floats,
    spread: Floats,
    origin: str,
    rate: float,
) -> None:
    draws = np.moveaxis(products, 0, -1)[at]
    average, want, variance = (
        float(np.broadcast_to(array, products.shape[1:])[at])
        for array in (np.mean(products, axis=0), expected, spread)
    )
    error = float(np.sqrt(variance / draws.size))
    if variance > NO_VARIANCE * want**2:
        distance = (
            f"{abs(average - want) / error:.1f} standard errors away. One standard error is "
            f"{error:.3g}, from a variance of {variance:.3g} ({origin}); these draws have "
            f"{np.var(draws):.3g}"
        )
    else:
        distance = f"where no draw may differ from it (variance 0, {origin})"
    message = (
        f"mean of phi(x) . psi(y) over {draws.size} draws is {average:.6g}, the {word} is "
        f"{want:.6g} ({_percent(average, want)}): {distance}. A map with this {word} and variance "
        f"fails in at most {rate:.1g} of all runs. {pairs.name(at)}"
    )
    fail(check, message)


def _percent(got: float, want: float) -> str:
    return f"{100 * (got / want - 1):+.3g} %" if want else "no ratio"


def _in_standard_deviations(
    detectable: Floats, products: Floats, expected: Floats, spread: Floats
) -> float:
    """Smallest bias that is found, in the measured standard deviations of one draw."""
    if np.all(spread <= NO_VARIANCE * expected**2):
        return 0.0
    deviation = np.std(products, axis=0)
    moving = deviation**2 > NO_VARIANCE * expected**2
    shift = detectable * np.abs(expected)
    return float(np.min(shift[moving] / deviation[moving], initial=np.inf))


def _worst(score: Floats) -> tuple[int, ...]:
    flat = int(np.argmax(np.where(np.isnan(score), np.inf, score)))
    return tuple(int(i) for i in np.unravel_index(flat, score.shape))


def _claim_or_method(feature_map: Any, name: str, claim: Any, argument: str) -> Any:
    if claim is not None:
        return claim
    method = getattr(feature_map, name, None)
    if method is None:
        message = (
            f"{argument} must be given: {type(feature_map).__name__} has no method {name}(x, y); "
            f"want a callable (x, y), or a number for each pair"
        )
        raise UntestableError(message)
    return method


def _variance_or_bound(pairs: _Pairs, claim: Any, kurtosis: float | None) -> tuple[Any | None, str]:
    """Return the variance and where it is from; None where it is to be measured.

    Of maps of linattn that do not know theirs, and without a kurtosis, a bound that no coupling of
    rows exceeds: the mean of m rows has at most the variance of one row, m times that of m
    independent rows.
    """
    feature_map = pairs.source.first
    measured = f"variance measured, for a kurtosis of at most {kurtosis}"
    if claim is None and kurtosis is not None and not hasattr(feature_map, "variance"):
        return None, measured
    claim = _claim_or_method(feature_map, "variance", claim, "variance= or kurtosis=")
    try:
        pairs.claim(claim)
    except NotImplementedError:
        if kurtosis is not None:
            return None, measured
        independent = _independent_rows(feature_map)
        if independent is not None:
            twin, rows = independent
            return (lambda x, y: rows * twin.variance(x, y)), "variance: at most that of one row"
    return claim, STATED


def _independent_rows(feature_map: Any) -> tuple[Any, int] | None:
    """Return the same map with independent rows, and their number; None for maps of others."""
    if isinstance(feature_map, Reparametrized):
        inside = _independent_rows(feature_map.feature_map)
        if inside is None:
            return None
        changes = (feature_map.query_shift, feature_map.key_shift, feature_map.transform)
        return Reparametrized(inside[0], *changes), inside[1]
    sampler = getattr(feature_map, "sampler", None)
    known = SAMPLERS.get(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(feature_map, ProjectedFeatureMap) or not isinstance(known, Sampler):
        return None
    twin: Any = copy.copy(feature_map)
    twin._set(sampler="gaussian")
    return twin, feature_map.projection.shape[-2]


def _evaluate(pairs: _Pairs, name: str, claim: Any) -> Floats:
    try:
        return pairs.claim(claim)
    except NotImplementedError as error:
        message = f"{name}= must be given: {error}"
        raise UntestableError(message) from error


def _checked_variance(pairs: _Pairs, claim: Any, expected: Floats) -> Floats:
    spread = _evaluate(pairs, "variance", claim)
    if not np.all(spread >= -pairs.rounding * np.maximum(expected**2, np.abs(spread))):
        message = f"variance must not be negative or NaN, got {np.min(spread):.3g}"
        raise ValueError(message)
    return np.maximum(spread, 0)


def _detectable(
    expected: Floats, spread: Floats, num_draws: int, false_alarm_rate: float
) -> Floats:
    shift = detectable_shift(
        spread,
        num_draws,
        false_alarm_rate=false_alarm_rate,
        num_tests=max(1, np.broadcast(expected, spread).size),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(shift > 0, shift / np.abs(expected), 0.0)


def _refuse(pairs: _Pairs, detectable: Floats, moving: NDArray[np.bool_]) -> None:
    """Say where there is no valid test, instead of passing whatever comes.

    A pair whose draws all agree shows nothing of the others, and does not decide whether the
    default pairs show anything.
    """
    feature_map = pairs.source.first
    exponential = getattr(feature_map, "softmax_kernel", False) and feature_map.positive
    v = pairs.sq_norms()
    if pairs.given and exponential and np.max(v) > LARGEST_V:
        message = (
            f"x and y must have v = scale |x + y|^2 of at most {LARGEST_V:g}, got {np.max(v):.3g}: "
            f"beyond it a few huge draws make up the mean of positive features, and no test of "
            f"means is valid; use shorter vectors"
        )
        raise UntestableError(message)
    num = detectable.shape[0]
    worst = np.max(detectable.reshape(num, -1), axis=-1)
    moves = np.any(moving.reshape(num, -1), axis=-1)
    decisive = np.min(worst[moves]) if np.any(moves) and not pairs.given else np.max(worst)
    if decisive >= pairs.blind:
        could = f"a relative bias of {decisive:.3g}" if decisive < np.inf else "any bias"
        message = (
            f"num_draws is too small, or x and y too long: {could} could pass; want more draws, "
            f"more features or shorter vectors"
        )
        raise UntestableError(message)


def _assert_equal_features(check: str, word: str, pairs: _Pairs, mean: Any) -> Evidence:
    expected = _evaluate(pairs, word, mean)
    got = pairs.source.products(pairs.x, pairs.y, 1)[0]
    allowed = pairs.rounding * np.maximum(np.abs(expected), np.abs(got)) + 1e-300
    difference = np.abs(got - expected)
    if not np.all(difference <= allowed):
        at = _worst(np.asarray(difference / allowed))
        want = np.broadcast_to(expected, got.shape)[at]
        message = (
            f"phi(x) . psi(y) = {got[at]:.9g}, {word} {want:.9g} at {pairs.name(at)}; the map is "
            f"deterministic here: a random map needs redraw(rng) or a factory"
        )
        fail(check, message)
    return Evidence(check, f"deterministic: {got.size} products to rounding", 0.0, pairs.rounding)


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
        The variance is not what is claimed.
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
    """
    check = "assert_variance"
    if relation not in ("equal", "at_most"):
        message = f"relation must be 'equal' or 'at_most', got {relation!r}"
        raise ValueError(message)
    _checks.check_positive_int("num_draws", num_draws)
    source = MapSource(map_or_factory, rng)
    if not source.is_random:
        message = "map_or_factory must be random: a map with redraw(rng), or factory(rng)"
        raise UntestableError(message)
    pairs = _Pairs(source, x, y)
    variance = _claim_or_method(source.first, "variance", variance, "variance=")
    word = "mean" if mean is not None or hasattr(source.first, "mean") else "kernel"
    mean = _claim_or_method(source.first, word, mean, "mean=")
    expected = _evaluate(pairs, "mean", mean)
    spread = _checked_variance(pairs, variance, expected)
    moving = spread > NO_VARIANCE * expected**2
    _refuse(pairs, np.zeros_like(spread), moving)
    index = pairs.keep(moving & (pairs.given | (spread < 50 * expected**2)))
    if not index.size:
        message = "x and y must have pairs at which the claimed variance is not 0"
        raise UntestableError(message)
    spread, expected = spread[index], expected[index]
    products = source.products(pairs.x, pairs.y, num_draws)
    squares = (products - expected) ** 2
    tails = pairs.claim(kurtosis) if kurtosis is not None else _known_kurtosis(pairs)
    rate, origin, num = false_alarm_rate, "exact", num_draws
    if tails is None and relation == "at_most":
        bounded = at_most_test(squares, spread, CUT_OFF * spread, false_alarm_rate=rate)
        if not bounded.passed:
            at = _worst(-bounded.log_p)
            _fail_variance(check, pairs, at, squares, spread, "at most", rate)
        seen = float(np.sqrt(2 * CUT_OFF * np.log(squares[0].size / rate) / num))
        detail = f"{num} draws, {index.size} pairs; sees an excess of {2 * seen:.0%}"
        return Evidence(check, detail, rate, 2 * seen)
    if tails is None:
        num = num_draws - num_draws // 4
        if num == num_draws:
            message = f"num_draws is too small to know the kurtosis, got {num_draws}"
            raise UntestableError(message)
        pilot, squares = squares[num:], squares[:num]
        tails = 2 * np.mean(pilot**2, axis=0) / np.mean(pilot, axis=0) ** 2
        origin = "approximate"
    square_variance = (tails - 1) * spread**2
    detectable = detectable_shift(
        tails - 1, num, false_alarm_rate=rate, num_tests=max(1, squares[0].size)
    )
    if np.min(detectable) >= 1:
        message = (
            f"num_draws is too small: a variance {1 + np.min(detectable):.3g} times the claim "
            f"could pass at every pair"
        )
        raise UntestableError(message)
    test = score_test(
        squares - spread,
        square_variance,
        false_alarm_rate=rate,
        side="both" if relation == "equal" else "above",
    )
    if not test.passed:
        at = _worst(test.score)
        _fail_variance(check, pairs, at, squares, spread, relation.replace("_", " "), rate)
    smallest = float(np.min(detectable))
    detail = (
        f"{num} draws, {index.size} pairs; sees an error of {smallest:.0%}"
        f"{'' if origin == 'exact' else ' (approximate rate)'}"
    )
    return Evidence(check, detail, rate, smallest)


def _fail_variance(
    check: str,
    pairs: _Pairs,
    at: tuple[int, ...],
    squares: Floats,
    spread: Floats,
    relation: str,
    rate: float,
) -> None:
    got = np.mean(squares, axis=0)[at]
    want = np.broadcast_to(spread, squares[0].shape)[at]
    error = np.std(squares, axis=0)[at] / np.sqrt(squares.shape[0])
    message = (
        f"variance of phi(x) . psi(y) over {squares.shape[0]} draws is {got:.6g}, want {relation} "
        f"{want:.6g} ({_percent(got, want)}); a standard error, as measured, is {error:.3g}. A map "
        f"with this mean and variance fails in at most {rate:.1g} of all runs. {pairs.name(at)}"
    )
    fail(check, message)


def _known_kurtosis(pairs: _Pairs) -> Floats | None:
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
