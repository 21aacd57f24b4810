"""Search for clusters of one head in one rectangle: how many there are, and how many are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from linattn.automatic._costs import (
    MAX_PROMISED,
    MIN_HELD_OUT,
    SAMPLED_KEYS,
    Work,
    cost_of,
    exact_pairs,
    fit_work,
    num_rows_of,
    read_work,
)
from linattn.automatic._curves import ErrorCurve
from linattn.automatic._fit import Clusters
from linattn.typing import Problem

LEVELS = (*range(5), *range(6, 25, 2), *range(28, 49, 4), *range(56, 81, 8), 96, 112, 128)
"""Numbers of exact clusters to choose from: at most half of the clusters. From 12 on each is larger
than the one before it by a fifth at most."""

MARGIN = 1.25
"""Rows that judge a head, over the rows that a trial says to be enough. With half of it calls cost
1.9 to 2.1, with twice of it 1.2 to 1.4 (the calls of _costs.py)."""

UNCHECKED = 4
"""Exact clusters without a tolerance. With 2, 4 and 8, median errors of MiniLM's heads are .19, .12
and .07, of Whisper's .12, .07 and .03, at .08, .11 and .17 of the pairs of exact attention, 9,216
tokens."""


class Trial(NamedTuple):
    """Clusters of one head, None if it has no key, and their error curve."""

    num_features: int
    levels: tuple[int, ...]
    clusters: Clusters | None
    curve: ErrorCurve


class Choice(NamedTuple):
    """Clusters of one head in one rectangle, some of them exact for each query.

    Attributes
    ----------
    trial : Trial
    level : int
        Number of the level of exact clusters.
    cost : float
        Cost of attention by them, and of the rows that must judge them; infinite if no level is
        near enough.
    rows : int
        How many rows these are.
    """

    trial: Trial
    level: int
    cost: float = 0.0
    rows: int = 0

    @property
    def num_exact(self) -> int:
        """Number of exact clusters."""
        return self.trial.levels[self.level]

    def work(self, problem: Problem) -> Work:
        """Return the work of attention by them."""
        share = float(self.trial.curve.share[self.level])
        return read_work(problem, self.trial.num_features, share)


def search(
    problem: Problem,
    first: Trial,
    tolerance: float,
    spare: float,
    again: Callable[[int], Trial],
) -> tuple[Choice, Work]:
    """Choose clusters for a head; try another number of them if that promises much.

    ``spare``: the largest cost of another trial, which `again` makes. Also return its work.
    """
    m, found, work = first.num_features, 0, Work()
    best = _cheapest(problem, first, tolerance, m)
    promised = MAX_PROMISED**2 * min(best.cost, exact_pairs(problem))
    while SAMPLED_KEYS * (m := 2 * m) <= problem.key.shape[-2]:
        fit = cost_of(fit_work(problem, m, MIN_HELD_OUT), problem)
        expected = fit + _cheapest(problem, first, tolerance, m).cost
        if fit <= spare and expected < promised:
            found, promised = m, expected
    if found:
        work = fit_work(problem, found, MIN_HELD_OUT)
        other = _cheapest(problem, again(found), tolerance, found)
        best = min(best, other, key=lambda x: x.cost)
    return best, work


def _cheapest(problem: Problem, trial: Trial, tolerance: float, m: int) -> Choice:
    """Return the cheapest level that is near enough, of the clusters of a trial or of m.

    At a given share of exact keys errors fall about with the square root of m.
    """
    curve, S = trial.curve, problem.key.shape[-2]
    likely = (trial.num_features / m) ** 0.5 * curve.likely
    rows = np.zeros(len(likely))
    if curve.floor:
        left = np.maximum(tolerance**2 - likely**2, 1e-9 * tolerance**2)
        rows = np.maximum(MARGIN * curve.floor / left, num_rows_of(problem))
    reading = cost_of(read_work(problem, m, curve.share), problem)
    costs = np.where(likely <= tolerance, reading + rows * S, np.inf)
    level = int(np.argmin(costs))
    return Choice(trial, level, float(costs[level]), int(np.nan_to_num(rows[level])))
