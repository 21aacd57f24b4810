"""Warnings beside a test that passed: what makes it worth less than it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.testing._means import Floats, moves, worst
from linattn.testing.statistics import at_most_test, score_test

CUT_OFF_VARIANCES = 20.0
"""Where squares are cut off, in variances, when their own variance is not known."""

RATE = 1e-9
"""Probability of a warning where there is no reason for one."""

SAME = 1e-4
"""Relative: results of one seed that differ by more are two results."""


def warn_of_seed(check: str, draw: Callable[[np.random.Generator], Floats]) -> None:
    """Warn if one seed gives two results."""
    first, second = (draw(np.random.default_rng(0)) for _ in range(2))
    if first.shape != second.shape or not np.allclose(first, second, SAME, 0.0, equal_nan=True):
        _warn(
            f"{check}: draw(rng) gives two results for one seed, so that this run cannot be "
            f"repeated; all of its random numbers must come from rng"
        )


def warn_of_variance(check: str, draws: Floats, mean: Floats, variance: Floats) -> None:
    """Warn if draws of this mean contradict a stated variance, or an upper bound of one."""
    variance = np.broadcast_to(variance, mean.shape)
    entries = moves(variance, mean)
    squares = (draws[:, entries] - mean[entries]) ** 2
    stated = variance[entries]
    if not squares.size:
        return
    test = at_most_test(squares, stated, CUT_OFF_VARIANCES * stated, false_alarm_rate=RATE)
    if not test.passed:
        at = worst(-test.log_p)
        _warn(
            f"{check}: these draws contradict variance={stated[at]:.4g}{_where(entries, at)}: they "
            f"have {np.mean(squares, axis=0)[at]:.4g}. The false-alarm rate does not hold; state a "
            f"larger one, or kurtosis= in its place"
        )


def warn_of_dependence(check: str, draws: Floats, mean: Floats, variance: Floats) -> None:
    """Warn if neighbouring draws are correlated; ``variance`` may be an upper bound.

    Products of the deviations of two independent draws have mean 0 and the variance squared.
    """
    variance = np.broadcast_to(variance, mean.shape)
    entries = moves(variance, mean)
    off = (draws[:, entries] - mean[entries]) / np.sqrt(variance[entries])
    # Pairs that share no draw, in both ways to form them.
    for first in (0, 1):
        pairs = off[first:][: 2 * ((len(off) - first) // 2)]
        products = pairs[::2] * pairs[1::2]
        if not products.size:
            continue
        test = score_test(products, 1.0, false_alarm_rate=RATE / 2)
        if not test.passed:
            at = worst(test.score)
            _warn(
                f"{check}: draws depend on each other: neighbours have a correlation of about "
                f"{np.mean(products, axis=0)[at]:.2g}{_where(entries, at)}. The false-alarm rate "
                f"needs independent draws; let each call draw all that it uses"
            )
            return


def _where(entries: NDArray[np.bool_], at: tuple[int, ...]) -> str:
    """Name one of the entries that were tested."""
    index = [int(i) for i in np.argwhere(entries)[at]]
    return f" at entry {index}" if index else ""


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=_arrays.caller_level())
