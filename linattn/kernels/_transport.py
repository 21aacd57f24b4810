"""Optimal transport with an entropy, in the log domain."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

from linattn import _arrays, _checks
from linattn.kernels._gaussian import Gaussian, check_points, joined, log_weights, persisted
from linattn.typing import Array

__all__ = ["Transport", "sinkhorn"]


@dataclass(frozen=True, eq=False)
class Transport:
    r"""A transport plan between two clouds of points, by its potentials.

    .. math::
        P_{ij} = a_i b_j \exp((f_i + g_j - |x_i - y_j|^2) / \varepsilon)

    Letters: ``N`` points x of masses a, ``n`` points y of masses b, ``e`` value dim.

    Attributes
    ----------
    f : array, (..., N)
        Potential of x, in the dtype of the computation (float64 where the library has it).
    g : array, (..., n)
        Potential of y.
    num_iterations : int
        Updates of both.
    marginal_error : float
        Largest sum over j of ``|sum_i P_ij - b_j|``; the sums over j are a. NaN where no values
        were inspected.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import sinkhorn
    >>> x, y = np.random.default_rng(0).standard_normal((2, 50, 2))
    >>> plan = sinkhorn(x, y, reg=1.0)
    >>> plan.apply(y).shape, bool(plan.marginal_error < 1e-6)
    ((50, 2), True)
    """

    f: Array = field(repr=False)
    g: Array = field(repr=False)
    num_iterations: int
    marginal_error: float
    _reg: float = field(repr=False)
    _of_y: Gaussian = field(repr=False)
    _of_x: Gaussian = field(repr=False)

    @_arrays.on_array_device
    def apply(self, values: Array) -> Array:
        """Return P times the values: for each x, their sum weighted by the mass from each y.

        Parameters
        ----------
        values : array, (..., n, e)
            One row for each y.

        Returns
        -------
        array, (..., N, e)
            P is never made.
        """
        return self._sums(values, self._of_x, self._of_y, self.f, self.g)

    @_arrays.on_array_device
    def apply_transpose(self, values: Array) -> Array:
        """Return the transpose of P times the values.

        Parameters
        ----------
        values : array, (..., N, e)
            One row for each x.

        Returns
        -------
        array, (..., n, e)
            P is never made.
        """
        return self._sums(values, self._of_y, self._of_x, self.g, self.f)

    @_arrays.on_array_device
    def barycentric(self, values: Array) -> Array:
        """Return, for each x, the mean of the values weighted by its row of P.

        Parameters
        ----------
        values : array, (..., n, e)
            One row for each y; y itself maps x onto the second cloud.

        Returns
        -------
        array, (..., N, e)
            Weighted means.

        Examples
        --------
        >>> import numpy as np
        >>> from linattn.kernels import sinkhorn
        >>> x = np.random.default_rng(0).standard_normal((50, 2))
        >>> moved = sinkhorn(x, x + 3.0, reg=1.0).barycentric(x + 3.0)
        >>> bool(np.all(np.abs((moved - x).mean(axis=0) - 3.0) < 0.5))
        True
        """
        _, (values,), dtype = check_points(values=values)
        xp = _arrays.namespace(values)
        query = self._of_y.of_query(self._points(self._of_x))
        means, _ = self._of_y.read(query, values, self.g / self._reg)
        return xp.astype(means, dtype, copy=False)

    @_arrays.on_array_device
    def cost(self) -> Array:
        """Return the sum of ``P_ij |x_i - y_j|^2``, an array of the leading axes."""
        xp = _arrays.namespace(self.f)
        y = self._points(self._of_y) - self._of_x.centre
        x = self._points(self._of_x) - self._of_x.centre
        square = xp.sum(y * y, axis=-1, keepdims=True)
        ones = xp.ones_like(square)
        sums = self._sums(joined([y, square, ones]), self._of_x, self._of_y, self.f, self.g)
        square = xp.sum(x * x, axis=-1, keepdims=True)
        return xp.sum(joined([-2 * x, xp.ones_like(square), square]) * sums, axis=(-2, -1))

    @staticmethod
    def _points(kernel: Gaussian) -> Array:
        return kernel.coordinates * kernel.bandwidth + kernel.centre

    def _sums(self, values: Array, rows: Gaussian, keys: Gaussian, f: Array, g: Array) -> Array:
        xp, (values,), dtype = check_points(values=values)
        query = keys.of_query(self._points(rows))
        means, logs = keys.read(query, values, g / self._reg)
        mass = xp.exp(rows.log_weight + f / self._reg + logs)
        return xp.astype(mass[..., None] * means, dtype, copy=False)


@_arrays.on_array_device
def sinkhorn(
    x: Array,
    y: Array,
    *,
    reg: float,
    a: Any = None,
    b: Any = None,
    max_iterations: int = 1000,
    tolerance: float | None = 1e-9,
) -> Transport:
    r"""Transport one cloud of points to another at least cost, with an entropy.

    .. math::
        \min_P \sum_{ij} P_{ij} |x_i - y_j|^2
        + \varepsilon \sum_{ij} P_{ij} \log \frac{P_{ij}}{a_i b_j}
        \quad\text{where}\quad \sum_j P_{ij} = a_i, \; \sum_i P_{ij} = b_j

    Letters: ``N`` points x of masses a, ``n`` points y of masses b, ``d`` coordinates.

    Parameters
    ----------
    x : array, (..., N, d)
        Floating, of any array-API library.
    y : array, (..., n, d)
        Same library, dtype and device.
    reg : float
        The weight of the entropy, in units of squared distance: the `reg` of POT.
    a, b : array_like, (N,) and (n,), optional
        Masses, each scaled to sum 1. Default: equal.
    max_iterations : int, optional
        Updates of both potentials at most. Default 1000.
    tolerance : float or None, optional
        Stop when the second marginal is wrong by at most this, in sum. None takes all updates
        without inspecting values, as ``jax.jit`` needs. Default 1e-9.

    Returns
    -------
    Transport
        Potentials, with methods that apply the plan.

    Raises
    ------
    TypeError, ValueError
        Not floating arrays of one library, dtype and device; masses that are negative or of another
        length; `reg`, counts or tolerances out of range.

    Warns
    -----
    RuntimeWarning
        Where the tolerance is not reached.

    Notes
    -----
    An update of both takes time O(N n d); memory O((N + n) d): neither costs nor plan are made. The
    number of updates grows as 1 / reg. It is the log-domain iteration, so that no `reg` underflows.

    References
    ----------
    Cuturi, "Sinkhorn Distances" (2013); Peyre and Cuturi, "Computational Optimal Transport" (2019),
    eq. 4.43.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.kernels import sinkhorn
    >>> x, y = np.random.default_rng(0).standard_normal((2, 200, 2))
    >>> plan = sinkhorn(x, y + 3, reg=1.0)
    >>> bool(np.allclose(plan.apply(np.ones((200, 1))), 1 / 200))
    True
    """
    xp, (x, y), _ = check_points(x=x, y=y)
    reg = _checks.check_finite_number("reg", reg, positive=True)
    count = _checks.check_positive_int("max_iterations", max_iterations)
    least = None if tolerance is None else _checks.check_finite_number("tolerance", tolerance)
    h = math.sqrt(reg / 2)
    of_x = Gaussian.of(x, h, log_weights("a", a, x, total_one=True))
    of_y = Gaussian.of(y, h, log_weights("b", b, y, total_one=True))
    at_x, at_y = of_y.of_query(x), of_x.of_query(y)
    error, iteration, g = float("nan"), 0, xp.zeros_like(of_y.log_weight)
    # f and g over reg. After f is updated the rows are right, and what g lacks is the error.
    while True:
        f = persisted(-of_y.read(at_x, bias=g)[1])
        logs = persisted(of_x.read(at_y, bias=f)[1])
        if least is not None:
            wrong = xp.exp(of_y.log_weight) * xp.abs(xp.exp(g + logs) - 1)
            error = float(xp.max(xp.sum(wrong, axis=-1)))
            if error <= least:
                break
        if iteration == count:
            break
        g, iteration = -logs, iteration + 1
    if least is not None and not error <= least:
        message = (
            f"sinkhorn stopped after {count} iterations with marginals wrong by {error:.1e}, more "
            f"than {least:.1e}; raise max_iterations or reg"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=_arrays.caller_level())
    return Transport(reg * f, reg * g, iteration, error, reg, of_y, of_x)
