"""Batteries for traces, and for numbers that are rounded at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linattn.sampling import Seed, as_generator
from linattn.testing._battery import (
    BatteryReport,
    Check,
    arity_of,
    assert_stated,
    run,
    title_of,
)
from linattn.testing._evidence import Evidence, fail, on_host
from linattn.testing._means import Floats
from linattn.testing.estimators import assert_estimator

Neighbours = Callable[[Floats], tuple[Floats, Floats]]
"""Neighbours of numbers on a grid, below and above."""


def trace(
    draw: Callable[..., Any],
    *,
    dim: int = 8,
    kurtosis: float = 25.0,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    """Test that a trace estimator is unbiased.

    Parameters
    ----------
    draw : callable
        ``draw(matrix, rng)`` estimates the trace of a matrix (d, d), a number.
    dim : int, optional
        d. Default 8.
    kurtosis : float, optional
        Of an estimate. Default 25.
    num_draws, false_alarm, rng, on_fail
        See :mod:`linattn.testing.batteries`.

    Returns
    -------
    BatteryReport
        A row a matrix: the identity, a diagonal of both signs, all ones, a random positive
        semidefinite one, and one without symmetry.

    Raises
    ------
    AssertionError, TypeError, ValueError
        See :mod:`linattn.testing.batteries`.

    Examples
    --------
    >>> from linattn.testing import batteries
    >>> def hutchinson(matrix, rng):
    ...     z = rng.choice([-1.0, 1.0], len(matrix))
    ...     return z @ matrix @ z
    >>> batteries.trace(hutchinson).passed
    True
    """
    arity_of(draw, (2,), "(matrix, rng) -> number")
    generator = as_generator(rng)
    root = generator.standard_normal((dim, dim)) / np.sqrt(dim)
    matrices = {
        "identity": np.eye(dim),
        "diagonal": np.diag(np.linspace(-1, 2, dim)),
        "ones": np.ones((dim, dim)),
        "semidefinite": root @ root.T,
        "no symmetry": np.eye(dim) + root,
    }
    options: dict[str, Any] = {"num_draws": num_draws, "false_alarm": false_alarm / 5}

    def check(matrix: Floats) -> Evidence:
        def estimate(rng: np.random.Generator) -> float:
            return float(on_host(draw(matrix.copy(), rng)))

        return assert_estimator(
            estimate, np.trace(matrix), kurtosis=kurtosis, rng=generator, **options
        )

    checks: list[Check] = [
        (name, "the mean is the trace", partial(check, matrix)) for name, matrix in matrices.items()
    ]
    return run(title_of("trace", draw), checks, false_alarm, on_fail)


def stochastic_rounding(
    draw: Callable[..., Any],
    *,
    grid: str | Neighbours = "bfloat16",
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    r"""Test stochastic rounding: one of the two neighbours on the grid, unbiased.

    .. math::
        \mathrm{E}\, X = x, \qquad \mathrm{Var}\, X = (x - x_-)(x_+ - x)

    Parameters
    ----------
    draw : callable
        ``draw(x, rng)`` rounds the numbers x, (n,) float32.
    grid : {"bfloat16", "float16", "integer"} or callable, optional
        The grid of rounded numbers, or ``grid(x)``, which returns the neighbours
        ``x_- <= x <= x_+``, equal if x is on the grid. Default "bfloat16".
    num_draws, false_alarm, rng, on_fail
        See :mod:`linattn.testing.batteries`.

    Returns
    -------
    BatteryReport

    Raises
    ------
    AssertionError, TypeError, ValueError
        See :mod:`linattn.testing.batteries`; an unknown grid.

    Notes
    -----
    Tried on both signs, at ties, between the grid's points, at powers of two, and between a power
    of two and its smaller neighbour, where the spacing halves. Rounding to nearest, even for ties,
    moves no number to its other neighbour, and fails in "ties" and "between".

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import batteries
    >>> def rounded(x, rng):
    ...     return np.floor(x + rng.random(x.shape))
    >>> batteries.stochastic_rounding(rounded, grid="integer").passed
    True
    """
    arity_of(draw, (2,), "(x, rng) -> rounded x")
    if isinstance(grid, str) and grid not in GRIDS:
        raise ValueError(f"grid must be one of {', '.join(GRIDS)} or a callable, got {grid!r}")
    neighbours = GRIDS[grid] if isinstance(grid, str) else grid
    generator = as_generator(rng)

    def check(name: str, x: Floats) -> Evidence:
        low, high = (on_host(limit) for limit in neighbours(x))
        drawn = [on_host(draw(x.astype(np.float32), generator)) for _ in range(num_draws)]
        draws = np.stack(drawn)
        if draws.shape[1:] != x.shape:
            raise ValueError(f"draw must return an array of shape {x.shape}, got {draws.shape[1:]}")
        wrong = np.argwhere((draws != low) & (draws != high))
        if len(wrong):
            draw_index, at = (int(i) for i in wrong[0])
            fail(
                name,
                f"{x[at]:.9g} became {draws[draw_index, at]:.9g}, want {low[at]:.9g} or "
                f"{high[at]:.9g}",
            )
        return assert_stated(name, draws, x, (x - low) * (high - x), false_alarm / len(POINTS))

    checks: list[Check] = [
        (name, what, partial(check, name, _points(steps, neighbours)))
        for name, (what, steps) in POINTS.items()
    ]
    return run(title_of("stochastic rounding", draw), checks, false_alarm, on_fail)


def _points(steps: Sequence[float], neighbours: Neighbours) -> Floats:
    """Return numbers of both signs at the given grid steps above or below powers of two."""
    points = []
    for base in (1.0, 8.0, 0.125):
        inside = np.array([base * (1 + 2**-12)])
        low, high = (float(limit[0]) for limit in neighbours(inside))
        base, step = low, high - low
        points += [base + step * (count if count > 0 else count / 2) for count in steps]
    return np.array([*points, *(-point for point in points)])


def _float16_neighbours(x: Floats) -> tuple[Floats, Floats]:
    near = x.astype(np.float16)
    low = np.where(near > x, np.nextafter(near, np.float16(-np.inf)), near)
    high = np.where(near < x, np.nextafter(near, np.float16(np.inf)), near)
    return low.astype(np.float64), high.astype(np.float64)


def _bfloat16_neighbours(x: Floats) -> tuple[Floats, Floats]:
    bits = x.astype(np.float32).view(np.uint32)
    inner = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    outer = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    outer = np.where(inner == x, inner, outer)
    return np.minimum(inner, outer).astype(np.float64), np.maximum(inner, outer).astype(np.float64)


def _integer_neighbours(x: Floats) -> tuple[Floats, Floats]:
    return np.floor(x), np.ceil(x)


GRIDS: dict[str, Neighbours] = {
    "bfloat16": _bfloat16_neighbours,
    "float16": _float16_neighbours,
    "integer": _integer_neighbours,
}

POINTS: dict[str, tuple[str, tuple[float, ...]]] = {
    "ties": ("half-way points are unbiased", (0.5, 1.5, 2.5)),
    "between": ("points between two neighbours are unbiased", (0.125, 0.25, 0.9375, 3.75)),
    "powers of two": ("exact there, and unbiased below, on a finer grid", (0.0, -0.25, -0.5, 1.0)),
}
"""Names, claims, and steps above a power of two (half as long below it)."""
