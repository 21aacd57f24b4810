"""Positive random features of the softmax kernel, exp(scale x.y): FAVOR+ and everything after it.

One implementation. With ``x' = sqrt(s) T x`` (T a transform of the queries, and ``T^-T`` of the
keys, so that inner products stay) and one tilt A_l an axis,

    log phi_r(x) = sum_l [A_l w_rl^2 + sqrt(1 - 4 A_l) w_rl x'_l + log(1 - 4 A_l) / 4]
                   - |x'|^2 / 2 - log(m) / 2

is unbiased for every A < 1/4 and has finite variance for A < 1/8. Antithetic maps use every row
with both signs.
"""

from __future__ import annotations

from math import log, sqrt
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.feature_maps._base import dots, square_distances
from linattn.feature_maps._projected import SoftmaxKernelFeatures
from linattn.sampling import Sampler
from linattn.typing import Array, Exponential

Floats = NDArray[np.float64]


class ExponentialFeatures(SoftmaxKernelFeatures):
    """Everything the exponential family shares; A = 0 and no transform unless a map has them."""

    positive = True

    antithetic: bool = False
    _A: Floats | float = 0.0
    """Tilt, broadcast against ``(..., d)``."""
    _transforms: tuple[Floats, Floats] | None = None
    """T of the queries and ``T^-T`` of the keys, ``(..., d, d)`` each, or None for neither."""

    @property
    def _features_per_row(self) -> int:  # type: ignore[override]
        return 2 if self.antithetic else 1

    @property
    def _kind(self) -> str:  # type: ignore[override]
        return "paired" if self.antithetic else "positive"

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the query side."""
        return self._spec(0, xp, dtype, device)

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the key side."""
        return self._spec(1, xp, dtype, device)

    @property
    def _is_symmetric(self) -> bool:
        return self._transforms is None

    def _spec(self, side: int, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        A = np.broadcast_to(self._A, (*np.shape(self._A)[:-1], self.dim))[..., None, :]
        P = sqrt(self.scale) * np.swapaxes(np.sqrt(1 - 4 * A) * self.projection, -1, -2)
        col = np.sum(A * self.projection**2 + np.log1p(-4 * A) / 4, axis=-1)
        col = col - 0.5 * log(self.num_features)
        if self.log_weights is not None:
            col = col + 0.5 * self.log_weights
        if self.antithetic:
            col = np.concatenate([col, col], axis=-1)
        Q: Any = self.scale
        if self._transforms is not None:
            T = self._transforms[side]
            T_t = np.swapaxes(T, -1, -2)
            P = T_t @ P
            Q = _arrays.device_array(self.scale * (T_t @ T), xp, dtype, device)
        return Exponential(
            _arrays.device_array(P, xp, dtype, device),
            Q,
            _arrays.device_array(col, xp, dtype, device),
            paired=self.antithetic,
        )

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate with this map's sampler, shapes as :meth:`kernel`.

        Raises
        ------
        NotImplementedError
            The sampler does not know what its coupling takes from the variance, or the map was
            made from a given projection.
        """
        sampler = self._known_sampler(f"{type(self).__name__}.estimate")
        return self._on_host(lambda a, b: self._variance(sampler, a, b), x, y)

    def _square_norm(self, x: Floats, y: Floats) -> Floats:
        x, y = self._transformed(x, y)
        return square_distances(x, -y)

    def _transformed(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        if self._transforms is not None:
            x, y = (
                x @ np.swapaxes(self._transforms[0], -1, -2),
                y @ np.swapaxes(self._transforms[1], -1, -2),
            )
        return sqrt(self.scale) * x, sqrt(self.scale) * y

    def _variance(self, sampler: Sampler, x: Floats, y: Floats) -> Floats:
        """Kernel squared times the relative variance of independent rows, less the gap.

        With ``rho = 1 / (1 - 8 A)`` and ``z = x' + y'`` one row has the relative second moment
        ``prod_l ((rho_l + 1)^2 / (4 rho_l))^(1/2) exp(sum_l rho_l z_l^2)``; a pair of signs has
        the mean of that and of the same with ``-|z|^2`` for the last sum.
        """
        log_square = 2 * self.scale * dots(x, y)
        v = self._square_norm(x, y)
        x, y = self._transformed(x, y)
        A = np.broadcast_to(self._A, (*np.shape(self._A)[:-1], self.dim))
        rho = 1 / (1 - 8 * A)
        log_c = np.sum(np.log((rho + 1) ** 2 / (4 * rho)), axis=-1)[..., None, None] / 2
        root = np.sqrt(rho)[..., None, :]
        tilted = square_distances(root * x, -root * y)
        # Times exp(-top): the moment alone may be out of range where the kernel makes up for it.
        top = np.maximum(log_c + tilted, 0)
        row = _scaled_expm1(log_c + tilted, top)
        if self.antithetic:
            row = (row + _scaled_expm1(log_c - v, top)) / 2
        gap = self._sampler_moment(sampler.variance_gap, v) * np.exp(-top)
        log_relative = np.log(np.maximum(row / self._rows - gap, 0))
        return np.asarray(np.exp(log_square + top + log_relative))

    def _sampler_moment(self, function: Any, square_norm: Floats) -> Floats:
        """Evaluate head by head, for every A that there is."""
        A = np.atleast_1d(self._A)
        if np.any(A[..., :1] != A):
            if function.__self__.name == "gaussian":
                return np.asarray(function(self._kind, square_norm, self._rows, self.dim))
            raise NotImplementedError(
                f"with sampler={self.sampler!r} the variance of the estimate is known "
                f"where all axes of a head have one tilt A, got {A.shape[-1]} of them; for "
                f"sampler='gaussian' it is always known"
            )
        lead = np.broadcast_shapes(A.shape[:-1], square_norm.shape[:-2])
        square_norm = np.broadcast_to(square_norm, (*lead, *square_norm.shape[-2:]))
        moment = np.empty(square_norm.shape)
        tilts = np.broadcast_to(A[..., 0], lead)
        for tilt in np.unique(tilts):
            of_tilt = tilts == tilt
            moment[of_tilt] = function(
                self._kind, square_norm[of_tilt], self._rows, self.dim, A=float(tilt)
            )
        return moment


def _scaled_expm1(x: Floats, top: Floats) -> Floats:
    """Return ``(exp(x) - 1) exp(-top)`` of an ``x <= top``."""
    small = np.expm1(np.minimum(x, 1)) * np.exp(-top)
    return np.where(x > 1, np.exp(x - top) - np.exp(-top), small)
