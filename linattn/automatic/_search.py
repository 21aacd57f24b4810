"""Choose a method for a head: cluster keys, estimate errors, take the cheapest sufficient one."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from linattn.automatic._costs import (
    MAX_FEATURES,
    MAX_PROMISED,
    MIN_HELD_OUT,
    Work,
    cost_of,
    exact_pairs,
    fit_work,
    num_rows_of,
    read_work,
    rows_limit,
)
from linattn.automatic._curves import ErrorCurve, error_curve
from linattn.automatic._fit import Clusters
from linattn.automatic._tokens import Head, TokensOfHeads
from linattn.typing import Problem

__all__ = ["UNCHECKED", "Choice", "Searcher", "Trial"]

PROBABILITY = 0.95
"""Probability of meeting the tolerance, for each head."""

LEVELS = (*range(5), *range(6, 25, 2), *range(28, 49, 4), *range(56, 81, 8), 96, 112, 128)
"""Numbers of exact clusters to choose from: at most half of the clusters."""

MARGIN = 1.25
"""Assumed ratio of a bound to its error, without the part of rows that nobody drew."""

UNCHECKED = 4
"""Exact clusters without a tolerance."""


class Trial(NamedTuple):
    """Clusters of one head, None if it has no key, and their error curve."""

    num_features: int
    levels: tuple[int, ...]
    clusters: Clusters | None
    curve: ErrorCurve


class Choice(NamedTuple):
    """The method chosen for one head.

    Attributes
    ----------
    trial : Trial
        The last one, for exact attention.
    level : int
        Number of the level of exact clusters; -1 for exact attention.
    work : Work
        All work, the search included.
    """

    trial: Trial
    level: int
    work: Work

    @classmethod
    def untried(cls, problem: Problem) -> Self:
        """Return exact attention without a trial."""
        none = Trial(0, (0,), None, ErrorCurve(*np.zeros((3, 1))))
        return cls(none, -1, Work(exact=exact_pairs(problem)))

    @property
    def num_features(self) -> int:
        """Number of clusters, 0 for exact attention."""
        return self.trial.num_features if self.level >= 0 else 0

    @property
    def num_exact(self) -> int:
        """Number of exact clusters."""
        return self.trial.levels[self.level] if self.level >= 0 else 0


class _Plan(NamedTuple):
    cost: float
    num_features: int
    rows: int


class Searcher:
    """Search for the clusters of each head of a problem.

    Parameters
    ----------
    problem : Problem
        Full attention, without biases.
    scale : float
        s.
    tokens : TokensOfHeads
        Tokens and held-out rows.
    generator : Generator
        Draws keys to cluster.
    probability : float
        Of a bound.
    fixed_rows : int or None
        Rows of a head, if all judgements share them.
    """

    def __init__(
        self,
        problem: Problem,
        scale: float,
        tokens: TokensOfHeads,
        generator: np.random.Generator,
        probability: float = PROBABILITY,
        fixed_rows: int | None = None,
    ) -> None:
        self.problem, self.tokens, self._scale = problem, tokens, scale
        self._generator, self._probability, self._fixed_rows = generator, probability, fixed_rows

    def trial(self, index: tuple[int, ...], m: int, num_rows: int) -> Trial:
        """Find m clusters of a head, and judge them by some rows."""
        head = self.tokens.head(index, num_rows)
        clusters = None
        if len(head.key):
            query = self.tokens.queries(index)
            with np.errstate(all="ignore"):
                clusters = Clusters.of(head, query, m, self._scale, self._generator)
        levels = tuple(count for count in LEVELS if 2 * count <= m)
        return self._judged(Trial(m, levels, clusters, ErrorCurve(*np.zeros((3, 1)))), head)

    def _judged(self, trial: Trial, head: Head) -> Trial:
        args = self._scale, trial.levels, self._probability
        return trial._replace(curve=error_curve(head, trial.clusters, *args))

    def unchecked(self, index: tuple[int, ...], m: int) -> Choice:
        """Take m clusters and few exact ones, whatever their error is."""
        rows = num_rows_of(self.problem)
        trial = self.trial(index, m, rows)
        level = trial.levels.index(UNCHECKED)
        spent = fit_work(self.problem, m, rows)
        return Choice(trial, level, spent.plus(self._read(trial, level)))

    def choose(self, index: tuple[int, ...], tolerance: float, first: Trial) -> Choice:
        """Choose a method within the tolerance."""
        problem, trials = self.problem, [first]
        spent = fit_work(problem, first.num_features, first.curve.rows)
        best = self._plan(first, first.num_features, tolerance)
        m = self._better(first, tolerance, best)
        if m is not None:
            trials.append(self.trial(index, m, self._fixed_rows or MIN_HELD_OUT))
            spent = spent.plus(fit_work(problem, m, trials[-1].curve.rows))
            best = min(best, self._plan(trials[-1], m, tolerance))
        trial = next((trial for trial in trials if trial.num_features == best.num_features), first)
        if best.cost < MAX_PROMISED * exact_pairs(problem):
            head = self.tokens.head(index, best.rows)
            if self._fixed_rows is None and not head.all_rows:
                trial = self._judged(trial, head)
                spent = spent.plus(Work(gathered=float(trial.curve.rows * problem.key.shape[-2])))
            # From the most exact down to the first that fails: all are judged at the probability
            # of one.
            fails = np.flatnonzero(~(trial.curve.bound <= tolerance))
            level = int(fails[-1]) + 1 if len(fails) else 0
            if level < len(trial.levels):
                found = min(range(level, len(trial.levels)), key=lambda i: self._cost(trial, i))
                return Choice(trial, found, spent.plus(self._read(trial, found)))
        return Choice(trial, -1, spent.plus(Work(exact=exact_pairs(problem))))

    def _read(self, trial: Trial, level: int) -> Work:
        return read_work(self.problem, trial.num_features, float(trial.curve.share[level]))

    def _cost(self, trial: Trial, level: int) -> float:
        return cost_of(self._read(trial, level), self.problem)

    def _better(self, trial: Trial, tolerance: float, best: _Plan) -> int | None:
        """Return a number of clusters that is expected to cost much less; None if there is none."""
        found, cost, m = (
            None,
            MAX_PROMISED * min(best.cost, exact_pairs(self.problem)),
            trial.num_features,
        )
        while (m := 2 * m) <= MAX_FEATURES:
            plan = self._plan(trial, m, tolerance)
            if plan.cost < cost:
                found, cost = m, plan.cost
        return found

    def _plan(self, trial: Trial, m: int, tolerance: float) -> _Plan:
        """Return the expected cost of m clusters, from the curve of a trial, and rows to judge."""
        problem, curve = self.problem, trial.curve
        rows, floor = 0, 0.0
        if self._fixed_rows is None:
            # Enough to leave half of the squared tolerance for the error.
            wanted = 2 * curve.rows * (curve.floor / tolerance) ** 2
            rows = int(np.clip(wanted, num_rows_of(problem), rows_limit(problem)))
            floor = curve.floor * (curve.rows / max(rows, 1)) ** 0.5
        allowed = max(tolerance**2 - floor**2, 0) ** 0.5 / MARGIN
        # At a given share of exact keys errors fall about with the square root of m.
        share = _expected_share(curve, allowed * (m / trial.num_features) ** 0.5)
        if share is None:
            return _Plan(np.inf, m, rows)
        work = read_work(problem, m, share).plus(Work(gathered=float(rows * problem.key.shape[-2])))
        if m != trial.num_features:
            work = work.plus(fit_work(problem, m, MIN_HELD_OUT))
        return _Plan(cost_of(work, problem), m, rows)


def _expected_share(curve: ErrorCurve, error: float) -> float | None:
    """Return the share of exact keys that reaches an error, by interpolating logs; None if none."""
    passed = np.flatnonzero(curve.error <= error)
    if not len(passed):
        return None
    i = int(passed[0])
    if i == 0:
        return 0.0
    high, low = np.log(np.maximum(curve.error[i - 1 : i + 1], 1e-300))
    part = (high - np.log(error)) / (high - low) if np.isfinite(high) else 1.0
    return float(curve.share[i - 1] + part * (curve.share[i] - curve.share[i - 1]))
