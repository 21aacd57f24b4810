"""Batteries for random matrices: orthogonal ones, and rows of N(0, I)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._battery import (
    BatteryReport,
    Check,
    arity_of,
    assert_stated,
    run,
    title_of,
    weakest,
)
from linattn.testing._evidence import Evidence, UntestableError, assert_close, fail, on_host
from linattn.testing._means import Floats
from linattn.testing.projections import assert_gaussian_rows

SHAPES = ((2, 2), (3, 3), (4, 4), (8, 8), (8, 3), (3, 8))
"""Of orthogonal matrices: small ones, where the mistakes are large, tall and wide ones."""

LARGEST_BLOCK = 4
"""Rows and columns whose products are compared, all pairs of entries."""


def haar(
    draw: Callable[..., Any],
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rotations: bool = False,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    r"""Test that orthogonal matrices are uniformly distributed (Haar).

    .. math::
        \mathrm{E}\, Q = 0, \qquad \mathrm{E}\, Q_{ij} Q_{kl} = \delta_{ik} \delta_{jl} / N,
        \qquad \mathrm{E} \det Q = 0

    Parameters
    ----------
    draw : callable
        ``draw(num, dim, rng)`` returns a matrix (num, dim) with orthonormal rows, or columns if it
        is tall; or ``draw(dim, rng)`` a square one; or ``draw(rng)`` one of its own shape.
    shapes : sequence of (int, int), optional
        (num, dim) to try. ``draw(dim, rng)`` is tried at the square ones.
    rotations : bool, optional
        Whether all determinants are 1: uniform on rotations alone. Default False.
    num_draws, false_alarm, rng, on_fail
        See :mod:`linattn.testing.batteries`.

    Returns
    -------
    BatteryReport

    Raises
    ------
    AssertionError, TypeError, ValueError
        See :mod:`linattn.testing.batteries`.

    Notes
    -----
    N is the larger of num and dim. All variances are exact: ``Var Q_ij = 1 / N``, and for products
    of two entries ``3 / (N (N + 2)) - 1 / N^2`` (one entry twice), ``1 / (N (N + 2))`` (of one row
    or column), ``(N + 1) / ((N - 1) N (N + 2))`` (neither). A QR whose signs are not fixed has
    ``E Q_11`` of about ``-sqrt(2 / (pi N))``: it is largest in small matrices.

    References
    ----------
    Mezzadri, "How to generate random matrices from the classical compact groups" (2007), for the
    signs; Collins and Sniady, "Integration with respect to the Haar measure" (2006), for moments.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import batteries
    >>> def rotation(dim, rng):
    ...     q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
    ...     return q * np.sign(np.diag(r))
    >>> batteries.haar(rotation, num_draws=1000).passed
    True
    """
    rotations = _checks.check_flag("rotations", rotations)
    matrices = _orthogonal_draws(draw, shapes, num_draws, as_generator(rng))
    share = false_alarm / (3 * max(1, len(matrices)))

    products = partial(_products, matrices, rotations, share)
    determinant = partial(_determinant, matrices, rotations, share)
    checks: list[Check] = [
        ("orthonormal", "rows have length 1 and right angles", partial(_orthonormal, matrices)),
        ("mean", "no direction is preferred", partial(_mean, matrices, share)),
        ("products", "entries are uncorrelated, of variance 1 / N", products),
        ("determinant", "reflections are as frequent as rotations", determinant),
    ]
    return run(title_of("Haar", draw), checks, false_alarm, on_fail)


def _orthonormal(matrices: list[Floats]) -> Evidence:
    for Q in matrices:
        rows = Q if Q.shape[1] <= Q.shape[2] else np.swapaxes(Q, 1, 2)
        gram = rows @ np.swapaxes(rows, 1, 2)
        eye = np.broadcast_to(np.eye(rows.shape[1]), gram.shape)
        assert_close("orthonormal", f"Q Q^T of {_shape(Q)}", gram, eye, 1e-4)
    return Evidence("orthonormal", "Q Q^T = I, or Q^T Q = I for tall ones")


def _mean(matrices: list[Floats], share: float) -> Evidence:
    found = [
        assert_stated(f"mean of {_shape(Q)}", Q, 0.0, 1 / max(Q.shape[1:]), share) for Q in matrices
    ]
    return weakest("mean", found)


def _products(matrices: list[Floats], rotations: bool, share: float) -> Evidence:
    found = []
    for Q in matrices:
        N = max(Q.shape[1:])
        if N == 1 or (rotations and N == 2):
            continue
        block = Q[:, :LARGEST_BLOCK, :LARGEST_BLOCK]
        row, column = (grid.ravel() for grid in np.indices(block.shape[1:]))
        flat = block.reshape(len(Q), -1)
        same = (row[:, None] == row).astype(int) + (column[:, None] == column)
        variance = np.array(
            [
                (N + 1) / ((N - 1) * N * (N + 2)),
                1 / (N * (N + 2)),
                3 / (N * (N + 2)) - 1 / N**2,
            ]
        )[same]
        check = f"products of entries of {_shape(Q)}"
        moments = flat[:, :, None] * flat[:, None, :]
        found.append(assert_stated(check, moments, (same == 2) / N, variance, share))
    return weakest("products", found)


def _determinant(matrices: list[Floats], rotations: bool, share: float) -> Evidence:
    found = []
    for Q in matrices:
        if Q.shape[1] != Q.shape[2]:
            continue
        signs = np.linalg.det(Q)
        if rotations:
            assert_close(f"determinant of {_shape(Q)}", "det Q", signs, np.ones(len(Q)), 1e-4)
            found.append(Evidence("determinant", "always 1"))
        elif np.all(signs > 0):
            fail("determinant", "is always 1: of rotations alone; rotations=True allows that")
        else:
            found.append(assert_stated(f"determinant of {_shape(Q)}", signs, 0.0, 1.0, share))
    if not found:
        raise UntestableError("no matrix is square")
    return weakest("determinant", found)


def _shape(Q: NDArray[Any]) -> str:
    return f"{Q.shape[1]} x {Q.shape[2]}"


def _orthogonal_draws(
    draw: Any, shapes: Sequence[tuple[int, int]], num_draws: int, rng: np.random.Generator
) -> list[Floats]:
    """Draw matrices of every shape, ``(num_draws, num, dim)`` each."""
    _checks.check_positive_int("num_draws", num_draws)
    arity = arity_of(draw, (1, 2, 3), "(num, dim, rng) -> (num, dim), (dim, rng) or (rng)")
    if arity == 1:
        return [np.stack([on_host(draw(rng)) for _ in range(num_draws)])]
    drawn = []
    for num, dim in shapes:
        if arity == 2 and num != dim:
            continue
        size = (num, dim)[-(arity - 1) :]
        Q = np.stack([on_host(draw(*size, rng)) for _ in range(num_draws)])
        if Q.shape[1:] != (num, dim):
            raise ValueError(f"draw must return a matrix of shape {(num, dim)}, got {Q.shape[1:]}")
        drawn.append(Q)
    return drawn


def isotropic(
    draw: Callable[..., Any],
    *,
    shapes: Sequence[tuple[int, int]] = ((4, 2), (4, 4), (8, 4), (16, 16)),
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    """Test that a random row of a random projection is N(0, I): direction and norm.

    Parameters
    ----------
    draw : callable
        ``draw(num, dim, rng)`` returns rows (num, dim); or ``draw(rng)`` rows of its own shape.
    shapes : sequence of (int, int), optional
        (num, dim) to try.
    num_draws, false_alarm, rng, on_fail
        See :mod:`linattn.testing.batteries`.

    Returns
    -------
    BatteryReport
        A row a shape: :func:`linattn.testing.assert_gaussian_rows`.

    Raises
    ------
    AssertionError, TypeError, ValueError
        See :mod:`linattn.testing.batteries`.

    Notes
    -----
    Rows of one fixed norm, and directions from a QR whose signs are not fixed, fail. Rows of one
    draw may depend on each other in any way.

    Examples
    --------
    >>> from linattn.testing import batteries
    >>> batteries.isotropic(lambda num, dim, rng: rng.standard_normal((num, dim))).passed
    True
    """
    generator = as_generator(rng)
    arity = arity_of(draw, (1, 3), "(num, dim, rng) -> (num, dim) or (rng)")
    if arity == 1:
        shapes = [np.shape(on_host(draw(generator)))]
    share = false_alarm / max(1, len(shapes))

    def sample(num: int, dim: int, rng: np.random.Generator) -> Floats:
        return on_host(draw(rng) if arity == 1 else draw(num, dim, rng))

    def check(num: int, dim: int) -> Check:
        def compare() -> Evidence:
            return assert_gaussian_rows(
                sample, num, dim, num_draws=num_draws, false_alarm_rate=share, rng=generator
            )

        return f"{num} x {dim}", "a row picked at random is N(0, I)", compare

    return run(
        title_of("isotropic", draw), [check(*shape) for shape in shapes], false_alarm, on_fail
    )
