"""Costs of the methods: how many pairs each computes, in units of a pair of exact attention."""

from __future__ import annotations

from math import prod
from operator import mul
from typing import Any, NamedTuple, Self

from linattn.typing import Problem

# ``python -m benchmarks.constants`` prints costs with half and with twice of each constant. Where
# a cost is named without an input, it is the geometric mean over calls of MiniLM (two kinds of
# text), Whisper, photographs, colours and heavy tails, 9,216 tokens, on 27 November 2026.

MIN_FEATURES = 64
"""Clusters of the first trial. With 32 or 128 a call costs 1.09 and 1.15 at a tolerance of .05."""

MAX_SEARCH = 0.2
"""Largest cost of a first trial, which may be useless, over the cost of exact attention. It decides
which short sequences are tried, and which squares of causal ones; at 9,216 tokens it does not
count."""

MAX_VAIN = 0.1
"""Cost of all useless work of a call, less what other heads save, over exact attention: what a user
may lose. With half of it calls cost 1.8 to 2.3, since single heads are no longer tried."""

MIN_HELD_OUT, MAX_HELD_OUT = 64, 128
"""Bounds of the number of exact rows of a head, a 32nd of all, if its tolerance needs no more. The
first judges a trial: estimates by 64 rows are off by some 10 %. With at most 256 rows, and half of
them for trials, calls cost 1.06 and 1.11 at tolerances of .05 and .1."""

MAX_PROMISED = 0.85
"""Expected over known cost up to which a head is judged, and its square that up to which other
clusters are tried: gains are mostly smaller than expected. With half of it calls cost 1.17 at a
tolerance of .05."""

SAMPLED_KEYS, DRAWS, LLOYD_STEPS = 12, 8, 2
"""Keys sampled for each cluster, rounds in which the first centroids are drawn from them, and Lloyd
steps. At 256 pairs a query of 2,048, errors of MiniLM, Whisper and photographs are .86 of those of
8, 4 and 3; 16 keys or 3 steps make them .03 smaller. In 4 rounds a tight cluster is drawn twice
and another never. Half and twice of each change the cost of calls by .05 at most."""


ALONE = 16
"""Keys that may be clusters of their own, beside the others: rare queries may read them."""

ROWS = 128
"""Rows of causal attention, with gaps between them, that are computed together: by all keys up to
the last row."""

CALLS = 8.0
"""Time of the calls and copies that a square of causal attention brings, in heads. Without
it calls of 8,192 tokens that took 1.15 of exact attention counted as .91; with it, as 1.2."""

LEAST_LOG = -80.0
"""Smallest log weight that is not clipped: numbers that are not normal take ten times as long."""


class Work(NamedTuple):
    """Counts of pairs, of two tokens or of a token and a column, by kind.

    Attributes
    ----------
    exact : float
        Exact pairs, in blocks of queries by blocks of keys.
    features : float
        Pairs of a query or key with a cluster.
    judged : float
        Exact pairs summed by cluster.
    gathered : float
        Exact pairs after gathering queries and keys by cluster.
    chosen : float
        Pairs of a query with a cluster, if it chooses some.
    distances : float
        Pairs of a sampled key with a centroid.
    sampled : float
        Number of clustered keys, not pairs: each takes some time.
    visits : float
        Number of clusters that queries visit, not pairs.
    heads : float
        Work done once for a head, a rectangle or a call, not pairs.
    """

    exact: float = 0.0
    features: float = 0.0
    judged: float = 0.0
    gathered: float = 0.0
    chosen: float = 0.0
    distances: float = 0.0
    sampled: float = 0.0
    visits: float = 0.0
    heads: float = 0.0

    @property
    def pairs(self) -> float:
        """All pairs."""
        return sum(self) - self.sampled - self.visits - self.heads

    def plus(self, *works: Work) -> Self:
        """Return the sum."""
        return type(self)(*map(sum, zip(self, *works, strict=True)))

    def times(self, factor: float) -> Self:
        """Return a share of the work."""
        return type(self)(*(factor * x for x in self))


TIMES = {
    "exact": (1.0, 0.024),
    "features": (1.5, 0.022),
    "judged": (1.2, 0.029),
    "gathered": (0.9, 0.042),
    "chosen": (4.0, 0.02),
    "distances": (0.6, 0.008),
    "sampled": (800.0, 2.0),
    "visits": (50.0, 1.0),
    "heads": (1e6, 0.0),
}
"""Nanoseconds of each kind of work on a core of an AMD EPYC: a constant, and a slope in ``d + e``,
the numbers in a key and its value. Only ratios count. Fitted to calls with (d, e) of (4, 1),
(16, 1), (32, 32) and (64, 64), and 64 and 256 clusters. Selection and gathers cost the same at any
width, so that narrow heads gain less. A visit counts for a cluster of mean size: queries choose
small ones."""


def cost_of(work: Work, problem: Problem) -> Any:
    """Return the number of exact pairs that take as long as some work."""
    width = problem.query.shape[-1] + problem.value.shape[-1]
    times = {kind: fixed + more * width for kind, (fixed, more) in TIMES.items()}
    return sum(map(mul, work, times.values())) / times["exact"]


def num_rows_of(problem: Problem) -> int:
    """Return the least number of exact rows that estimate the error of a head."""
    length = int(problem.query.shape[-2])
    return min(length, max(MIN_HELD_OUT, min(length // 32, MAX_HELD_OUT)))


def exact_pairs(problem: Problem) -> float:
    """Pairs of exact attention."""
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    return L * (L + 1) / 2 if problem.sees.is_causal else float(L * S)


def fit_work(problem: Problem, m: int, num_rows: int) -> Work:
    """Return the work of finding m clusters and judging them by some exact rows."""
    (S, d), e = problem.key.shape[-2:], problem.value.shape[-1]
    sampled = min(S, SAMPLED_KEYS * m)
    return Work(
        judged=float(num_rows * S),
        # Keys are also sorted, and distances taken along coordinates.
        features=float(S * (m + 2 * d + e) + num_rows * m),
        distances=float((LLOYD_STEPS + 1) * sampled * m),
        sampled=float(sampled),
        heads=1 + 1 / max(1, prod(problem.lead)),
    )


def read_work(problem: Problem, m: int, share: Any) -> Work:
    """Return the work of attention with m clusters and a share of exact keys, or shares."""
    L, S = problem.query.shape[-2], problem.key.shape[-2]
    m += ALONE
    return Work(
        features=float(L * m),
        gathered=share * L * S,
        chosen=(share > 0) * float(L * m),
        visits=share * L * m,
        heads=1.0,
    )


def causal_rows_work(num_rows: float, keys: int, parts: int = 1) -> Work:
    """Return the work of some exact rows of causal attention, in equal parts of a sequence."""
    together = min(ROWS, num_rows / parts)
    return Work(judged=(num_rows / parts + together) * keys / 2, heads=CALLS / 2 * parts)


def may_be_in_vain(problem: Problem, num_rows: int = MIN_HELD_OUT) -> bool:
    """Whether a useless first trial, judged by few rows, is cheap enough."""
    first = fit_work(problem, MIN_FEATURES, num_rows)
    return bool(cost_of(first, problem) <= MAX_SEARCH * exact_pairs(problem))
