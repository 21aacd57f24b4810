"""How tilts and axes of exponential maps are found: closed forms from moments of a sample.

``x`` and ``y`` are queries and keys times ``sqrt(scale)``, in float64 on the host; leading axes are
heads.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks

Floats = NDArray[np.float64]

SHRINKAGE = 1e-3
"""Of the mean eigenvalue of a covariance, added to it."""


def optimal_tilt(t: ArrayLike) -> Floats:
    """Return ``(1 - 2t - sqrt((2t + 1)^2 + 8t)) / 16``, t the mean square of an axis of x + y."""
    t = np.asarray(t, dtype=np.float64)
    # The same without cancellation: A = -t / (1 - 2t + sqrt((2t + 1)^2 + 8t)).
    return np.asarray(-t / (1 - 2 * t + np.sqrt((2 * t + 1) ** 2 + 8 * t)))


def check_tilt(A: Any) -> Floats:
    """Check tilts, and copy them to float64."""
    tilt = np.array(A, dtype=np.float64)
    if not np.isfinite(tilt).all() or not (tilt < 0.125).all():
        raise ValueError(
            f"A must be finite and below 1/8, where the variance becomes infinite, got {A}"
        )
    return tilt


def scaled_sample(query: Any, key: Any, scale: Any) -> tuple[Floats, Floats, float]:
    """Float64 copies of a sample, times ``sqrt(scale)``."""
    _, (query, key) = _checks.check_arrays(query=query, key=key)
    if query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape:
        raise ValueError(
            f"query and key must have one dim and at least one token, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    x, y = (sqrt(scale) * _arrays.to_numpy(a).astype(np.float64) for a in (query, key))
    return x, y, scale


def mean_square(x: Floats, y: Floats) -> Floats:
    """Mean of ``|x_i + y_j|^2`` over all pairs."""
    squares = np.mean(np.sum(x * x, axis=-1), axis=-1) + np.mean(np.sum(y * y, axis=-1), axis=-1)
    return np.asarray(squares + 2 * np.sum(x.mean(axis=-2) * y.mean(axis=-2), axis=-1))


def second_moment(x: Floats) -> Floats:
    """Mean of ``x x^T`` over tokens, ``(..., d, d)``."""
    return np.asarray(np.swapaxes(x, -1, -2) @ x / x.shape[-2])


def sum_second_moment(x: Floats, y: Floats) -> Floats:
    """Mean of ``(x_i + y_j) (x_i + y_j)^T`` over all pairs."""
    means = x.mean(axis=-2)[..., :, None] * y.mean(axis=-2)[..., None, :]
    moments = second_moment(x) + second_moment(y) + means + np.swapaxes(means, -1, -2)
    return np.asarray(moments)


def key_weights(keys: list[Floats], c: Floats, temperature: float) -> Floats:
    """Weights ``(..., n, 1)`` of the keys of all sequences, each counting by its keys.

    In a sequence they go as ``exp(temperature c.k)``.
    """
    num_keys = sum(y.shape[-2] for y in keys)
    weights = []
    for y in keys:
        logits = temperature * (y @ c[..., :, None])
        unscaled = np.exp(logits - np.max(logits, axis=-2, keepdims=True))
        share = y.shape[-2] / num_keys
        weights.append(share * unscaled / np.sum(unscaled, axis=-2, keepdims=True))
    return np.concatenate(weights, axis=-2)


def shrink(covariance: Floats) -> Floats:
    """Add 1e-3 of the mean eigenvalue: a direction that no token took is not for free."""
    d = covariance.shape[-1]
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / d
    return np.asarray(covariance + (SHRINKAGE * mean + 1e-300) * np.eye(d))


def _power(matrix: Floats, exponent: float) -> Floats:
    """Power of symmetric matrices, eigenvalues kept a little above 0."""
    eigenvalues, axes = np.linalg.eigh(matrix)
    floor = 1e-12 * np.max(eigenvalues, axis=-1, keepdims=True) + 1e-300
    powers = np.maximum(eigenvalues, floor) ** exponent
    return np.asarray((axes * powers[..., None, :]) @ np.swapaxes(axes, -1, -2))


def balancing_root(first: Floats, second: Floats) -> Floats:
    """Square root of the positive P with ``P first P = second``, a matrix geometric mean."""
    root, inverse = _power(first, 0.5), _power(first, -0.5)
    return _power(inverse @ _power(root @ second @ root, 0.5) @ inverse, 0.5)


def inverse_transpose(T: Floats) -> Floats:
    """Return ``T^-T``; a T without inverse is an error."""
    try:
        inverse = np.linalg.inv(T)
    except np.linalg.LinAlgError:
        inverse = np.full_like(T, np.nan)
    if not np.isfinite(inverse).all():
        raise ValueError("transform must be invertible, and is not")
    return np.swapaxes(inverse, -1, -2)
