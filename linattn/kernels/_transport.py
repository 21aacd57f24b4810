"""Optimal transport with an entropy, in the log domain."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

from linattn import _arrays, _checks
from linattn.kernels._gaussian import Gaussian, check_points, joined, log_weights, persisted
from linattn.typing import Array


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
    _sides: dict[str, tuple[Array, Gaussian, Array]] = field(repr=False)

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
        return self._sums(values, "y")

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
        return self._sums(values, "x")

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
        means, _, dtype = self._read(values, "y")
        return _arrays.namespace(means).astype(means, dtype, copy=False)

    @_arrays.on_array_device
    def cost(self) -> Array:
        """Return the sum of ``P_ij |x_i - y_j|^2``, an array of the leading axes."""
        xp = _arrays.namespace(self.f)
        (x, of_x, _), (y, _, _) = self._sides["x"], self._sides["y"]
        x, y = x - of_x.centre, y - of_x.centre
        square = xp.sum(y * y, axis=-1, keepdims=True)
        sums = self._sums(joined([y, square, xp.ones_like(square)]), "y")
        square = xp.sum(x * x, axis=-1, keepdims=True)
        return xp.sum(joined([-2 * x, xp.ones_like(square), square]) * sums, axis=(-2, -1))

    def _sums(self, values: Array, of: str) -> Array:
        """Return P times the values of y, or its transpose times those of x."""
        means, logs, dtype = self._read(values, of)
        xp, (_, rows, f) = _arrays.namespace(means), self._sides["x" if of == "y" else "y"]
        mass = xp.exp(rows.log_weight + f + logs)
        return xp.astype(mass[..., None] * means, dtype, copy=False)

    def _read(self, values: Array, of: str) -> tuple[Array, Array, Any]:
        """Return means of the values of y for each x, or those of x for each y; log sums; dtype."""
        _, (values,), dtype = check_points(values=values)
        (query, _, _), (_, keys, g) = self._sides["x" if of == "y" else "y"], self._sides[of]
        _checks.check_together(of, query, "values", values)
        if values.shape[-2] != g.shape[-1]:
            raise ValueError(
                f"values must have the {g.shape[-1]} rows of {of}, got {tuple(values.shape)}"
            )
        _checks.check_leading_axes(**{of: tuple(g.shape[:-1]), "values": tuple(values.shape[:-2])})
        return *keys.read(keys.of_query(query), values, g), dtype


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
        Of any array-API library. Integers and booleans count as numbers.
    y : array, (..., n, d)
        Same library, dtype and device.
    reg : float
        The weight of the entropy, in units of squared distance: the `reg` of POT.
    a, b : array_like, (..., N) and (..., n), optional
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
        Not finite arrays of one library, floating dtype and device; masses that are negative, all 0
        or of another length; `reg`, counts or tolerances out of range.

    Warns
    -----
    RuntimeWarning
        Where the tolerance is not reached.

    Notes
    -----
    An update of both takes time O(N n d); memory O((N + n) d): neither costs nor plan are made. The
    number of updates grows as 1 / reg. It is the log-domain iteration, so that no `reg` underflows.
    If y and b equal x and a, updates are averaged with the values before: some 25 are enough at any
    `reg`.

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
    same = x is y and a is b
    xp, (x, y), _ = check_points(x=x, y=y)
    reg = _checks.check_finite_number("reg", reg, positive=True)
    count = _checks.check_positive_int("max_iterations", max_iterations)
    least = None if tolerance is None else _checks.check_finite_number("tolerance", tolerance)
    h = math.sqrt(reg / 2)
    log_a, log_b = log_weights("a", a, "x", x, rows=1), log_weights("b", b, "y", y, rows=1)
    if any(_arrays.inspected(xp.isfinite(points)) is False for points in (x, y)):
        raise ValueError("x and y must be finite, got NaN or inf; leave out these rows")
    lead = _checks.check_leading_axes(x=tuple(log_a.shape[:-1]), y=tuple(log_b.shape[:-1]))
    x, y = (xp.broadcast_to(points, (*lead, *points.shape[-2:])) for points in (x, y))
    if not same and x.shape == y.shape:
        same = all(_arrays.inspected(p == q) for p, q in ((x, y), (log_a, log_b)))
    of_x, of_y = Gaussian.of("x", x, h, log_a), Gaussian.of("y", y, h, log_b)
    at_x, at_y = of_y.of_query(x), of_x.of_query(y)
    error, iteration, g = float("nan"), 0, xp.zeros_like(of_y.log_weight)
    # f and g over reg. After f is updated the rows are right, and what g lacks is the error.
    while True:
        f = persisted(-of_y.read(at_x, bias=g)[1])
        logs = persisted(of_x.read(at_y, bias=f)[1])
        if least is not None:
            wrong = xp.exp(of_y.log_weight) * xp.abs(xp.exp(g + logs) - 1)
            error = float(xp.max(xp.sum(wrong, axis=-1))) if math.prod(lead) else 0.0
            if error <= least:
                break
        if iteration == count:
            break
        # If both problems are one, its error changes sign with each update: the mean loses most.
        g, iteration = (f + g) / 2 if same else -logs, iteration + 1
    if least is not None and not error <= least:
        stopped = f"sinkhorn stopped after {count} iterations with marginals wrong by {error:.1e}"
        message = f"{stopped}, more than {least:.1e}; raise max_iterations or reg"
        warnings.warn(message, RuntimeWarning, stacklevel=_arrays.caller_level())
    sides = {"x": (x, of_x, f), "y": (y, of_y, g)}
    return Transport(reg * f, reg * g, iteration, error, sides)
