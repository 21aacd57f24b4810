"""Assertions about the rows that a sampler draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn.sampling import Sampler, Seed, as_generator
from linattn.testing._evidence import Evidence, fail
from linattn.testing.statistics import bernstein_bound, detectable_shift, score_test

__all__ = ["assert_gaussian_rows"]


def assert_gaussian_rows(
    sampler: Callable[..., Any],
    num: int = 8,
    dim: int = 4,
    *,
    num_draws: int = 4000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that a row picked at random from a draw is N(0, I): what unbiased features need.

    .. math::
        \mathrm{E} \cos \omega \cdot \delta = e^{-|\delta|^2 / 2}, \quad
        \mathrm{E} \sin \omega \cdot \delta = 0, \quad
        \mathrm{E} |\omega|^2 = d, \quad \mathrm{E} (|\omega|^2 - d)^2 = 2 d

    Parameters
    ----------
    sampler : callable
        ``sampler(num, dim, rng) -> (num, dim)``. A :class:`linattn.sampling.Sampler` draws all at
        once.
    num, dim : int, optional
        Rows m of a draw, d. Default 8 and 4.
    num_draws : int, optional
        n. Default 4000.
    false_alarm_rate : float, optional
        Of all together. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0.

    Returns
    -------
    Evidence
        ``detectable`` is the relative error of ``E |omega|^2`` that is found with 99 %.

    Raises
    ------
    AssertionError
        Rows are not N(0, I), or not of shape (num, dim).

    Notes
    -----
    delta of length 1 and 2 along the diagonal, the first, the last and a random axis. False-alarm
    rate: rigorous however rows of one draw depend on each other, since the variance of their
    average is at most that of one: Bernstein's bound for cosines and sines, of which an error of
    0.23 is found with the defaults, and the score test for norms. An average over rows is all that
    an unbiased estimate needs; rows of one draw that each have a law of their own (strata) pass.
    """
    check = "assert_gaussian_rows"
    generator = as_generator(rng)
    rows = _draw(check, sampler, num, dim, num_draws, generator)
    axes = np.stack([np.ones(dim), np.eye(dim)[0], np.eye(dim)[-1], generator.normal(size=dim)])
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)
    share = false_alarm_rate / (2 * 2 * len(axes) + 2)
    for length in (1.0, 2.0):
        angles = rows @ (length * axes.T)
        cosine, decay = np.exp(-(length**2) / 2), np.exp(-2 * length**2)
        for name, got, want, variance in (
            ("cos", np.mean(np.cos(angles), axis=(0, 1)), cosine, (1 + decay) / 2 - cosine**2),
            ("sin", np.mean(np.sin(angles), axis=(0, 1)), 0.0, (1 - decay) / 2),
        ):
            allowed = bernstein_bound(variance, 1 + cosine, num_draws, false_alarm_rate=share)
            error = np.abs(got - want)
            if not np.all(error < allowed):
                at = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
                message = (
                    f"mean of {name}(omega . delta) {got[at]:.4f} over {num_draws} draws of {num} "
                    f"rows, want {want:.4f} within {allowed:.4f}, at delta = "
                    f"{np.array2string(length * axes[at], precision=3, threshold=6)}"
                )
                fail(check, message)
    squares = np.sum(rows**2, axis=-1)
    for name, values, mean, variance in (
        ("|omega|^2", squares, dim, 2 * dim),
        ("(|omega|^2 - d)^2", (squares - dim) ** 2, 2 * dim, 8 * dim**2 + 48 * dim),
    ):
        average = np.mean(values, axis=1)
        if not score_test(average - mean, variance, false_alarm_rate=share).passed:
            fail(check, f"mean of {name} {np.mean(average):.4f}, want {mean}")
    detectable = float(
        detectable_shift(2 * dim / dim**2, num_draws, false_alarm_rate=share, num_tests=1)
    )
    detail = f"{num_draws} draws of {num} rows; sees {detectable:.0%} of |omega|^2"
    return Evidence(check, detail, false_alarm_rate, detectable)


def _draw(
    check: str,
    sampler: Callable[..., Any],
    num: int,
    dim: int,
    num_draws: int,
    generator: np.random.Generator,
) -> NDArray[np.float64]:
    if isinstance(sampler, Sampler):
        rows: Any = sampler(num, dim, generator, batch_shape=(num_draws,))
    else:
        rows = np.stack([sampler(num, dim, generator) for _ in range(num_draws)])
    if rows.shape != (num_draws, num, dim):
        fail(check, f"want rows of shape {(num, dim)}, got {rows.shape[1:]}")
    return np.asarray(rows, dtype=np.float64)
