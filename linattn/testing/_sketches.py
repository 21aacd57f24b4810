"""Batteries for what keeps inner products on average: sketches, quantizers, features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from linattn.sampling import Seed, as_generator
from linattn.testing._battery import BatteryReport, Check, arity_of, run, title_of
from linattn.testing._evidence import Evidence, UntestableError, on_host
from linattn.testing._means import Floats
from linattn.testing.estimators import assert_estimator

KEY_NORMS = (0.2, 0.8, 0.5, 0.3, 0.8)
"""Of the keys whose products with a query are compared."""

NUM_KEYS = 256
"""Random directions over which the scale of a quantizer is averaged."""


def _directions(dim: int, rng: np.random.Generator) -> Floats:
    """Return unit vectors at which sketches and quantizers go wrong, two nearly parallel."""
    first, other = rng.standard_normal((2, dim)) / np.sqrt(dim)
    pair, steps = np.zeros(dim), np.arange(dim)
    pair[[0, -1]] = 1, -1
    x = np.stack(
        [
            np.eye(dim)[0],
            np.ones(dim),
            np.where(steps % 2, -1.0, 1.0),
            pair,
            first,
            first + 0.1 * other,
            -first,
            0.5**steps,
        ]
    )
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def sketch(
    draw: Callable[..., Any],
    *,
    dims: Sequence[int] = (4, 32),
    kurtosis: float = 25.0,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    r"""Test that a sketch keeps inner products on average: ``E S^T S = I``.

    .. math:: \mathrm{E}\, \langle S x, S y \rangle = \langle x, y \rangle

    Parameters
    ----------
    draw : callable
        ``draw(x, rng)`` sketches the rows of x, (n, d) to (n, m), with one S for all rows.
    dims : sequence of int, optional
        d to try. Default 4 and 32.
    kurtosis : float, optional
        Of an inner product; for a sketch into m buckets it is m. Default 25.
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
    Tried at vectors with one and two nonzeros, equal and alternating coordinates, two nearly
    parallel and two opposite ones, and one of decaying coordinates.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import batteries
    >>> def gaussian(x, rng):
    ...     return x @ rng.standard_normal((x.shape[-1], 8)) / np.sqrt(8)
    >>> batteries.sketch(gaussian).passed
    True
    """
    arity_of(draw, (2,), "(x, rng) -> (n, m)")
    generator = as_generator(rng)
    share = false_alarm / max(1, len(dims))

    def check(dim: int) -> Check:
        def compare() -> Evidence:
            x = _directions(dim, generator)

            def gram(rng: np.random.Generator) -> Floats:
                made = on_host(draw(x.copy(), rng))
                return np.asarray(made @ made.T)

            options: dict[str, Any] = {"num_draws": num_draws, "false_alarm": share}
            return assert_estimator(gram, x @ x.T, kurtosis=kurtosis, rng=generator, **options)

        return f"d = {dim}", "inner products are kept on average", compare

    return run(title_of("sketch", draw), [check(dim) for dim in dims], false_alarm, on_fail)


def quantizer(
    draw: Callable[..., Any],
    *,
    dims: Sequence[int] = (8, 64, 128),
    kurtosis: float = 25.0,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    r"""Test that inner products with quantized vectors are unbiased.

    .. math:: \mathrm{E}\, \langle q, \hat k \rangle = \langle q, k \rangle

    Parameters
    ----------
    draw : callable
        ``draw(keys, rng)`` quantizes and restores the rows of keys, (n, d) to (n, d); or
        ``draw(queries, keys, rng)`` estimates the n inner products of matching rows.
    dims : sequence of int, optional
        d to try. Default 8, 64 and 128: wrong constants show at small d.
    kurtosis : float, optional
        Of an inner product. Default 25.
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
    The rows "scale" average ``<k, k^> / |k|^2`` over 256 random directions, which leaves little
    noise: with one-bit keys and d = m = 8 a factor 0.5 % off is seen. The rows "products" try
    directions as :func:`sketch`, short keys, and queries along, across and beside them.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import SignFeatures
    >>> from linattn.testing import batteries
    >>> def dots(query, key, rng):
    ...     phi = SignFeatures(query.shape[-1], rng=rng)
    ...     log, signs = phi.key_features(key)
    ...     return np.sum(phi.query_features(query).values * signs * np.exp(log), axis=-1)
    >>> batteries.quantizer(dots, dims=[8], num_draws=1500).passed
    True
    """
    arity = arity_of(draw, (2, 3), "(keys, rng) -> (n, d) or (queries, keys, rng) -> (n,)")
    generator = as_generator(rng)
    share = false_alarm / (2 * max(1, len(dims)))
    options: dict[str, Any] = {"num_draws": num_draws, "false_alarm": share}

    def dots(query: Floats, key: Floats, rng: np.random.Generator) -> Floats:
        if arity == 3:
            return on_host(draw(query.copy(), key.copy(), rng))
        return np.asarray(np.sum(query * on_host(draw(key.copy(), rng)), axis=-1))

    def scale(dim: int) -> Evidence:
        key = generator.standard_normal((NUM_KEYS, dim))
        squares = np.sum(key**2, axis=-1)

        def average(rng: np.random.Generator) -> float:
            return float(np.mean(dots(key, key, rng) / squares))

        return assert_estimator(average, 1.0, kurtosis=kurtosis, rng=generator, **options)

    def products(dim: int) -> Evidence:
        key = _directions(dim, generator)
        across = np.roll(key, 1, axis=0)
        query = np.concatenate([key, across, key])
        sizes = np.concatenate([np.ones(2 * len(key)), np.full(len(key), 1e-3)])
        key = np.tile(key, (3, 1))
        want = np.sum(query * key, axis=-1)

        def relative(rng: np.random.Generator) -> Floats:
            return np.asarray(dots(query, sizes[:, None] * key, rng) / sizes)

        return assert_estimator(relative, want, kurtosis=kurtosis, rng=generator, **options)

    def checks() -> Iterator[Check]:
        for dim in dims:
            yield f"scale, d = {dim}", "no common factor", partial(scale, dim)
            yield f"products, d = {dim}", "inner products", partial(products, dim)

    return run(title_of("quantizer", draw), list(checks()), false_alarm, on_fail)


def normalized(
    draw: Callable[..., Any],
    kernel: Callable[[Floats, Floats], Any],
    *,
    dim: int = 4,
    kurtosis: float = 25.0,
    num_draws: int = 4000,
    false_alarm: float = 1e-9,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BatteryReport:
    r"""Test positive features up to a factor of each row: they are normalized later.

    .. math::
        \mathrm{E}\, \frac{\phi_A(x) \cdot \psi_A(y_j) / K(x, y_j)
        - \phi_A(x) \cdot \psi_A(y_0) / K(x, y_0)}
        {\sum_l \phi_B(x) \cdot \psi_B(y_l) / K(x, y_l)} = 0

    Parameters
    ----------
    draw : callable
        ``draw(x, y, rng)`` returns the features of x, (n, m), and of y, (s, m), of one draw. A
        factor of each row of x, and one of all rows of y, may depend on the draw in any way:
        a shift by the largest exponent, for example.
    kernel : callable
        ``kernel(x, y)`` of (n, d) and (s, d), (n, s): what products of features estimate.
    dim : int, optional
        d. Default 4.
    kurtosis : float, optional
        Of a quotient. Default 25.
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
    A and B are the first and the second half of the columns. They must be independent given the
    inputs, as those of two orthogonal blocks are; then the mean is exactly 0, because the factor
    cancels inside the quotient and the halves separate outside of it. Reorder the columns where a
    row of the projection makes one column in each half.
    """
    arity_of(draw, (3,), "(x, y, rng) -> features (n, m), (s, m)")
    generator = as_generator(rng)
    directions = _directions(dim, generator)
    x = 0.4 * directions[[1, 4]]
    # Of several lengths: a factor of each key must not pass.
    y = np.array(KEY_NORMS)[:, None] * np.concatenate([directions[[0, 1, 4, 6]], -directions[1:2]])
    K = on_host(kernel(x, y))

    def quotients(rng: np.random.Generator) -> Floats:
        phi, psi = (on_host(features) for features in draw(x.copy(), y.copy(), rng))
        half = phi.shape[-1] // 2
        first, second = (
            phi[:, part] @ psi[:, part].T / K for part in (slice(half), slice(half, None))
        )
        if not np.all(second > 0):
            raise UntestableError("features must be positive: sums that are divided by may cancel")
        return np.asarray((first[:, 1:] - first[:, :1]) / np.mean(second, axis=-1, keepdims=True))

    def compare() -> Evidence:
        options: dict[str, Any] = {"num_draws": num_draws, "false_alarm": false_alarm}
        want = np.zeros((len(x), len(y) - 1))
        return assert_estimator(quotients, want, kurtosis=kurtosis, rng=generator, **options)

    check = ("ratios", "products are the kernel but for a factor of each row", compare)
    return run(title_of("normalized", draw), [check], false_alarm, on_fail)
