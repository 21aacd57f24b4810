"""Maps with a random projection, and what all maps of the softmax kernel share."""

from __future__ import annotations

from math import ceil, log, sqrt
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _checks
from linattn.feature_maps._base import BaseFeatureMap, SoftmaxKernelMap, dots
from linattn.sampling import SAMPLERS, Sampler, Seed
from linattn.typing import Array

Floats = NDArray[np.float64]


def find_sampler(sampler: Any) -> Any:
    """Return a sampler by name, or the callable given."""
    if isinstance(sampler, str):
        if sampler not in SAMPLERS:
            raise ValueError(
                f"sampler must be one of {sorted(SAMPLERS)} or a callable, got {sampler!r}"
            )
        return SAMPLERS[sampler]
    if not callable(sampler):
        raise TypeError(f"sampler must be one of {sorted(SAMPLERS)} or a callable, got {sampler!r}")
    return sampler


class ProjectedFeatureMap(BaseFeatureMap):
    """A map with a projection: rows omega, drawn on the host in float64, unscaled."""

    dim: int
    num_features: int
    projection: Floats
    sampler: str | Any

    _features_per_row: ClassVar[int] = 1

    def _draw(self, dim: Any, num_features: Any, sampler: Any, rng: Seed) -> Floats:
        """Check dim and num_features, and draw the projection."""
        dim = _checks.check_positive_int("dim", dim)
        per_row = self._features_per_row
        if num_features is None:
            blocks = max(1, ceil(dim * log(dim) / (per_row * dim)))
            num_features = blocks * per_row * dim
        m = _checks.check_positive_int("num_features", num_features)
        if m % per_row:
            raise ValueError(
                f"num_features must be even, each row of the projection making a pair of columns, "
                f"got {m}"
            )
        draw = find_sampler(sampler)
        # A copy: the sampler may go on using its array.
        projection = np.array(draw(m // per_row, dim, rng), dtype=np.float64)
        if projection.shape != (m // per_row, dim):
            raise ValueError(
                f"sampler must return shape {(m // per_row, dim)}, got {projection.shape}"
            )
        self._set(_unseeded=rng is None)
        return projection

    @staticmethod
    def _check_projection(projection: Any) -> Floats:
        array = _checks.check_parameter("projection", projection)
        if array.ndim < 2 or 0 in array.shape[-2:]:
            raise ValueError(f"projection must have shape (..., rows, dim), got {array.shape}")
        return array

    @staticmethod
    def _check_log_weights(log_weights: Any, rows: Floats) -> Floats | None:
        if log_weights is None:
            return None
        weights = np.array(log_weights, dtype=np.float64)
        if weights.shape != rows.shape[:-1] or not np.isfinite(weights).all():
            raise ValueError(
                f"log_weights must be finite and of shape {rows.shape[:-1]}, one for each row of "
                f"projection, got shape {weights.shape}"
            )
        return weights

    @property
    def _rows(self) -> int:
        return int(self.projection.shape[-2])

    def _repr_parameters(self) -> dict[str, Any]:
        """Show sizes instead of the numbers of the projection."""
        shown: dict[str, Any] = {"dim": self.dim, "num_features": self.num_features}
        if self.projection is not None and self.projection.ndim > 2:
            shown["heads"] = self.projection.shape[:-2]
        for name in self._parameters:
            if np.ndim(getattr(self, name)) < 2 and name != "log_weights":
                shown[name] = getattr(self, name)
        shown["sampler"] = self.sampler
        return shown

    @staticmethod
    def _sampler_unbiased(sampler: Any) -> bool:
        return sampler is not None and bool(getattr(find_sampler(sampler), "unbiased", False))

    def _check_redraw(self) -> None:
        if self.sampler is None:
            raise ValueError(
                f"redraw needs a sampler, and this {type(self).__name__} has none: it has no "
                f"projection, or was made from a given one"
            )

    def _known_sampler(self, what: str) -> Sampler:
        """Return the sampler of this map, or an error that names what a variance needs."""
        sampler = SAMPLERS.get(self.sampler) if isinstance(self.sampler, str) else self.sampler
        if not isinstance(sampler, Sampler):
            raise NotImplementedError(
                f"the variance of {what} needs to know how the projection was drawn: this map has "
                f"sampler={self.sampler!r}, of which nothing is known; make the map with a "
                f"sampler of linattn.sampling.SAMPLERS"
            )
        return sampler


class SoftmaxKernelFeatures(ProjectedFeatureMap, SoftmaxKernelMap):
    """A random map of the kernel ``exp(scale x.y)``."""

    _parameters: ClassVar[tuple[str, ...]] = ("scale", "projection", "log_weights")

    log_weights: Floats | None
    _kind: ClassVar[str]
    """Kind of features, by the names that samplers know."""

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        scale: float | None = None,
        sampler: str | Any = "orthogonal",
        rng: Seed = None,
    ) -> None:
        self._finish(self._draw(dim, num_features, sampler, rng), scale, sampler, None)

    def _finish(
        self,
        projection: Floats,
        scale: Any,
        sampler: Any,
        log_weights: Floats | None,
    ) -> None:
        dim = int(projection.shape[-1])
        scale = 1 / sqrt(dim) if scale is None else scale
        self._set(
            dim=dim,
            num_features=int(projection.shape[-2]) * self._features_per_row,
            scale=_checks.check_finite_number("scale", scale, positive=True),
            projection=projection,
            sampler=sampler,
            log_weights=log_weights,
            unbiased=self._sampler_unbiased(sampler),
        )

    @classmethod
    def from_projection(
        cls,
        projection: ArrayLike,
        *,
        scale: float | None = None,
        log_weights: ArrayLike | None = None,
    ) -> Self:
        """Make a map from given rows omega.

        Parameters
        ----------
        projection : array_like, (..., rows, d)
            Unscaled rows; leading axes are heads, each with rows of its own.
        scale : float, optional
            s; default ``1 / sqrt(d)``.
        log_weights : array_like, (..., rows), optional
            Log importance weights: the estimate is ``mean_r exp(log_weights_r) f_r``. Default 0.
            Quadrature weights w that sum to 1 are ``log(w * rows)``.

        Returns
        -------
        feature map
            With ``sampler`` None: nothing is known of how the rows were drawn, so ``unbiased`` is
            False and ``variance`` raises.

        Raises
        ------
        ValueError
            Wrong shapes, NaN or inf.
        """
        return cls._from_rows(projection, scale, log_weights)

    @classmethod
    def _from_rows(
        cls,
        projection: ArrayLike,
        scale: float | None,
        log_weights: ArrayLike | None,
        **parameters: Any,
    ) -> Self:
        rows = cls._check_projection(projection)
        weights = cls._check_log_weights(log_weights, rows)
        new = cls.__new__(cls)
        new._take(int(rows.shape[-1]), **parameters)
        new._finish(rows, scale, None, weights)
        return new

    def _take(self, dim: int) -> None:
        """Check and store the parameters that only this class has."""

    def _parameters_taken(self) -> dict[str, Any]:
        """Return the parameters that :meth:`_take` takes."""
        return {}

    def redraw(self, rng: Seed = None) -> Self:
        """Return the same map with a new projection.

        Raises
        ------
        ValueError
            The map was made by ``from_projection``: there is no sampler to draw with.
        """
        self._check_redraw()
        new = type(self)(
            self.dim,
            self.num_features,
            scale=self.scale,
            sampler=self.sampler,
            rng=rng,
            **self._parameters_taken(),
        )
        new._set(causal=self.causal)
        return new

    def _square_norm(self, x: Floats, y: Floats) -> Floats:
        """Return what a sampler's closed forms depend on: v = |x + y|^2 or s = |x - y|^2."""
        raise NotImplementedError

    def _sampler_moment(self, function: Any, square_norm: Floats) -> Floats:
        """Evaluate ``variance_gap`` or ``mean_factor`` of a sampler for this map."""
        return np.asarray(function(self._kind, square_norm, self._rows, self.dim))

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of :meth:`estimate` over draws, shapes as :meth:`kernel`.

        The kernel itself, except with a biased sampler.

        Raises
        ------
        NotImplementedError
            The mean with this sampler is not known.
        """
        if self.unbiased:
            return self.kernel(x, y)
        sampler = self._known_sampler(f"{type(self).__name__}.estimate")

        def closed_form(a: Floats, b: Floats) -> Floats:
            factor = self._sampler_moment(sampler.mean_factor, self._square_norm(a, b))
            return np.asarray(np.exp(self.scale * dots(a, b)) * factor)

        return self._on_host(closed_form, x, y)
