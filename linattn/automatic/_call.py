"""One call: each head by the clusters that it needs, judged by exact rows, or exactly.

Trials of a head say how many clusters it needs. Fresh rows are then computed exactly, and by these
clusters. If both agree, all other rows are computed by clusters, else exactly. So useless work is
that of trials, and of clusters for the fresh rows: no more is taken on than MAX_VAIN allows.
"""

from __future__ import annotations

from functools import partial
from math import ceil, log
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.automatic._costs import (
    CALLS,
    MAX_PROMISED,
    MAX_VAIN,
    MIN_FEATURES,
    MIN_HELD_OUT,
    Work,
    causal_rows_work,
    cost_of,
    exact_pairs,
    fit_work,
    num_rows_of,
    read_work,
)
from linattn.automatic._curves import PROBABILITY, ErrorCurve, error_curve
from linattn.automatic._fit import Clusters
from linattn.automatic._heads import Given, rows_of
from linattn.automatic._rectangles import Choices, attend, rectangles_of
from linattn.automatic._report import HeadRecord
from linattn.automatic._search import (
    LEVELS,
    MARGIN,
    UNCHECKED,
    Choice,
    Trial,
    search,
)
from linattn.automatic._tokens import HostTokens, Rectangle, Rows, Total
from linattn.typing import Array, Problem

Floats = NDArray[Any]

LEVELS_NEAR = 3
"""How many levels on both sides of the planned one are judged too. Of more exact ones each fourth
is, so that few rows with large errors need not make a head exact. With 1 and with 6 calls cost
1.01 and 1.00 (the calls of _costs.py)."""

MAX_UNIT = 4.0
"""Largest squared exact row of causal attention in a bound, over the median of all. The first rows
see few keys and may be by far the largest. How many of them are drawn is chance, and must not make
a head seem accurate."""


class _Found(NamedTuple):
    """What was found for one head.

    Attributes
    ----------
    choices : dict
        Clusters by rectangles; empty for exact attention.
    record : HeadRecord
    places : ndarray of int, (h,)
        Rows that were computed exactly.
    exact : array, (h, e), or None
        Their outputs.
    """

    choices: Choices
    record: HeadRecord
    places: NDArray[np.intp] = np.zeros(0, np.intp)
    exact: Array | None = None


class Call:
    """Search for the clusters of each head, and attend by them.

    Parameters
    ----------
    given : Given
        Arguments of the call.
    """

    def __init__(self, given: Given) -> None:
        self._given, self._wide = given, given.with_bias_in_keys()
        problem = self._problem = self._wide.problem
        L, S = (int(x.shape[-2]) for x in (problem.query, problem.key))
        self._is_causal, self._length, self._row = problem.sees.is_causal, L, float(S)
        self._num_rows = num_rows_of(problem)
        if self._is_causal:
            self._row = S / 2
        elif given.tolerance is not None:
            self._num_rows = min(self._num_rows, MIN_HELD_OUT)
        self._exact_cost = exact_pairs(problem)
        self._spare = MAX_VAIN * given.num_heads * self._exact_cost
        self._rectangles = rectangles_of(self._wide, self._num_rows)
        rows = causal_rows_work(self._num_rows, S) if self._is_causal else Work()
        self._first = rows.plus(*(self._first_work(*x) for x in self._rectangles.items()))

    def _first_work(self, where: Rectangle, problem: Problem) -> Work:
        """Return the work of the first trial of a head in a rectangle."""
        num_rows = self._num_rows * (where.last - where.first) // self._length
        return fit_work(problem, MIN_FEATURES, num_rows)

    def is_worth_a_search(self) -> bool:
        """Whether clusters may be tried; with a tolerance a useless trial must be cheap enough."""
        if not self._rectangles or (self._is_causal and self._given.tolerance is None):
            return False
        if self._given.tolerance is not None:
            tried = cost_of(self._first, self._problem) <= self._spare
            return bool(tried) and (not self._is_causal or self._may_gain(self._given.tolerance))
        read = read_work(self._problem, MIN_FEATURES, UNCHECKED / MIN_FEATURES)
        return bool(cost_of(self._first.plus(read), self._problem) <= self._exact_cost)

    def _may_gain(self, tolerance: float) -> bool:
        """Whether a causal head may be cheaper by clusters that choose nothing.

        With the rows that values without a mean need, which are useless to the output.
        """
        least = Trial(MIN_FEATURES, (0,), None, ErrorCurve(*np.zeros((4, 1))))
        choices = dict.fromkeys(self._rectangles, Choice(least, 0))
        num_rows = min(self._length, ceil(4 * MARGIN * -log(1 - PROBABILITY) / tolerance**2))
        works = self._first, *self._judging(choices, num_rows), self._read(choices)
        most = MAX_PROMISED * (1 + MAX_VAIN) * self._exact_cost
        return bool(cost_of(Work().plus(*works), self._problem) <= most)

    def attend(self) -> tuple[Array, list[HeadRecord]]:
        """Attend to all heads; return a record for each."""
        given, wide = self._given, self._wide
        self._tokens = HostTokens(wide.problem, given.key_mask, given.generator)
        self._tokens.has_outliers = not self._is_causal and given.tolerance is not None
        found = [self._head(number) for number in range(given.num_heads)]
        near = [head for head, x in enumerate(found) if x.choices]
        none = [head for head, x in enumerate(found) if not x.choices and x.exact is None]
        records = [x.record for x in found]
        if len(none) == len(found):
            return given.exact(), records
        outputs: dict[int, Array] = {}
        if near:
            choices = [found[head].choices for head in near]
            output = attend(wide.only(near), choices, slice(0, self._length))
            outputs |= {head: output[i, ...] for i, head in enumerate(near)}
        if none:
            output = given.only(none).exact()
            outputs |= {head: output[i, ...] for i, head in enumerate(none)}
        for head, x in enumerate(found):
            if x.exact is not None:
                outputs[head] = self._with_exact_rows(head, x, outputs.get(head))
        whole = given.problem.xp.stack([outputs[head] for head in range(len(found))], axis=0)
        shape = (*given.problem.lead, *whole.shape[-2:])
        return given.problem.xp.reshape(whole, shape), records

    def _with_exact_rows(self, head: int, found: _Found, output: Array | None) -> Array:
        """Put the exact rows of a head into its output; without one all others are exact too."""
        xp, index = self._given.problem.xp, np.arange(self._length)
        if output is None:
            remaining = np.setdiff1d(index, found.places)
            output = self._given.only([head]).exact(remaining)[0, ...]
            index[remaining] = np.arange(len(remaining))
        index[found.places] = output.shape[0] + np.arange(len(found.places))
        return rows_of(xp, xp.concat([output, found.exact], axis=0), index)

    def _head(self, number: int) -> _Found:
        """Search for the clusters of a head, and judge them by fresh rows."""
        given, work, index = self._given, self._first, self._given.unravel(number)
        if given.tolerance is not None and cost_of(work, self._problem) > self._spare:
            return _Found({}, HeadRecord.exact(self._problem))
        rows, total = self._tokens.rows(index, self._num_rows), None
        if self._is_causal:
            total = self._total(rows, *self._exact(number, rows.places)[1:])
        trials = {x: self._trial(index, rows, total, x, MIN_FEATURES) for x in self._rectangles}
        if given.tolerance is None:
            ((where, trial),) = trials.items()
            # Or fewer that are as near.
            most = trial.curve.error[np.searchsorted(trial.levels[:-1], UNCHECKED)] + 1e-6
            choice = Choice(trial, int(np.argmax(~(trial.curve.error > most))))
            error, bound = (float(x[choice.level]) for x in (trial.curve.error, trial.curve.bound))
            if not error < np.inf:
                record = HeadRecord.exact(self._problem)
                return _Found({}, record._replace(work=work.plus(record.work)))
            work = work.plus(choice.work(self._problem))
            record = HeadRecord(trial.num_features, choice.num_exact, error, bound, work)
            return _Found({where: choice}, record)
        self._spend(work)
        choices, num_rows, more = self._choose(index, rows, total, trials)
        vain, judged = self._judging(choices, num_rows)
        cost = cost_of(judged.plus(vain, self._read(choices)), self._problem)
        promised = choices and cost <= MAX_PROMISED * self._exact_cost
        if promised and cost_of(vain, self._problem) <= self._spare:
            return self._judged(number, choices, num_rows, work.plus(more))
        curves = [trial.curve for trial in trials.values()]
        error = float(np.linalg.norm([x.error[-1] for x in curves]))
        bound = float(np.linalg.norm([x.bound[-1] for x in curves]))
        work = work.plus(more, Work(exact=self._exact_cost))
        return _Found({}, HeadRecord(0, 0, error, bound, work))

    def _judging(self, choices: Choices, num_rows: int) -> tuple[Work, Work]:
        """Return the work that is useless if rows judge a head in vain, and that of exact rows."""
        if self._is_causal:
            # Rows with gaps between them are of no use to the output.
            rows = (causal_rows_work(num_rows, self._length, n) for n in (1, 1 + len(choices)))
            read = [x.work(self._rectangles[where]) for where, x in choices.items()]
            return Work().plus(*read).times(num_rows / self._length).plus(*rows), Work()
        pairs = num_rows * self._row
        vain = Work(judged=pairs, exact=-pairs)
        return vain, Work(exact=pairs + len(self._tokens.outliers) * self._row)

    def _judged(self, number: int, choices: Choices, num_rows: int, work: Work) -> _Found:
        """Judge clusters by fresh rows."""
        given, index = self._given, self._given.unravel(number)
        assert given.tolerance is not None
        rows = self._tokens.rows(index, num_rows)
        places, first = np.unique(rows.places, return_index=True)
        if self._is_causal:
            exact, judged_by, _ = self._exact(number, rows.places)
            inverse = np.searchsorted(places, rows.places)
            near = _host(attend(self._wide.only([number]), [choices], places)[0, ...])[inverse]
            error, bound = self._judge(rows, near, judged_by)
        else:
            ((where, choice),) = choices.items()
            choice, output = self._with_judged_level(index, rows, where, choice)
            choices, exact = {where: choice}, self._like_output(output, first)
            if exact is not None and len(outliers := self._tokens.outliers):
                places, also = np.append(places, outliers), self._exact(number, outliers)[0]
                exact = given.problem.xp.concat([exact, also], axis=0)
            curve = choice.trial.curve
            error, bound = float(curve.error[choice.level]), float(curve.bound[choice.level])
        vain, judged = self._judging(choices, num_rows)
        work = work.plus(self._spend(vain))
        if not bound <= given.tolerance:
            record = HeadRecord(0, 0, error, bound, work.plus(Work(exact=self._exact_cost)))
            return _Found({}, record, places, exact)
        rest = judged.plus(self._read(choices))
        self._spare += self._exact_cost - cost_of(rest, self._problem)
        sizes = [(x.trial.num_features, x.num_exact) for x in choices.values()]
        m, count = (max(x) for x in zip(*sizes, strict=True))
        record = HeadRecord(m, count, error, bound, work.plus(rest))
        # Which rows are drawn depends on later tokens, so that earlier ones must not tell.
        return _Found(choices, record, *(() if self._is_causal else (places, exact)))

    def _with_judged_level(
        self, index: tuple[int, ...], rows: Rows, where: Rectangle, choice: Choice
    ) -> tuple[Choice, Floats | None]:
        """Judge levels near the chosen one, from the most exact down to the first that fails.

        So all are judged at the probability of one. Return the cheapest, or the most exact one if
        it fails, and the exact outputs of the rows.
        """
        levels, stop = choice.trial.levels, choice.level + LEVELS_NEAR + 1
        levels = levels[max(0, choice.level - LEVELS_NEAR) : stop] + levels[stop::4]
        head = self._tokens.head(index, rows, where)
        curve = error_curve(head, choice.trial.clusters, self._given.scale, levels)
        trial = choice.trial._replace(levels=levels, curve=curve)
        fails = np.flatnonzero(~(curve.bound <= np.asarray(self._given.tolerance)))
        level = min(int(fails[-1]) + 1 if len(fails) else 0, len(levels) - 1)
        ways = (Choice(trial, i) for i in range(level, len(levels)))
        best = min(ways, key=lambda x: float(cost_of(x.work(self._problem), self._problem)))
        return best, curve.exact

    def _like_output(self, rows: Floats | None, places: NDArray[np.intp]) -> Array | None:
        """Return rows in the caller's library."""
        problem = self._given.problem
        if rows is None:
            return None
        device = array_api_compat.device(problem.query)
        array = _arrays.device_array(rows[places], problem.xp, problem.dtype, device)
        return problem.xp.astype(array, problem.query.dtype)

    def _exact(self, number: int, places: NDArray[np.intp]) -> tuple[Array, Floats, Floats]:
        """Return exact outputs of ascending rows, each once, and of all on the host with logs."""
        places, inverse = np.unique(places, return_inverse=True)
        exact, log = self._given.only([number]).exact(places, want_log=True)
        return exact[0, ...], _host(exact[0, ...])[inverse], _host(log[0, ...])[inverse]

    def _spend(self, work: Work) -> Work:
        """Spend some of what may be in vain."""
        self._spare -= cost_of(work, self._problem)
        return work

    def _read(self, choices: Choices) -> Work:
        """Return the work of attention of all queries."""
        work = Work(exact=self._exact_cost)
        for where, choice in choices.items():
            problem = self._rectangles[where]
            rest = Work(exact=-exact_pairs(problem), heads=CALLS * self._is_causal)
            work = work.plus(choice.work(problem), rest)
        return work

    def _trial(
        self,
        index: tuple[int, ...],
        rows: Rows,
        total: Total | None,
        where: Rectangle,
        m: int,
    ) -> Trial:
        """Find m clusters of a head in a rectangle, and judge them by the rows in it."""
        head, clusters = self._tokens.head(index, rows, where, total), None
        if len(head.key):
            # Of a square from the queries before its own: an output must not depend on others.
            among = slice(where.start, where.stop) if self._is_causal else slice(None)
            query = self._tokens.queries(index, among)
            with np.errstate(all="ignore"):
                clusters = Clusters.of(head, query, m, self._given.scale, self._given.generator)
        # With an exact cluster no query misses its own key, drawn or not.
        first = head.same_place is not None
        C = 0 if clusters is None else len(clusters.starts)
        levels = tuple(count for count in LEVELS if first <= count and 2 * count <= C) or (0,)
        return Trial(m, levels, clusters, error_curve(head, clusters, self._given.scale, levels))

    def _total(self, rows: Rows, output: Floats, log: Floats) -> Total:
        """Return exact outputs and log normalizers of rows, with limited squares."""
        units = np.vecdot(output, output)
        if rows.weights is not None:
            units = np.minimum(units, MAX_UNIT * np.median(units))
        return Total(output, log, units)

    def _choose(
        self,
        index: tuple[int, ...],
        rows: Rows,
        total: Total | None,
        trials: dict[Rectangle, Trial],
    ) -> tuple[Choices, int, Work]:
        """Choose clusters by rectangles, and the number of rows to judge them; also its work."""
        tolerance, num_rows, work = self._given.tolerance, 0, Work()
        assert tolerance is not None
        targets = [tolerance]
        if self._is_causal and trials:
            assert total is not None
            # At most half of the squared tolerance is for squares, the rest for rows not drawn.
            bounds = np.array([trial.curve.likely[0] for trial in trials.values()])
            sizes = np.array([where.last - where.first for where in trials], float)
            targets = allowed_errors(bounds, sizes, tolerance / 2**0.5).tolist()
            unseen = self._unseen(rows, total.output, total.units)
            _, floor = rows.error_and_bound(0 * total.units, total.units, PROBABILITY, unseen)
            left = tolerance**2 - float(np.sum(np.square(targets)))
            wanted = MARGIN * len(rows.places) * floor**2 / left
            if not wanted < self._length:
                return {}, 0, work
            num_rows = max(int(wanted), self._num_rows)
        choices: Choices = {}
        for (where, first), target in zip(trials.items(), targets, strict=False):
            problem = self._rectangles[where]
            again = partial(self._trial, index, rows, total, where)
            # The other half of what may be in vain is for judging.
            choice, more = search(problem, first, target, self._spare / 2, again)
            work = work.plus(self._spend(more))
            if choice.cost < exact_pairs(problem):
                choices[where], num_rows = choice, max(num_rows, choice.rows)
        return choices, num_rows, work

    def _judge(self, rows: Rows, near: Floats, exact: Floats) -> tuple[float, float]:
        """Return error and bound of rows."""
        squares, units = ((x**2).sum(axis=-1) for x in (near - exact, exact))
        unseen = self._unseen(rows, exact, units)
        error, bound = rows.error_and_bound(squares, units, PROBABILITY, unseen)
        return float(error), float(bound)

    def _unseen(self, rows: Rows, exact: Floats, units: Floats) -> Any:
        """Bound the square of a row that was not drawn."""
        limit = MAX_UNIT * float(np.median(units)) if self._is_causal and len(units) else np.inf
        return min(rows.unseen(exact), limit)


def _host(x: Array) -> Floats:
    return _arrays.to_numpy(x).astype(np.float64)


def allowed_errors(first: Floats, sizes: Floats, tolerance: float) -> Floats:
    """Return the allowed errors of the squares of a head, none above its first error.

    The squared errors sum to the squared tolerance. The time of a square grows with its pairs, and
    about with its error to the power of -2. So the total is smallest if squared errors are
    proportional to size times first error.
    """
    weights = np.minimum(first, 1e6) * sizes
    allowed, more, left = np.zeros(len(first)), np.ones(len(first), bool), tolerance**2
    while more.any():
        squares = left * weights / weights[more].sum()
        met = more & (first**2 <= squares)
        if not met.any():
            return np.where(more, np.sqrt(squares), allowed)
        allowed[met] = first[met]
        left, more = left - float(np.sum(first[met] ** 2)), more & ~met
    return allowed
