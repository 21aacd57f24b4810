"""Kernel density estimates with the interface of SciPy's ``gaussian_kde``."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn.kernels._gaussian import Gaussian, check_points, log_weights, matching, with_mean_zero
from linattn.sampling import as_generator
from linattn.typing import Array


class kernel_density:
    r"""Estimate a density with Gaussian kernels, as SciPy's ``gaussian_kde`` does.

    .. math::
        p(x) = \sum_j w_j \, \mathcal{N}(x; y_j, f^2 \Sigma), \qquad \sum_j w_j = 1

    with the weighted covariance of the data and a factor f. Letters: ``n`` rows of data y, ``d``
    coordinates, ``w`` weights, ``N`` points.

    Parameters
    ----------
    dataset : array, (n, d) or (n,)
        Of any array-API library; lists become NumPy arrays. Integers count as numbers.
    bw_method : {"scott", "silverman"}, float or callable, optional
        The factor f, or a function that is given this object and returns f. "scott" is
        ``neff^(-1 / (d + 4))``; "silverman" is ``(neff (d + 2) / 4)^(-1 / (d + 4))``. Default
        "scott".
    weights : array_like, (n,), optional
        w, scaled to sum 1. Default: equal.
    layout : {"rows", "scipy"}, optional
        "rows": points are (N, d). "scipy": data and points are (d, N), as in SciPy. Default "rows".

    Attributes
    ----------
    dataset : array, (n, d)
        The data, in rows in both layouts.
    weights : array, (n,)
        w.
    n, d : int
        Numbers of rows and coordinates.
    neff : float
        ``1 / sum w^2``.
    factor : float
        f.
    covariance : array, (d, d)
        f^2 times the covariance of the data.

    Raises
    ------
    TypeError, ValueError
        Not an array of numbers; weights are negative or of another length; `bw_method` is unknown;
        fewer than two rows have a weight. In methods: points have another number of coordinates.
    numpy.linalg.LinAlgError
        NaN or inf; constant or linearly dependent coordinates, to within rounding: such data have
        no density. Inside ``jax.jit`` the results are NaN instead.

    See Also
    --------
    linattn.sklearn.KernelDensity : the same with scikit-learn's interface.

    Notes
    -----
    Time O(N n d), memory O((N + n) d): no memory grows with N n. ``logpdf`` does not underflow.
    The factor is a Python number. So gradients pass through the points, and through the data if
    `bw_method` is a number.

    References
    ----------
    Scott, "Multivariate Density Estimation" (1992), eq. 6.44; Silverman, "Density Estimation for
    Statistics and Data Analysis" (1986), eq. 4.14.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import kernel_density
    >>> data = np.random.default_rng(0).standard_normal((1000, 2))
    >>> density = kernel_density(data)
    >>> density.logpdf(data[:5]).shape
    (5,)
    """

    @_arrays.on_array_device
    def __init__(
        self,
        dataset: Any,
        bw_method: str | float | Callable[[kernel_density], float] | None = None,
        weights: Any = None,
        *,
        layout: Literal["rows", "scipy"] = "rows",
    ) -> None:
        if not isinstance(layout, str) or layout not in ("rows", "scipy"):
            raise ValueError(f"layout must be 'rows' or 'scipy', got {layout!r}")
        self._layout = layout
        rows = _in_rows("dataset", dataset, layout, None)
        _, (self._data,), self._dtype = check_points(dataset=rows)
        self.n, self.d = self._data.shape
        # Part of a variance that other coordinates leave: below, rounding errors decide it.
        self._least_part = float(16 * self.d * self._xp.finfo(self._data.dtype).eps)
        self._log_weight = log_weights("weights", weights, "dataset", self._data, rows=2)
        if self._log_weight.ndim > 1:
            raise ValueError(
                f"weights must have shape ({self.n},), got {tuple(self._log_weight.shape)}"
            )
        self.dataset = self._xp.astype(self._data, self._dtype, copy=False)
        weight = self._xp.exp(self._log_weight)
        self.weights = self._xp.astype(weight, self._dtype, copy=False)
        square = self._xp.sum(weight * weight)
        self.neff = float(_arrays.to_numpy(1 / square)) if weights is not None else float(self.n)
        centred, centre = with_mean_zero(self._data, self._log_weight)
        centred = centred - self._xp.sum(weight[:, None] * centred, axis=0, keepdims=True)
        weighted = weight[:, None] * centred / (1 - square)
        self._data_covariance = self._xp.matmul(self._xp.matrix_transpose(centred), weighted)
        self.set_bandwidth(bw_method)
        self._check_rank(centre[0, :], (self._data if _arrays.is_exact(rows) else rows).dtype)

    @property
    def _xp(self) -> ModuleType:
        # Not kept: modules cannot be pickled.
        return _arrays.namespace(self._data)

    def scotts_factor(self) -> float:
        """Return Scott's factor."""
        return float(self.neff ** (-1 / (self.d + 4)))

    def silverman_factor(self) -> float:
        """Return Silverman's factor."""
        return float((self.neff * (self.d + 2) / 4) ** (-1 / (self.d + 4)))

    @_arrays.on_array_device
    def set_bandwidth(
        self, bw_method: str | float | Callable[[kernel_density], float] | None = None
    ) -> None:
        """Set the factor.

        Parameters
        ----------
        bw_method : {"scott", "silverman"}, float or callable, optional
            As for the class.
        """
        rules = {"scott": self.scotts_factor, "silverman": self.silverman_factor}
        given = "scott" if bw_method is None else bw_method
        if isinstance(given, str) and given not in rules:
            raise ValueError(
                f"bw_method must be 'scott', 'silverman' or a number, got {bw_method!r}"
            )
        factor: Any = rules[given]() if isinstance(given, str) else given
        factor = factor(self) if callable(factor) else factor
        self.factor = _checks.check_finite_number("bw_method", factor, positive=True)

    def _check_rank(self, centre: Array, dtype: Any) -> None:
        """Check that data vary in all directions, by more than the rounding of their numbers."""
        eps, rank = float(self._xp.finfo(dtype).eps), 0
        try:
            covariance = _arrays.to_numpy(self._data_covariance)
        except (TypeError, RuntimeError):  # of traced arrays: NaN in the results
            excess = self._xp.linalg.diagonal(self._data_covariance) - (centre * eps / 2) ** 2
            self._data_covariance = self._data_covariance + 0 * self._xp.log(excess)
            return
        if np.all(np.isfinite(covariance)):
            deviation = np.sqrt(np.diagonal(covariance))
            rounding = (np.abs(_arrays.to_numpy(centre)) + deviation) * eps / 2
            deviation = np.where(deviation > rounding, deviation, np.inf)
            least = max(self._least_part, np.max(np.minimum(rounding / deviation, 0.1)) ** 2)
            correlation = covariance / deviation / deviation[:, None]
            rank = int(np.sum(np.linalg.eigvalsh(correlation) > least))
        if rank < self.d:
            wanted = f"dataset must be finite and vary in {self.d} independent directions"
            remedy = "leave out constant coordinates and sums of others"
            raise np.linalg.LinAlgError(
                f"{wanted}, got a covariance of rank {rank} to within rounding; {remedy}"
            )

    @property
    def _covariance(self) -> Array:
        return self._data_covariance * self.factor**2

    @property
    def covariance(self) -> Array:
        """Covariance of a kernel: ``f^2`` times the covariance of the data, (d, d)."""
        return self._xp.astype(self._covariance, self._dtype, copy=False)

    @_arrays.on_array_device
    def logpdf(self, x: Any) -> Array:
        """Return the logarithm of the density.

        Parameters
        ----------
        x : array, (N, d) or (d,)
            Points, in the layout of the data.

        Returns
        -------
        array, (N,)
            In the library, dtype and device of the data.
        """
        points = self._points("x", x)
        return self._cast(self._log_density(points, self._covariance))

    @_arrays.on_array_device
    def pdf(self, x: Any) -> Array:
        """Return the density: the exponential of :meth:`logpdf`."""
        return self._pdf("x", x)

    @_arrays.on_array_device
    def evaluate(self, points: Any) -> Array:
        """Return the density, as :meth:`pdf`."""
        return self._pdf("points", points)

    __call__ = evaluate

    def _pdf(self, name: str, points: Any) -> Array:
        rows = self._points(name, points)
        return self._cast(self._xp.exp(self._log_density(rows, self._covariance)))

    @_arrays.on_array_device
    def integrate_gaussian(self, mean: Any, cov: Any) -> Array:
        """Return the integral of the density times a normal density.

        Parameters
        ----------
        mean : array_like, (d,)
            Of the normal density.
        cov : array_like, (d, d) or ()
            Of the normal density.

        Returns
        -------
        array, ()
            The integral over all points.
        """
        mean = self._xp.reshape(matching("mean", mean, "dataset", self._data), (-1,))
        cov = self._xp.reshape(matching("cov", cov, "dataset", self._data), (-1,))
        if mean.shape[0] != self.d or cov.shape[0] != self.d**2:
            raise ValueError(
                f"mean and cov must have the {self.d} coordinates of the data, got others"
            )
        cov = self._xp.reshape(cov, (self.d, self.d))
        if not _arrays.is_lazy(cov) and np.any(np.linalg.eigvalsh(_arrays.to_numpy(cov)) < 0):
            raise ValueError("cov must be positive semi-definite, got a negative eigenvalue")
        total = self._covariance + cov
        return self._cast(self._xp.exp(self._log_density(mean[None, :], total)[0]))

    @_arrays.on_array_device
    def integrate_kde(self, other: kernel_density) -> Array:
        """Return the integral of the product of two densities.

        Parameters
        ----------
        other : kernel_density
            Of data of the same library and coordinates.

        Returns
        -------
        array, ()
            The integral over all points.
        """
        if not isinstance(other, kernel_density) or other.d != self.d:
            raise ValueError(f"other must be a kernel_density of {self.d} coordinates, got another")
        _checks.check_together("dataset", self._data, "the dataset of other", other._data)
        log = self._log_density(other._data, self._covariance + other._covariance)
        return self._cast(self._xp.sum(self._xp.exp(other._log_weight + log)))

    def resample(self, size: int | None = None, rng: Any = None) -> Array:
        """Draw points from the density.

        Parameters
        ----------
        size : int, optional
            Default ``neff``, rounded down.
        rng : int or numpy.random.Generator, optional
            Seed or generator. Default: a new seed.

        Returns
        -------
        array, (size, d)
            In the layout and library of the data.

        Examples
        --------
        >>> import numpy as np
        >>> from linattn.kernels import kernel_density
        >>> data = np.random.default_rng(0).standard_normal((500, 2))
        >>> kernel_density(data).resample(10, rng=0).shape
        (10, 2)
        """
        size = int(self.neff) if size is None else _checks.check_positive_int("size", size)
        generator = as_generator(rng)
        weight = np.exp(_arrays.to_numpy(self._log_weight).astype(np.float64))
        chosen = generator.choice(self.n, size, p=weight / np.sum(weight))
        covariance = _arrays.to_numpy(self._covariance).astype(np.float64)
        noise = generator.standard_normal((size, self.d)) @ np.linalg.cholesky(covariance).T
        drawn = _arrays.to_numpy(self._data)[chosen] + noise
        points = self._cast(matching("points", drawn, "dataset", self._data))
        return points if self._layout == "rows" else self._xp.matrix_transpose(points)

    def _log_density(self, points: Array, covariance: Array) -> Array:
        """Log density of points, (N,), by kernels of any covariance."""
        xp = self._xp
        factor = xp.linalg.cholesky(covariance)
        if array_api_compat.is_dask_array(factor):
            # Dask's is the upper triangle.
            factor = xp.matrix_transpose(factor)
        inverse = xp.matrix_transpose(xp.linalg.inv(factor))
        centred, centre = with_mean_zero(self._data, self._log_weight)
        kernel = Gaussian.of("dataset", xp.matmul(centred, inverse), 1.0, self._log_weight)
        _, logs = kernel.read(kernel.of_query(xp.matmul(points - centre, inverse)))
        pivot, variance = xp.linalg.diagonal(factor), xp.linalg.diagonal(covariance)
        # For arrays that nobody inspected; the others have raised.
        singular = pivot**2 < self._least_part * variance
        volume = xp.sum(xp.log(xp.where(singular, xp.full_like(pivot, float("nan")), pivot)))
        return logs - volume - self.d * math.log(2 * math.pi) / 2

    def _points(self, name: str, points: Any) -> Array:
        rows = _in_rows(name, points, self._layout, self.d)
        rows = matching(name, rows, "dataset", self._data)
        if rows.shape[-1] != self.d:
            raise ValueError(
                f"{name} must have {self.d} coordinates, got shape {tuple(rows.shape)}"
            )
        return rows

    def _cast(self, array: Array) -> Array:
        return self._xp.astype(array, self._dtype, copy=False)


def _in_rows(name: str, points: Any, layout: str, d: int | None) -> Any:
    """Return points as rows, (N, d); one axis is one point of d > 1 coordinates, else N points."""
    if not array_api_compat.is_array_api_obj(points):
        points = matching(name, points, name, np.zeros(()))
    if points.ndim < 2:
        xp = _arrays.namespace(points)
        return xp.reshape(points, (1, -1) if d is not None and d > 1 else (-1, 1))
    if points.ndim > 2:
        raise ValueError(f"{name} must have two axes, got shape {tuple(points.shape)}")
    return _arrays.namespace(points).matrix_transpose(points) if layout == "scipy" else points
