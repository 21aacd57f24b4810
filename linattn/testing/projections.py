"""Assertions about the rows that a sampler draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from linattn import _arrays, _checks
from linattn.sampling import Sampler, Seed, as_generator
from linattn.testing._draws import Floats, standard_pairs
from linattn.testing._evidence import Evidence, check_function, fail
from linattn.testing.statistics import betting_test, detectable_shift, score_test

__all__ = ["assert_gaussian_rows"]


@_arrays.on_array_device
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
        ``sampler(num, dim, rng) -> (num, dim)``. A :class:`linattn.sampling.Sampler` draws all in
        one call.
    num, dim : int, optional
        Rows m of a draw, d. Default 8 and 4.
    num_draws : int, optional
        n. Default 4000.
    false_alarm_rate : float, optional
        Of all jointly. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0.

    Returns
    -------
    Evidence
        ``detectable`` is the larger of two: the relative error of ``E |omega|^2`` that is found
        with 99 %; and how far a mean of ``cos(omega . delta)`` or ``sin(omega . delta)`` would have
        to move for these very draws to fail, at the delta where it is largest. A small mean of
        ``omega`` along a unit vector moves its sine by 0.61 times as much.

    Raises
    ------
    AssertionError
        Rows are not N(0, I), or not of shape (num, dim).
    TypeError, ValueError
        Numbers that are not whole and positive, a rate outside (0, 1).

    Notes
    -----
    delta of length 1 and 2 along the diagonal, the diagonals of the first 2, 4, 8, ... coordinates,
    the first, the last and a random axis. False-alarm rate: rigorous however rows of one draw
    depend on each other. Cosines and sines, averaged over a draw, are bounded, and their spread is
    taken as it comes (:func:`linattn.testing.statistics.betting_test`): the more rows, the smaller
    the errors that are found. Norms are tested with the variance of one row, which that of an
    average never exceeds. An average over rows is all that an unbiased estimate needs; rows of one
    draw that each have a distribution of their own (strata) pass.

    Examples
    --------
    >>> from linattn.testing import assert_gaussian_rows
    >>> evidence = assert_gaussian_rows(lambda num, dim, rng: rng.standard_normal((num, dim)))
    >>> evidence.check
    'assert_gaussian_rows'
    """
    check = "assert_gaussian_rows"
    check_function("sampler", sampler, "(num, dim, rng) -> (num, dim)")
    for name, number in (("num", num), ("dim", dim), ("num_draws", num_draws)):
        _checks.check_positive_int(name, number)
    generator = as_generator(rng)
    rows = _draw(check, sampler, num, dim, num_draws, generator)
    x, _ = standard_pairs(dim, 1.0, int(generator.integers(2**32)))
    axes = np.unique(np.round(x / np.linalg.norm(x, axis=-1, keepdims=True), 12), axis=0)
    share = false_alarm_rate / 3
    named, deviations, bounds = [], [], []
    for length in (1.0, 2.0):
        angles = rows @ (length * axes.T)
        decay = np.exp(-(length**2) / 2)
        for name, means, want in (
            ("cos", np.mean(np.cos(angles), axis=1), decay),
            ("sin", np.mean(np.sin(angles), axis=1), 0.0),
        ):
            named += [(name, length * axis, want) for axis in axes]
            deviations.append(means - want)
            bounds.append(np.full(len(axes), 1 + want))
    moves, bound = np.concatenate(deviations, axis=1), np.concatenate(bounds)
    test = betting_test(moves, bound, false_alarm_rate=share)
    if not test.passed:
        at = int(np.argmax(np.where(np.isnan(test.score), np.inf, test.score)))
        name, delta, want = named[at]
        error = float(np.std(moves[:, at])) / np.sqrt(num_draws)
        message = (
            f"mean of {name}(omega . delta) over {num_draws} draws of {num} rows is "
            f"{want + np.mean(moves[:, at]):.4f}, of N(0, I) it is {want:.4f}: "
            f"{abs(np.mean(moves[:, at])) / error:.1f} standard errors away, one being "
            f"{error:.2g}, as measured. Rows of N(0, I) fail in at most {false_alarm_rate:.1g} "
            f"of all runs. delta = {np.array2string(delta, precision=3, threshold=6)}"
        )
        fail(check, message)
    _check_norms(check, rows, false_alarm_rate)
    in_norms = float(detectable_shift(2 / dim, num_draws, false_alarm_rate=share))
    in_means = _smallest_shift(moves, bound, share)
    detail = (
        f"{num_draws} draws of {num} rows; sees {in_means:.3f} of a mean of cos or sin, "
        f"{in_norms:.0%} of |omega|^2"
    )
    return Evidence(check, detail, false_alarm_rate, max(in_norms, in_means))


def _check_norms(check: str, rows: Floats, false_alarm_rate: float) -> None:
    """Test mean and variance of ``|omega|^2``, each at a third of the false-alarm rate."""
    num_draws, num, dim = rows.shape
    squares = np.sum(rows**2, axis=-1)
    for name, values, mean, variance in (
        ("|omega|^2", squares, dim, 2 * dim),
        ("(|omega|^2 - d)^2", (squares - dim) ** 2, 2 * dim, 8 * dim**2 + 48 * dim),
    ):
        average = np.mean(values, axis=1)
        if not score_test(average - mean, variance, false_alarm_rate=false_alarm_rate / 3).passed:
            message = (
                f"mean of {name} over {num_draws} draws of {num} rows is {np.mean(average):.4f}, "
                f"of N(0, I) it is {mean}. Rows of N(0, I) fail in at most {false_alarm_rate:.1g} "
                f"of all runs"
            )
            fail(check, message)


def _smallest_shift(moves: Floats, bound: Floats, rate: float) -> float:
    """How far every mean may move, to either side, before these draws fail by that mean alone."""
    low, high = 0.0, 1.0
    for _ in range(12):
        shift = (low + high) / 2
        # A mean nearer to the bounds: what is moved out of them is cut, which only hides it.
        moved = [np.clip(moves + sign * shift, -bound, bound) for sign in (1, -1)]
        tests = [betting_test(means, bound, false_alarm_rate=rate) for means in moved]
        seen = all(np.all(test.score >= test.threshold) for test in tests)
        low, high = (low, shift) if seen else (shift, high)
    return high


def _draw(
    check: str,
    sampler: Callable[..., Any],
    num: int,
    dim: int,
    num_draws: int,
    generator: np.random.Generator,
) -> Floats:
    if isinstance(sampler, Sampler):
        rows: Any = sampler(num, dim, generator, batch_shape=(num_draws,))
    else:
        rows = np.stack([sampler(num, dim, generator) for _ in range(num_draws)])
    if rows.shape != (num_draws, num, dim):
        fail(check, f"want rows of shape {(num, dim)}, got {rows.shape[1:]}")
    return np.asarray(rows, dtype=np.float64)
