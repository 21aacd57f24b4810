"""Kernel density estimates with the interface of SciPy's ``gaussian_kde``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn.kernels._gaussian import Gaussian, check_points, log_weights, matching, with_mean_zero
from linattn.typing import Array

__all__ = ["kernel_density"]

LAYOUTS = ("rows", "scipy")


class kernel_density:
    r"""Estimate a density with Gaussian kernels, as SciPy's ``gaussian_kde`` does.

    .. math::
        p(x) = \sum_j w_j \, \mathcal{N}(x; y_j, f^2 \Sigma), \qquad \sum_j w_j = 1

    with the weighted covariance of the data and a factor f. Letters: ``n`` rows of data y, ``d``
    coordinates, ``w`` weights, ``N`` points.

    Parameters
    ----------
    dataset : array, (n, d) or (n,)
        Floating, of any array-API library; lists become NumPy arrays.
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
        Not a floating array; weights are negative or of another length; `bw_method` is unknown;
        fewer than two rows have a weight. In methods: points have another number of coordinates.

    See Also
    --------
    linattn.sklearn.KernelDensity : the same with scikit-learn's interface.

    Notes
    -----
    Time O(N n d), memory O((N + n) d): no memory grows with N n. ``logpdf`` does not underflow.
    Data with a singular covariance have no density: the library's Cholesky factorization fails or
    gives NaN. The factor is a Python number. So gradients pass through the points, and through the
    data if `bw_method` is a number.

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

    def __init__(
        self,
        dataset: Any,
        bw_method: str | float | Callable[[kernel_density], float] | None = None,
        weights: Any = None,
        *,
        layout: Literal["rows", "scipy"] = "rows",
    ) -> None:
        if layout not in LAYOUTS:
            message = f"layout must be 'rows' or 'scipy', got {layout!r}"
            raise ValueError(message)
        self._layout = layout
        rows = _in_rows(dataset, layout, None)
        _, (self._data,), self._dtype = check_points(dataset=rows)
        self.n, self.d = self._data.shape
        log_weight = log_weights("weights", weights, self._data, total_one=True)
        self._log_weight, self._xp = log_weight, _arrays.namespace(self._data)
        self.dataset = self._xp.astype(self._data, self._dtype, copy=False)
        weight = self._xp.exp(log_weight)
        self.weights = self._xp.astype(weight, self._dtype, copy=False)
        square = self._xp.sum(weight * weight)
        self.neff = float(_arrays.to_numpy(1 / square)) if weights is not None else float(self.n)
        if not self.neff > 1:
            message = f"dataset must have at least 2 rows that count, got neff = {self.neff}"
            raise ValueError(message)
        centred, _ = with_mean_zero(self._data, log_weight)
        centred = centred - self._xp.sum(weight[:, None] * centred, axis=0, keepdims=True)
        weighted = weight[:, None] * centred / (1 - square)
        self._data_covariance = self._xp.matmul(self._xp.matrix_transpose(centred), weighted)
        self.set_bandwidth(bw_method)

    def scotts_factor(self) -> float:
        """Return Scott's factor."""
        return float(self.neff ** (-1 / (self.d + 4)))

    def silverman_factor(self) -> float:
        """Return Silverman's factor."""
        return float((self.neff * (self.d + 2) / 4) ** (-1 / (self.d + 4)))

    def set_bandwidth(
        self, bw_method: str | float | Callable[[kernel_density], float] | None = None
    ) -> None:
        """Set the factor.

        Parameters
        ----------
        bw_method : {"scott", "silverman"}, float or callable, optional
            As for the class.
        """
        named = {None: self.scotts_factor, "scott": self.scotts_factor}
        named["silverman"] = self.silverman_factor
        if bw_method is None or isinstance(bw_method, str):
            if bw_method not in named:
                message = f"bw_method must be 'scott', 'silverman' or a number, got {bw_method!r}"
                raise ValueError(message)
            factor: Any = named[bw_method]()
        else:
            factor = bw_method(self) if callable(bw_method) else bw_method
        self.factor = _checks.check_finite_number("bw_method", factor, positive=True)
        self._covariance = self._data_covariance * self.factor**2

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
        points = self._points("x", x)
        return self._cast(self._xp.exp(self._log_density(points, self._covariance)))

    def evaluate(self, points: Any) -> Array:
        """Return the density, as :meth:`pdf`."""
        return self.pdf(points)

    def __call__(self, points: Any) -> Array:
        """Return the density, as :meth:`pdf`."""
        return self.pdf(points)

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
        mean = self._xp.reshape(matching("mean", mean, self._data), (-1,))
        cov = self._xp.reshape(matching("cov", cov, self._data), (-1,))
        if mean.shape[0] != self.d or cov.shape[0] != self.d**2:
            message = f"mean and cov must have the {self.d} coordinates of the data, got others"
            raise ValueError(message)
        total = self._covariance + self._xp.reshape(cov, (self.d, self.d))
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
            message = f"other must be a kernel_density of {self.d} coordinates, got another"
            raise ValueError(message)
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
        generator = np.random.default_rng(rng)
        weight = np.exp(_arrays.to_numpy(self._log_weight).astype(np.float64))
        chosen = generator.choice(self.n, size, p=weight / np.sum(weight))
        covariance = _arrays.to_numpy(self._covariance).astype(np.float64)
        noise = generator.standard_normal((size, self.d)) @ np.linalg.cholesky(covariance).T
        drawn = _arrays.to_numpy(self._data)[chosen] + noise
        points = self._cast(matching("points", drawn, self._data))
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
        kernel = Gaussian.of(xp.matmul(centred, inverse), 1.0, self._log_weight)
        _, logs = kernel.read(kernel.of_query(xp.matmul(points - centre, inverse)))
        volume = xp.sum(xp.log(xp.linalg.diagonal(factor)))
        return logs - volume - self.d * math.log(2 * math.pi) / 2

    def _points(self, name: str, points: Any) -> Array:
        rows = _in_rows(points, self._layout, self.d)
        rows = matching(name, rows, self._data)
        if rows.shape[-1] != self.d:
            message = f"{name} must have {self.d} coordinates, got shape {tuple(rows.shape)}"
            raise ValueError(message)
        return rows

    def _cast(self, array: Array) -> Array:
        return self._xp.astype(array, self._dtype, copy=False)


def _in_rows(points: Any, layout: str, d: int | None) -> Any:
    """Return points as rows, (N, d); one axis is one point of d > 1 coordinates, else N points."""
    if not hasattr(points, "ndim"):
        points = np.asarray(points, dtype=np.float64)
    if points.ndim < 2:
        xp = _arrays.namespace(points)
        return xp.reshape(points, (1, -1) if d is not None and d > 1 else (-1, 1))
    if points.ndim > 2:
        message = f"points must have two axes, got shape {tuple(points.shape)}"
        raise ValueError(message)
    return _arrays.namespace(points).matrix_transpose(points) if layout == "scipy" else points
