"""The Gaussian kernel as softmax attention, whose logits keep the digits of differences."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn.functional import softmax_attention
from linattn.typing import Array

LEAST_REST = 1e-8
"""By what an effective number of rows must exceed one row less: half of the digits are right."""

LANES = 8
"""How many partial sums a BLAS may use for one inner product."""


def check_points(**named: Any) -> tuple[ModuleType, list[Array], Any]:
    """Check arrays of points; return them in the computing dtype, and the dtype of the result.

    The computing dtype is float64, or float32 if the device has no float64 (JAX by default).
    Integers and booleans count as numbers; the result then has the floating dtype of the others, or
    the default one of the library.
    """
    given = list(named.values())
    like = [a for a in given if array_api_compat.is_array_api_obj(a) and not _arrays.is_exact(a)]
    xp, arrays = _checks.check_arrays(**{n: _floating(a, like) for n, a in named.items()})
    wide = xp.float64 if _arrays.has_float64(arrays[0]) else xp.float32
    shapes = {name: tuple(array.shape) for name, array in zip(named, arrays, strict=True)}
    (first, (*_, d)), (name, shape), *_ = (*shapes.items(), *shapes.items())
    if shape[-1] != d:
        raise ValueError(f"{name} must have the {d} coordinates of {first}, got shape {shape}")
    _checks.check_leading_axes(**{name: shape[:-2] for name, shape in shapes.items()})
    # Integers themselves, which a narrow floating dtype would round.
    sources = [a if _arrays.is_exact(a) else b for a, b in zip(given, arrays, strict=True)]
    return xp, [xp.astype(array, wide, copy=False) for array in sources], arrays[0].dtype


def _floating(array: Any, like: list[Array]) -> Any:
    """Return integers in the dtype of the first array of their library, or in its default."""
    if not _arrays.is_exact(array):
        return array
    xp = _arrays.namespace(array)
    info, device = xp.__array_namespace_info__(), array_api_compat.device(array)
    default = info.default_dtypes(device=device)["real floating"]
    return xp.astype(array, next((x.dtype for x in like if _arrays.namespace(x) is xp), default))


def joined(parts: list[Array]) -> Array:
    """Join arrays along their last axis, in one chunk there."""
    together: Any = _arrays.namespace(parts[0]).concat(parts, axis=-1)
    return together.rechunk({-1: -1}) if hasattr(together, "rechunk") else together


def persisted(array: Any) -> Array:
    """Compute a Dask array, so that the next step of a loop does not compute it again."""
    return array.persist() if hasattr(array, "persist") else array


def matching(name: str, array: Any, of: str, points: Array) -> Array:
    """Return numbers, perhaps Python's, in the library, dtype and device of the points."""
    xp = _arrays.namespace(points)
    if isinstance(array, np.ndarray) and array.ndim:
        array = _checks.check_array(name, array)
    if array_api_compat.is_array_api_obj(array) and not array_api_compat.is_numpy_array(array):
        _checks.check_together(of, points, name, array)
        return xp.astype(array, points.dtype, copy=False)
    try:
        host = np.asarray(array).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{name} must be real numbers or an array of them, got {reprlib.repr(array)}"
        ) from None
    return _arrays.device_array(host, xp, points.dtype, array_api_compat.device(points))


def log_weights(
    name: str, weights: Any, of: str, points: Array, key_mask: Array | None = None, *, rows: int = 0
) -> Array:
    """Return log weights of points, ``(..., n)``: -inf where the weight is 0 or the mask False.

    With ``rows`` they have sum 1, and fewer rows that count are an error.
    """
    xp = _arrays.namespace(points)
    if weights is None:
        weights = xp.ones_like(points[..., 0])
    else:
        weights = matching(name, weights, of, points)
        if tuple(weights.shape[-1:]) != (points.shape[-2],):
            came = f"{tuple(weights.shape)} for {tuple(points.shape)}"
            raise ValueError(f"{name} must have one number for each row of {of}, got shape {came}")
        axes = {of: tuple(points.shape[:-2]), name: tuple(weights.shape[:-1])}
        weights = xp.broadcast_to(weights, (*_checks.check_leading_axes(**axes), points.shape[-2]))
        if _arrays.inspected((weights >= 0) & (weights < xp.inf)) is False:
            raise ValueError(f"{name} must be finite and not negative, got others; mend them first")
    if key_mask is not None:
        mask = _checks.check_key_mask(key_mask, points, xp, query_len=None, of=of)
        weights = xp.where(mask[..., 0], weights, xp.zeros_like(weights))
    if rows:
        weights = weights / xp.sum(weights, axis=-1, keepdims=True)
        # NaN where nothing counts, and in the result of arrays that cannot be inspected.
        count = xp.sum(weights, axis=-1) / xp.sum(weights * weights, axis=-1)
        if points.shape[-2] < rows or _arrays.inspected(count > rows - 1 + LEAST_REST) is False:
            wanted = f"{of} must have at least {rows} rows that count"
            raise ValueError(
                f"{wanted} ({name} positive, of finite sum), got {tuple(points.shape)}"
            )
    nothing = weights <= 0
    logs = xp.log(xp.where(nothing, xp.ones_like(weights), weights))
    return xp.where(nothing, xp.full_like(logs, -float("inf")), logs)


def with_mean_zero(points: Array, log_weight: Array) -> tuple[Array, Array]:
    """Return points less their mean, 0 where the weight is 0, and the mean, ``(..., 1, d)``."""
    xp = _arrays.namespace(points)
    there = (log_weight > -float("inf"))[..., None]
    points = xp.where(there, points, xp.zeros_like(points))
    count = xp.sum(xp.astype(there, points.dtype), axis=-2, keepdims=True)
    # A sum would overflow before the points do.
    centre = xp.sum(points / xp.maximum(count, xp.ones_like(count)), axis=-2, keepdims=True)
    return xp.where(there, points - centre, xp.zeros_like(points)), centre


def positive_bandwidth(bandwidth: Any, of: str, points: Array) -> Array:
    """Check a bandwidth: one number, or one for each coordinate."""
    if isinstance(bandwidth, float | int | np.floating | np.integer):
        _checks.check_finite_number("bandwidth", bandwidth, positive=True)
    h = matching("bandwidth", bandwidth, of, points)
    if h.ndim > 1 or (h.ndim == 1 and h.shape[0] not in (1, points.shape[-1])):
        wanted = f"a number or one for each of {points.shape[-1]} coordinates"
        raise ValueError(f"bandwidth must be {wanted}, got shape {tuple(h.shape)}")
    if _arrays.inspected((h > 0) & (h < float("inf"))) is False:
        raise ValueError("bandwidth must be positive and finite, got other numbers")
    return h


@dataclass(frozen=True)
class Gaussian:
    """Keys y of the kernel ``exp(-|x - y|^2 / 2)`` over the bandwidth, prepared for many queries.

    Attributes
    ----------
    centre : array, (..., 1, d)
        Subtracted from all points.
    bandwidth : array, () or (d,)
        Divides what remains.
    coordinates : array, (..., n, d)
        Keys less the centre, over the bandwidth.
    log_weight : array, (..., n)
        Added to the logarithm of the kernel.
    """

    centre: Array
    bandwidth: Array
    coordinates: Array
    log_weight: Array

    @classmethod
    def of(cls, name: str, key: Array, bandwidth: Any, log_weight: Array) -> Gaussian:
        """Prepare keys; errors call them by this name."""
        h = positive_bandwidth(bandwidth, name, key)
        centred, centre = with_mean_zero(key, log_weight)
        return cls(centre, h, _clipped(centred / h), log_weight)

    def of_query(self, query: Array) -> Array:
        """Return queries less the centre, over the bandwidth, as `coordinates` of the keys."""
        return _clipped((query - self.centre) / self.bandwidth)

    def read(
        self, coordinates: Array, value: Array | None = None, bias: Array | None = None
    ) -> tuple[Array, Array]:
        """Return weighted means of the values, (..., N, e), and log sums of weights, (..., N).

        ``bias``, (..., n), is added to the log weights.
        """
        if value is None:
            value = self.coordinates[..., :1] * 0
        means, logs = softmax_attention(
            _factors(coordinates, is_key=False),
            _factors(self.coordinates, is_key=True),
            value,
            scale=1.0,
            key_bias=self.log_weight if bias is None else self.log_weight + bias,
            return_log_normalizer=True,
        )
        # NaN, not 0, where nothing counts.
        return means + 0 * logs[..., None], logs


def _clipped(u: Array) -> Array:
    """Clip coordinates so that squares stay finite: points so far out have density 0."""
    xp = _arrays.namespace(u)
    most = math.sqrt(xp.finfo(u.dtype).max) / (8 * u.shape[-1])
    return xp.clip(u, -most, most)


def _factors(u: Array, *, is_key: bool) -> Array:
    r"""Return rows whose inner products are ``-|u - v|^2 / 2``, (..., n, 3 d + 4) or some more.

    ``u.v - |u|^2 / 2 - |v|^2 / 2`` loses digits if u and v are long and near each other. So each
    coordinate is split into a few leading bits a and the rest r, ``u = a + r``. Products of leading
    bits are exact and come first: ``a.b - |a|^2 / 2 - |b|^2 / 2`` is never rounded, and the other
    terms are small. A BLAS may sum every eighth product separately. Above eight coordinates,
    squares are summed in the same way, and each of the eight sums ends small. For the split see
    Rump, Ogita and Oishi, "Accurate Floating-Point Summation Part I" (2008), algorithm 3.2.
    """
    xp = _arrays.namespace(u)
    bits = 53 if u.dtype == xp.float64 else 24
    # Bits of a product, of a half, and of rows whose grids differ by a power of two.
    leading = (bits - 5) // 2
    # Not the largest: JAX's gradient of a maximum may divide 0 by 0 inside jit.
    sigma = xp.sum(xp.abs(u), axis=-1, keepdims=True) * (3.0 * 2.0 ** (bits - leading - 1))
    a = (u + sigma) - sigma
    r = u - a
    small = -xp.sum(a * r + r * r / 2, axis=-1, keepdims=True)
    lanes = LANES if u.shape[-1] > LANES else 1
    padded = joined([a, a[..., : -u.shape[-1] % lanes] * 0]) if lanes > 1 else a
    exact = -sum(padded[..., i : i + lanes] ** 2 for i in range(0, padded.shape[-1], lanes)) / 2
    units, unit = xp.ones_like(exact), xp.ones_like(small)
    if is_key:
        return joined([padded, exact, units, r, u, small, unit])
    return joined([padded, units, exact, a, r, unit, small])
