"""Pairs of vectors at which an estimate is tested, and the claims about it there.

Letters: ``P`` pairs of vectors, ``d`` dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.feature_maps import Reparametrized
from linattn.feature_maps._projected import ProjectedFeatureMap
from linattn.sampling import SAMPLERS, Sampler
from linattn.testing._draws import Floats, MapSource, lead_axes, standard_pairs
from linattn.testing._evidence import UntestableError, on_host
from linattn.testing._means import STATED

MAX_SQUARE_NORM = 2.0
"""``scale |x + y|^2`` above which sample means of positive features stop telling anything."""


FALLS = (1.0, 0.25, 1.0, 2.0, 1.0)
"""How far, in logs, a kernel of x - y has fallen at the pairs that are added for it."""


class Pairs:
    """Pairs of vectors in the shape that maps with heads take, and the claims there."""

    def __init__(self, source: MapSource, x: Any, y: Any) -> None:
        self.source = source
        feature_map = source.first
        self.given = x is not None or y is not None
        self.blind = 1.0 if self.given else 0.5
        self.origin = "the pairs given"
        if self.given:
            xp, (x, y) = _checks.check_arrays(x=x, y=y)
            if tuple(x.shape) != tuple(y.shape) or x.ndim != 2:
                raise ValueError(
                    f"x and y must be pairs of shape (pairs, dim), got shapes {tuple(x.shape)} and "
                    f"{tuple(y.shape)}"
                )
        else:
            scale = float(getattr(feature_map, "scale", 1.0))
            dim = getattr(feature_map, "dim", None) or 4
            seed = int(source.rng.integers(2**32))
            x, y = standard_pairs(dim, scale, seed)
            xp = array_api_compat.array_namespace(x)
            self.origin = f"linattn.testing.standard_pairs({dim}, {scale!r}, {seed})"
        self._heads = lead_axes(feature_map, x.shape[-1])
        self._place(xp, x, y)
        self.rounding = 1e-9 if x.dtype == xp.float64 else 1e-4

    def _place(self, xp: Any, x: Any, y: Any) -> None:
        """Take pairs ``(P, d)``, and give them the axes of the heads."""
        num, dim = x.shape
        self.index = np.arange(num)
        flat, full = (num, *(1 for _ in self._heads), 1, dim), (num, *self._heads, 1, dim)
        self.x, self.y = (xp.broadcast_to(xp.reshape(a, flat), full) for a in (x, y))

    def add_differences(self, kernel: Any) -> None:
        """Add pairs along which a kernel of x - y falls, to the default ones.

        The default pairs hardly test such a kernel: they bound x + y.
        """
        if self.given or not callable(kernel):
            return
        num, dim = len(self.index), self.x.shape[-1]
        x, y = (on_host(a).reshape(num, -1, dim)[:, 0] for a in (self.x, self.y))

        def at(middle: Floats, apart: Floats) -> Floats:
            self._place(np, middle + apart / 2, middle - apart / 2)
            return evaluate(self, "kernel", kernel).reshape(len(apart), -1)[:, 0]

        try:
            middle, apart = _where_it_falls(at, dim)
        finally:
            self._place(np, x, y)
        if len(apart):
            more = middle + apart / 2, middle - apart / 2
            self._place(np, np.concatenate([x, more[0]]), np.concatenate([y, more[1]]))
            self.origin += ", or along which the kernel falls"

    def claim(self, claim: Any, name: str) -> Floats:
        """Evaluate a claim to ``(P, ...)``: a number for each pair, of any of its shapes."""
        made = on_host(claim(self.x, self.y)) if callable(claim) else _numbers(name, claim)
        lead = tuple(self.x.shape[:-2])
        num, *heads = lead
        if made.shape in ((), (num,)):
            return np.broadcast_to(made, (num,)).reshape(num, *(1 for _ in heads))
        if made.shape in (lead, (*lead, 1), (*lead, 1, 1)):
            return made.reshape(lead)
        raise ValueError(
            f"{name} must be a number for each of {num} pairs, ({num},) or {(*lead, 1, 1)}, got "
            f"shape {made.shape}"
        )

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

    def describe(self, left_out: NDArray[np.bool_], detectable: Floats) -> str:
        """Name the pairs that are left out, each with the bias that could pass there."""
        flat = detectable.reshape(detectable.shape[0], -1)
        which = np.flatnonzero(np.any(left_out.reshape(flat.shape), axis=-1))
        biases = np.max(flat, axis=-1)
        named = [f"{self.index[i]} (a bias of {biases[i]:.0%} could pass)" for i in which]
        return f"; pairs left out: {', '.join(named)}" if named else ""

    def sq_norms(self) -> Floats:
        """``scale |x + y|^2`` of each pair."""
        scale = float(getattr(self.source.first, "scale", 1.0))
        return np.asarray(scale * np.sum((on_host(self.x) + on_host(self.y)) ** 2, axis=-1))


def _where_it_falls(kernel: Callable[[Floats, Floats], Floats], dim: int) -> tuple[Floats, Floats]:
    """Return a middle and differences at which a kernel of x - y has fallen by :data:`FALLS`.

    ``kernel(middle, differences)``; none are returned where it depends on the middle.
    """
    general = np.random.default_rng(0).standard_normal((3, dim))
    general /= np.linalg.norm(general, axis=-1, keepdims=True)
    along = np.stack([np.eye(dim)[0], *3 * [np.full(dim, dim**-0.5)], general[0]])
    none = np.zeros(dim)
    values = [kernel(0.3 * middle, along) for middle in (none, *general[1:])]
    if not np.allclose(values, values[:1], rtol=1e-5, atol=0):
        return none, along[:0]
    wanted = kernel(none, 0 * along) * np.exp(-np.array(FALLS))
    low, high = np.full(len(along), -9.0), np.full(len(along), 9.0)
    for _ in range(40):
        log_size = (low + high) / 2
        is_near = kernel(none, np.exp(log_size)[:, None] * along) > wanted
        low, high = np.where(is_near, log_size, low), np.where(is_near, high, log_size)
    falls = high < 8
    return 0.1 * general[1], np.exp(low[falls])[:, None] * along[falls]


def _numbers(name: str, claim: Any) -> Floats:
    try:
        return on_host(claim) if hasattr(claim, "shape") else np.array(claim, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a callable (x, y), or a number for each pair, got "
            f"{type(claim).__name__}"
        ) from error


def claim_or_method(feature_map: Any, name: str, claim: Any, argument: str) -> Any:
    """Return a claim, or the method of the map that makes it."""
    if claim is not None:
        return claim
    method = getattr(feature_map, name, None)
    if method is None:
        raise UntestableError(
            f"{argument} must be given: {type(feature_map).__name__} has no method {name}(x, y); "
            f"want a callable (x, y), or a number for each pair"
        )
    return method


def variance_or_bound(pairs: Pairs, claim: Any, kurtosis: float | None) -> tuple[Any | None, str]:
    """Return the variance and where it is from; None where it is to be measured.

    For maps of linattn without a variance, and without a kurtosis, return a bound for any coupling
    of rows. The mean of m rows has at most the variance of one row, which is m times the variance
    for independent rows.
    """
    feature_map = pairs.source.first
    measured = f"variance measured, for a kurtosis of at most {kurtosis}"
    if claim is None and kurtosis is not None and not hasattr(feature_map, "variance"):
        return None, measured
    claim = claim_or_method(feature_map, "variance", claim, "variance= or kurtosis=")
    try:
        pairs.claim(claim, "variance")
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


def evaluate(pairs: Pairs, name: str, claim: Any) -> Floats:
    """Evaluate a claim at the pairs, ``(P, ...)``, or say that it must be given."""
    try:
        claimed = pairs.claim(claim, name)
    except NotImplementedError as error:
        raise UntestableError(f"{name}= must be given: {error}") from error
    if np.any(np.isnan(claimed)):
        raise ValueError(
            f"{name} must not be NaN, got NaN for {int(np.sum(np.isnan(claimed)))} pairs"
        )
    return claimed


def checked_variance(pairs: Pairs, claim: Any, expected: Floats) -> Floats:
    """Evaluate a variance at the pairs; below 0 only rounding may bring it."""
    variance = evaluate(pairs, "variance", claim)
    if not np.all(variance >= -pairs.rounding * np.maximum(expected**2, np.abs(variance))):
        raise ValueError(f"variance must not be negative or NaN, got {np.min(variance):.3g}")
    return np.maximum(variance, 0)


def check_power(pairs: Pairs, detectable: Floats, moving: NDArray[np.bool_]) -> None:
    """Say where there is no valid test, instead of passing whatever comes.

    A pair whose draws all agree shows nothing of the others, and does not decide whether the
    default pairs show anything.
    """
    feature_map = pairs.source.first
    exponential = all(getattr(feature_map, name, False) for name in ("softmax_kernel", "positive"))
    v = pairs.sq_norms()
    if pairs.given and exponential and np.max(v) > MAX_SQUARE_NORM:
        raise UntestableError(
            f"x and y must have v = scale |x + y|^2 of at most {MAX_SQUARE_NORM:g}, got "
            f"{np.max(v):.3g}: beyond it a few huge draws make up the mean of positive features, "
            f"and no test of means is valid; use shorter vectors"
        )
    num = detectable.shape[0]
    worst = np.max(detectable.reshape(num, -1), axis=-1)
    moves = np.any(moving.reshape(num, -1), axis=-1)
    decisive = np.min(worst[moves]) if np.any(moves) and not pairs.given else np.max(worst)
    if decisive >= pairs.blind:
        could = f"a relative bias of {decisive:.3g}" if decisive < np.inf else "any bias"
        raise UntestableError(
            f"num_draws is too small, or x and y too long: {could} could pass; want more draws, "
            f"more features or shorter vectors"
        )
