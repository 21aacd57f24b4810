"""Costs of the methods: how many pairs each computes, in units of a pair of exact attention."""

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
"""Landmarks of the first trial up to a number of keys, and the power with which they grow."""

WINDOW = 32
CORESET_BLOCK = 128

MAX_SEARCH = 0.15
"""Largest cost of a first trial, which may be useless, over the cost of exact attention."""

MIN_HELD_OUT, MAX_HELD_OUT = 64, 256
"""Bounds of the number of exact rows of a head, a 32nd of all."""

FIRST_ROWS = 64
"""How many rows judge a head first."""

ROW_LEVEL, MAX_ROWS = 14.8, 1 / 4
"""Number of rows times the squared tolerance, and the largest share of all queries. If outputs have
mean 0, the rule of three bounds the squared error by ``2 log(40) / h`` with h rows. This number
makes it half of the squared tolerance: two trials share .05, and a row may have half of the mean
odds. Other outputs need fewer rows."""

VAIN = 1.4
"""Measured time of a useless search over the counted time of its fits."""

CHOSEN_SIZE = 0.6
"""Mean size of chosen clusters over the mean size of all: queries choose small ones."""

MAX_PROMISED = 0.75
"""Expected cost over exact attention, up to which a head is judged by all of its rows."""

MIN_SHARED = 512
"""Number of clusters from which runs of queries choose together."""

SHARED_VISIT = 0.3
"""Time of a query's visit to a cluster in a run of queries, over the time of a single visit."""

SAMPLED_KEYS, CLUSTER_PASSES = 16, 2
"""Keys per landmark in a fit, and how many passes over all landmarks they take."""


class Work(NamedTuple):
    """Counts of pairs, of two tokens or of a token and a column, by kind.

    Attributes
    ----------
    exact : float
        Exact pairs, in blocks of queries by blocks of keys.
    features : float
        Pairs of a query or key with a landmark, a probe or an entry.
    near : float
        Exact pairs in a window.
    prefixes : float
        Pairs of a query with a landmark, where each block of a window sums the far keys.
    gathered : float
        Exact pairs after gathering queries and keys by cluster.
    chosen : float
        Pairs of a query with a cluster, if each query chooses alone.
    distances : float
        Pairs of a sampled key with a centroid.
    streamed : float
        Pairs in the blocks and entries of a coreset.
    sampled : float
        Number of clustered keys, not pairs: each takes some time.
    visits : float
        Number of clusters that queries visit, not pairs.
    shared : float
        Pairs of a query with a cluster, if runs of queries choose together.
    heads : float
        Work done once for a head or for a call, not pairs.
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
"""Nanoseconds of each kind on a core of an AMD EPYC: a constant, and a slope in ``d + e``, the
numbers in a key and its value. Only ratios count. Fitted to calls with (d, e) of (4, 1), (16, 1),
(32, 32) and (64, 64), and 64 and 256 landmarks. Selection and gathers cost the same at any width,
so that narrow heads gain less."""


def cost_of(work: Work, problem: Problem) -> float:
    """Return the number of exact pairs that take as long as some work."""
    width = problem.query.shape[-1] + problem.value.shape[-1]
    times = [fixed + more * width for fixed, more in zip(FIXED, OF_WIDTH, strict=True)]
    return float(sum(map(mul, work, times)) / times[0])


def window_of(problem: Problem) -> int:
    """Return the block length of an exact window of full attention; 0 if it can have none."""
    return WINDOW if problem.query.shape[-2] == problem.key.shape[-2] else 0


def choice_rows_of(problem: Problem, m: int) -> int:
    """Return how many queries choose among m clusters together: more than 1 for many clusters."""
    return problem.exact.choice_rows if m >= MIN_SHARED else 1


def num_rows_of(problem: Problem, tolerance: float | None) -> int:
    """Return the number of exact rows that estimate and bound the error of a head."""
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
    """Return the number of landmarks of the first trial, a power of 2."""
    times = max(1.0, problem.key.shape[-2] / FEW_KEYS)
    return MIN_FEATURES << (0 if tolerance is None else round(GROWTH * log2(times)))


def fit_work(problem: Problem, m: int, num_rows: int) -> Work:
    """Return the work of fitting m landmarks and judging them by some exact rows."""
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
    """Return the work of attention with m landmarks, a share of exact keys, and a window."""
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
    """Return the block length of a coreset of m entries: shorter blocks cost more reductions."""
    return max(CORESET_BLOCK, m)


def coreset_work(problem: Problem, m: int) -> Work:
    """Return the work of a coreset: queries read entries and two blocks; keys are read thrice."""
    L, B = problem.query.shape[-2], coreset_block(m)
    streamed = L * (m + 2 * B) + L / B * 3 * m * (m + B)
    return Work(streamed=streamed, sampled=L * CORESET_BLOCK / B)


def may_search(problem: Problem, first: Work, tolerance: float | None) -> bool:
    """Whether a first trial may be made; with a tolerance it must be cheap enough to be useless."""
    most = 1.0 if tolerance is None else MAX_SEARCH
    return cost_of(first, problem) <= most * exact_pairs(problem)


def may_be_in_vain(problem: Problem, m: int) -> bool:
    """Whether a useless trial of m landmarks, judged by few rows, is cheap enough."""
    first = fit_work(problem, m, FIRST_ROWS)
    return VAIN * cost_of(first, problem) <= MAX_SEARCH * exact_pairs(problem)
