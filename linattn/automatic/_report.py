"""The report of :func:`linattn.attention`: methods, errors and costs."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from linattn.automatic._costs import Work, exact_pairs
from linattn.typing import Problem


class AttentionReport(NamedTuple):
    """Methods, errors and costs of one call of :func:`linattn.attention`.

    Attributes
    ----------
    method : str
        "landmarks" if any head has clusters, else "exact".
    num_features : int or None
        Largest number of clusters of any head; None when exact.
    exact_window : None
        No head has a window; the name is from versions in which heads had one.
    error : ndarray, (...)
        Estimated relative output error of each head, from held-out exact rows; 0 when exact.
    cost : float
        Pairs computed, fitting and exact rows included, over the pairs of exact attention.
    bound : ndarray, (...)
        Upper bound of the error of each head; the tolerance is compared with it.
    head_methods : ndarray of str, (...)
        "landmarks" or "exact", for each head.
    head_features : ndarray of int, (...)
        Clusters of each head; 0 when exact.
    head_clusters : ndarray of int, (...)
        Clusters whose keys each query of a head attends to exactly; 0 for none.
    head_pairs : ndarray, (...)
        Pairs computed for each head, fitting and exact rows included.
    head_windows : ndarray of int, (...)
        0 for each head, as `exact_window`.

    Examples
    --------
    >>> import linattn
    >>> query, key, value = linattn.datasets.pretrained_qkv()
    >>> out, report = linattn.attention(query, key, value, return_report=True)
    >>> report
    AttentionReport(24 of 24 heads exact, error 0 <= bound 0, cost 1, method 'exact')
    """

    method: str
    num_features: int | None
    exact_window: None
    error: NDArray[np.float64]
    cost: float
    bound: NDArray[np.float64]
    head_methods: NDArray[np.str_]
    head_features: NDArray[np.int64]
    head_clusters: NDArray[np.int64]
    head_pairs: NDArray[np.float64]
    head_windows: NDArray[np.int64]

    def __repr__(self) -> str:
        """Show the report in one line."""
        exact = int((self.head_methods == "exact").sum())
        error, bound = (np.max(array, initial=0.0) for array in (self.error, self.bound))
        return (
            f"AttentionReport({exact} of {self.head_methods.size} heads exact, error {error:.2g} "
            f"<= bound {bound:.2g}, cost {self.cost:.2g}, method {self.method!r})"
        )


class HeadRecord(NamedTuple):
    """Method, error and work of one head.

    Attributes
    ----------
    num_features : int
        0 for exact attention.
    clusters : int
        Number of exact clusters.
    error, bound : float
        Estimated relative error, and its upper bound; for an exact head from its last trial.
    work : Work
        Work, the search included.
    """

    num_features: int
    clusters: int
    error: float
    bound: float
    work: Work

    @classmethod
    def exact(cls, problem: Problem) -> Self:
        """Return the record of exact attention without a search."""
        return cls(0, 0, 0.0, 0.0, Work(exact=exact_pairs(problem)))


def make_report(problem: Problem, heads: list[HeadRecord]) -> AttentionReport:
    """Return the report of all heads; without records, of exact attention."""
    methods = ["landmarks" if head.num_features else "exact" for head in heads]

    def of_heads(values: list[Any], dtype: Any) -> NDArray[Any]:
        return np.array(values, dtype).reshape(problem.lead)

    pairs, exact = of_heads([head.work.pairs for head in heads], float), exact_pairs(problem)
    return AttentionReport(
        method="landmarks" if "landmarks" in methods else "exact",
        num_features=max((head.num_features for head in heads), default=0) or None,
        exact_window=None,
        error=of_heads([h.error if h.num_features else 0.0 for h in heads], float),
        cost=float(pairs.mean() / exact) if heads and exact else 1.0,
        bound=of_heads([h.bound if h.num_features else 0.0 for h in heads], float),
        head_methods=of_heads(methods, "U9"),
        head_features=of_heads([head.num_features for head in heads], np.int64),
        head_clusters=of_heads([head.clusters for head in heads], np.int64),
        head_pairs=pairs,
        head_windows=of_heads([0] * len(heads), np.int64),
    )
