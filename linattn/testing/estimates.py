"""Assertions about the law of an estimate: unbiased, of the mean and the variance claimed.

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
    MapOrFactory,
    MapSource,
    lead_axes,
    need_pair_kernel,
    standard_pairs,
)
from linattn.testing._evidence import Evidence, UntestableError, fail, on_host
from linattn.testing.moments import block_kurtosis
from linattn.testing.statistics import at_most_test, detectable_shift, score_test
from linattn.typing import Array

__all__ = ["Claim", "assert_mean", "assert_unbiased", "assert_variance"]

Floats = NDArray[np.float64]
Claim: TypeAlias = "Callable[[Array, Array], Array] | ArrayLike"
"""What is claimed: ``claim(x, y)`` with shapes as ``kernel``, or a number for each pair."""

LARGEST_V = 2.0
"""Where sample means of positive features stop telling anything."""

CUT_OFF = 20.0
"""Where squares are cut off, in variances, when their own variance is not known."""


class _Pairs:
    """Pairs of vectors in the shape that maps with heads take, and what is claimed there."""

    def __init__(self, source: MapSource, x: Any, y: Any) -> None:
        self.source = source
        feature_map = source.first
        self.given = x is not None or y is not None
        self.blind = 1.0 if self.given else 0.5
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
            x, y = standard_pairs(dim, scale, source.rng)
            xp = array_api_compat.array_namespace(x)
        num, dim = x.shape
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

    def keep(self, wanted: NDArray[np.bool_]) -> None:
        """Keep the pairs (first axis) that are wanted for every head."""
        index = np.flatnonzero(np.all(wanted.reshape(wanted.shape[0], -1), axis=-1))
        xp = array_api_compat.array_namespace(self.x)
        rows = xp.asarray(index, device=array_api_compat.device(self.x))
        self.x, self.y = (xp.take(array, rows, axis=0) for array in (self.x, self.y))

    def name(self, index: int) -> str:
        """Show a pair."""
        x, y = (
            np.array2string(on_host(a)[index].reshape(-1, a.shape[-1])[0], precision=3, threshold=6)
            for a in (self.x, self.y)
        )
        return f"x = {x}, y = {y}"

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
    num_draws : int, optional
        n. Default 4000.
    false_alarm_rate : float, optional
        alpha. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0: the same draws each time. None for fresh ones.

    Returns
    -------
    Evidence
        ``detectable`` is the relative bias that is found with 99 %: at the pair where it is
        largest.

    Raises
    ------
    AssertionError
        The mean is not the kernel, or the variance is larger than claimed.
    UntestableError
        No honest test exists: pairs of positive features of the softmax kernel with
        ``v = scale |x + y|^2`` above 2, where a few huge draws make up the mean; so few draws that
        a bias of 100 % would pass; no variance known.

    Notes
    -----
    False-alarm rate: rigorous, for any law (:func:`linattn.testing.statistics.score_test`). The
    smallest relative bias is about ``1.7 sqrt(2 log(2 P / alpha) Var / n) / K``: for m independent
    positive features at v = 1/2, m = 32 and the defaults, 3.7 %.
    """
    return _assert_mean(
        "assert_unbiased", "kernel", map_or_factory, x, y, kernel, variance,
        num_draws, false_alarm_rate, rng,
    )  # fmt: skip


def assert_mean(
    map_or_factory: MapOrFactory,
    x: Array | None = None,
    y: Array | None = None,
    *,
    mean: Claim | None = None,
    variance: Claim | None = None,
    num_draws: int = 4000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that the mean over draws is the one claimed: for maps whose bias is known.

    Parameters
    ----------
    map_or_factory, x, y, variance, num_draws, false_alarm_rate, rng
        As :func:`assert_unbiased`.
    mean : callable or array_like (P,), optional
        Default ``map.mean``.

    Returns
    -------
    Evidence
        As :func:`assert_unbiased`.

    Raises
    ------
    AssertionError, UntestableError
        As :func:`assert_unbiased`.

    Notes
    -----
    False-alarm rate and smallest bias as :func:`assert_unbiased`.
    """
    return _assert_mean(
        "assert_mean", "mean", map_or_factory, x, y, mean, variance,
        num_draws, false_alarm_rate, rng,
    )  # fmt: skip


def _assert_mean(
    check: str,
    word: str,
    map_or_factory: Any,
    x: Any,
    y: Any,
    mean: Any,
    variance: Any,
    num_draws: int,
    false_alarm_rate: float,
    rng: Seed,
) -> Evidence:
    source = MapSource(map_or_factory, rng)
    need_pair_kernel(source.first)
    pairs = _Pairs(source, x, y)
    mean = _claim_or_method(source.first, word, mean, f"{word}=")
    if not source.is_random:
        return _assert_equal_features(check, word, pairs, mean)
    variance, note = _variance_or_bound(pairs, variance)
    detectable = _detectable(pairs, mean, variance, num_draws, false_alarm_rate)
    _refuse(pairs, detectable)
    pairs.keep(detectable < pairs.blind)
    expected, spread = pairs.claim(mean), np.maximum(pairs.claim(variance), 0)
    detectable = _detectable(pairs, mean, variance, num_draws, false_alarm_rate)
    products = source.products(pairs.x, pairs.y, num_draws)
    rounding = pairs.rounding * (np.abs(expected) + 1e-3 * np.max(np.abs(products), axis=0))
    test = score_test(
        products - expected, spread, false_alarm_rate=false_alarm_rate, rounding=rounding
    )
    if not test.passed:
        at = _worst(test.score)
        average = np.mean(products, axis=0)[at]
        want = np.broadcast_to(expected, test.score.shape)[at]
        seen = float(np.broadcast_to(detectable, test.score.shape)[at])
        message = (
            f"mean {average:.6g} over {num_draws} draws, {word} {want:.6g} (ratio "
            f"{average / want:.4f}) at {pairs.name(at[0])}; score {test.score[at]:.4g}, below "
            f"{test.threshold:.4g} in all but {false_alarm_rate:.1g} of all runs of a map with "
            f"this mean and variance; a relative bias of {seen:.2g} would be seen"
        )
        fail(check, message)
    smallest = float(np.max(detectable))
    detail = f"{num_draws} draws, {expected.shape[0]} pairs; sees a bias of {smallest:.1%}{note}"
    return Evidence(check, detail, false_alarm_rate, smallest)


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


def _variance_or_bound(pairs: _Pairs, claim: Any) -> tuple[Any, str]:
    """Return the variance, or where it is not known, a bound that no coupling of rows exceeds.

    The mean of m rows has at most the variance of one row, m times that of m independent rows.
    """
    feature_map = pairs.source.first
    claim = _claim_or_method(feature_map, "variance", claim, "variance=")
    try:
        pairs.claim(claim)
    except NotImplementedError:
        independent = _independent_rows(feature_map)
        if independent is not None:
            twin, rows = independent
            note = " (variance: at most that of one row)"
            return (lambda x, y: rows * twin.variance(x, y)), note
    return claim, ""


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


def _detectable(
    pairs: _Pairs, mean: Any, variance: Any, num_draws: int, false_alarm_rate: float
) -> Floats:
    expected = np.abs(_evaluate(pairs, "mean", mean))
    spread = _evaluate(pairs, "variance", variance)
    if not np.all(spread >= -pairs.rounding * np.maximum(expected**2, spread)):
        message = f"variance must not be negative or NaN, got {np.min(spread):.3g}"
        raise ValueError(message)
    spread = np.maximum(spread, 0)
    shift = detectable_shift(
        spread,
        num_draws,
        false_alarm_rate=false_alarm_rate,
        num_tests=max(1, np.broadcast(expected, spread).size),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(shift > 0, shift / expected, 0.0)


def _refuse(pairs: _Pairs, detectable: Floats) -> None:
    """Say where there is no honest test, instead of passing whatever comes."""
    feature_map = pairs.source.first
    exponential = getattr(feature_map, "softmax_kernel", False) and feature_map.positive
    v = pairs.sq_norms()
    if pairs.given and exponential and np.max(v) > LARGEST_V:
        message = (
            f"x and y must have v = scale |x + y|^2 of at most {LARGEST_V:g}, got {np.max(v):.3g}: "
            f"beyond it a few huge draws make up the mean of positive features, and no test of "
            f"means is honest; use shorter vectors"
        )
        raise UntestableError(message)
    worst = np.max(detectable.reshape(detectable.shape[0], -1), axis=-1)
    decisive = np.max(worst) if pairs.given else np.min(worst)
    if decisive >= pairs.blind:
        message = (
            f"num_draws is too small, or x and y too long: a relative bias of "
            f"{decisive:.3g} could pass; want more draws, more features or "
            f"shorter vectors"
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
            f"phi(x) . psi(y) = {got[at]:.9g}, {word} {want:.9g} at {pairs.name(at[0])}; the map "
            f"is deterministic here: a random map needs redraw(rng) or a factory"
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
    ValueError
        An unknown relation.

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
    source = MapSource(map_or_factory, rng)
    if not source.is_random:
        message = "map_or_factory must be random: a map with redraw(rng), or factory(rng)"
        raise UntestableError(message)
    pairs = _Pairs(source, x, y)
    variance = _claim_or_method(source.first, "variance", variance, "variance=")
    word = "mean" if mean is not None or hasattr(source.first, "mean") else "kernel"
    mean = _claim_or_method(source.first, word, mean, "mean=")
    spread, size = _evaluate(pairs, "variance", variance), _evaluate(pairs, "mean", mean) ** 2
    _refuse(pairs, np.zeros(1))
    ratio = spread / size
    pairs.keep((ratio > 1e-6) & (ratio < (np.inf if pairs.given else 50.0)))
    if not pairs.x.shape[0]:
        message = "x and y must have pairs at which the claimed variance is not 0"
        raise UntestableError(message)
    spread, expected = pairs.claim(variance), pairs.claim(mean)
    products = source.products(pairs.x, pairs.y, num_draws)
    squares = (products - expected) ** 2
    tails = pairs.claim(kurtosis) if kurtosis is not None else _known_kurtosis(pairs)
    rate, origin, num = false_alarm_rate, "exact", num_draws
    if tails is None and relation == "at_most":
        bounded = at_most_test(squares, spread, CUT_OFF * spread, false_alarm_rate=rate)
        if not bounded.passed:
            at = _worst(-bounded.log_p)
            _fail_variance(check, pairs, at, squares, spread, "at most", rate)
        seen = float(np.sqrt(2 * CUT_OFF * np.log(spread.size / rate) / num))
        detail = f"{num} draws, {pairs.x.shape[0]} pairs; sees an excess of {2 * seen:.0%}"
        return Evidence(check, detail, rate, 2 * seen)
    if tails is None:
        num = num_draws - num_draws // 4
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
        f"{num} draws, {pairs.x.shape[0]} pairs; sees an error of {smallest:.0%}"
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
    message = (
        f"variance {got:.6g} over {squares.shape[0]} draws, want {relation} {want:.6g} (ratio "
        f"{got / want:.4f}) at {pairs.name(at[0])}; false-alarm rate {rate:.1g}"
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
