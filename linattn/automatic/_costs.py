"""Pairs that each way to attend works out, and what they cost beside a pair of exact attention."""

from __future__ import annotations

from math import log2, prod
from operator import add, mul
from typing import NamedTuple, Self

from linattn.typing import Problem

__all__ = [
    "CORESET_BLOCK",
    "FIRST_ROWS",
    "MAX_PROMISED",
    "MIN_FEATURES",
    "PROBES",
    "WINDOW",
    "Work",
    "choice_rows_of",
    "coreset_block",
    "coreset_work",
    "cost_of",
    "exact_pairs",
    "first_features",
    "fit_work",
    "may_be_in_vain",
    "may_search",
    "num_rows_of",
    "read_work",
    "window_of",
]

PROBES = 128
MIN_FEATURES, FEW_KEYS, GROWTH = 64, 8192, 2 / 3
"""Landmarks of the first trial, of no more than so many keys; the power with which they grow."""

WINDOW = 32
CORESET_BLOCK = 128

MAX_SEARCH = 0.15
"""Largest cost of a first trial over that of exact attention: what a search in vain may take."""

MIN_HELD_OUT, MAX_HELD_OUT = 64, 256
"""Exact rows of each head: a 32nd of all, within these."""

FIRST_ROWS = 64
"""Rows that judge a head first."""

ROW_LEVEL, MAX_ROWS = 14.8, 1 / 4
"""Rows times the square of the tolerance, and the most rows, of all queries. By the rule of three
so many rows promise half of the squared tolerance where outputs have a mean of 0, with ``2 log(40)
/ h``: two trials share .05, and a row may have half of the odds. Of others fewer are worked out."""

VAIN = 1.4
"""Time of a search in vain, as measured, over that of the work of its fits."""

CHOSEN_SIZE = 0.6
"""Keys of a chosen cluster over those of all in the mean: queries choose small ones."""

MAX_PROMISED = 0.75
"""Cost that a head is to promise, over that of exact attention, to be judged by all of its rows."""

MIN_SHARED = 512
"""Clusters from which queries choose together."""

SHARED_VISIT = 0.3
"""Time of a query's visit to a cluster beside others, over that of one by itself."""

SAMPLED_KEYS, CLUSTER_PASSES = 16, 2
"""Keys of a fit for each landmark, and how often they meet all landmarks there."""


class Work(NamedTuple):
    """Pairs of tokens, or of a token and a column, by kind.

    Attributes
    ----------
    exact : float
        Weighted exactly, blocks of queries by blocks of keys.
    features : float
        Of a query or key and a landmark, a probe or an entry.
    near : float
        Weighted exactly in a window.
    prefixes : float
        Of a query and a landmark, of whose keys the far ones are summed for each block of a window.
    gathered : float
        Weighted exactly after queries and keys have been gathered by cluster.
    chosen : float
        Of a query and a cluster, where queries choose clusters, each for itself: met once more.
    distances : float
        Of a sampled key and a centroid.
    streamed : float
        Of the blocks and entries of a coreset.
    sampled : float
        Keys that are clustered: no pairs, but what is done for each takes time too.
    visits : float
        Of clusters by queries that have chosen them: no pairs either.
    shared : float
        Of a query and a cluster, where queries choose clusters together.
    heads : float
        What is done once for a head, or for all of a call: no pairs either.
    """

    exact: float = 0.0
    features: float = 0.0
    near: float = 0.0
    prefixes: float = 0.0
    gathered: float = 0.0
    chosen: float = 0.0
    distances: float = 0.0
    streamed: float = 0.0
    sampled: float = 0.0
    visits: float = 0.0
    shared: float = 0.0
    heads: float = 0.0

    @property
    def pairs(self) -> float:
        """All pairs."""
        return sum(self) - self.sampled - self.visits - self.heads

    def plus(self, other: Work) -> Self:
        """Return the sum."""
        return type(self)(*map(add, self, other))


FIXED = Work(
    exact=1.0,
    features=1.5,
    near=1.8,
    prefixes=4.0,
    gathered=0.9,
    chosen=4.0,
    distances=0.6,
    streamed=1.1,
    sampled=1500.0,
    visits=30.0,
    shared=0.6,
    heads=1e6,
)
OF_WIDTH = Work(
    exact=0.024,
    features=0.022,
    near=0.043,
    prefixes=0.1,
    gathered=0.042,
    chosen=0.02,
    distances=0.008,
    streamed=0.026,
    sampled=4.0,
    visits=0.6,
    shared=0.003,
    heads=0.0,
)
"""Nanoseconds that one of each kind takes on a core of an AMD EPYC: a fixed number, and so many for
each of ``d + e`` numbers of a key and its value. Only ratios count. From calls with (d, e) of
(4, 1), (16, 1), (32, 32) and (64, 64), 64 and 256 landmarks: selection and gathers cost the same at
any width, so that narrow heads gain less."""


def cost_of(work: Work, problem: Problem) -> float:
    """Pairs of exact attention that take as long as some work."""
    width = problem.query.shape[-1] + problem.value.shape[-1]
    times = [fixed + more * width for fixed, more in zip(FIXED, OF_WIDTH, strict=True)]
    return float(sum(map(mul, work, times)) / times[0])


def window_of(problem: Problem) -> int:
    """Block length that an exact window of full attention may have; 0 where it can have none."""
    return WINDOW if problem.query.shape[-2] == problem.key.shape[-2] else 0


def choice_rows_of(problem: Problem, m: int) -> int:
    """Count the queries that choose some of m clusters together: it pays with many clusters."""
    return problem.exact.choice_rows if m >= MIN_SHARED else 1


def num_rows_of(problem: Problem, tolerance: float | None) -> int:
    """Exact rows of each head from which its error is estimated and bounded."""
    length = int(problem.query.shape[-2])
    rows = max(MIN_HELD_OUT, min(length // 32, MAX_HELD_OUT))
    if tolerance is not None:
        rows = max(rows, int(min(ROW_LEVEL / tolerance**2, MAX_ROWS * length)))
    return min(length, rows)


def exact_pairs(problem: Problem) -> float:
    """Pairs of exact attention."""
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    return L * (L + 1) / 2 if problem.sees.is_causal else float(L * S)


def first_features(problem: Problem, tolerance: float | None) -> int:
    """Landmarks that all heads are tried with, a power of 2; without a tolerance the fewest."""
    times = max(1.0, problem.key.shape[-2] / FEW_KEYS)
    return MIN_FEATURES << (0 if tolerance is None else round(GROWTH * log2(times)))


def fit_work(problem: Problem, m: int, num_rows: int) -> Work:
    """Fitting m landmarks and judging them by some exact rows."""
    S = problem.key.shape[-2]
    sampled = min(S, max(SAMPLED_KEYS * m, 1024))
    return Work(
        exact=float((PROBES + num_rows) * S),
        features=float(S * (m + PROBES) + num_rows * m),
        distances=float(CLUSTER_PASSES * sampled * m),
        sampled=float(sampled),
        heads=1 + 1 / max(1, prod(problem.lead)),
    )


def read_work(problem: Problem, m: int, share: float, window: int) -> Work:
    """Attention by m landmarks, a share of the keys exactly by content, a window; 0 for none."""
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    alone = choice_rows_of(problem, m) == 1
    met = float(L * m) if share else 0.0
    return Work(
        # Without a window keys are where they were judged.
        features=float(L * m + (S * (m + PROBES) if window else 0)),
        near=float(L * 3 * window),
        prefixes=float(L * m) if window else 0.0,
        gathered=share * L * S,
        chosen=met if alone else 0.0,
        visits=share * L * m / CHOSEN_SIZE * (1 if alone else SHARED_VISIT),
        shared=0.0 if alone else met,
    )


def coreset_block(m: int) -> int:
    """Block length of a coreset of m entries: with fewer than m, reductions take the time."""
    return max(CORESET_BLOCK, m)


def coreset_work(problem: Problem, m: int) -> Work:
    """Attention by a coreset: queries read entries and two blocks, entries and keys meet thrice."""
    L, B = problem.query.shape[-2], coreset_block(m)
    streamed = L * (m + 2 * B) + L / B * 3 * m * (m + B)
    return Work(streamed=streamed, sampled=L * CORESET_BLOCK / B)


def may_search(problem: Problem, first: Work, tolerance: float | None) -> bool:
    """Whether a first trial may be made: with a tolerance, even if it were in vain."""
    most = 1.0 if tolerance is None else MAX_SEARCH
    return cost_of(first, problem) <= most * exact_pairs(problem)


def may_be_in_vain(problem: Problem, m: int) -> bool:
    """Whether m landmarks may be tried even if that is in vain: seen by few rows."""
    first = fit_work(problem, m, FIRST_ROWS)
    return VAIN * cost_of(first, problem) <= MAX_SEARCH * exact_pairs(problem)
