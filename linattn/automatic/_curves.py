"""Error of landmarks on held-out rows, for every possible number of exact clusters.

The exact row of a query is the sum of the exact parts of its clusters. So the gain of each exact
cluster costs no further products. Letters: ``h`` rows, ``S`` keys, ``C`` clusters, ``m`` landmarks,
``p`` probes, ``e`` value dim, ``l`` levels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn._generic.clusters import scores_together
from linattn._generic.numerics import ignore_fp_warnings
from linattn.automatic._costs import FIRST_ROWS
from linattn.automatic._tokens import Head
from linattn.feature_maps import LandmarkFeatures

__all__ = ["Clusters", "ErrorCurve", "clusters_and_missing", "error_curve"]

Floats = NDArray[Any]

TILE = 1 << 17
"""How many logits of keys with probes or landmarks are computed in one tile."""

SHORT_PRODUCT = 1 << 19
"""Multiplications in a short product. With 16 keys, dim 32 and 1,024 landmarks it takes .7 ns a
logit, a whole tile 1.2. Without BLAS kernels for them, shorter products are slower than tiles."""

LEAST_LOG, SEEN = -80.0, (1e-10, 1e15)
"""Smallest log weight that is not clipped, and the largest sum of weights of a row. A clipped
weight is then lost in rounding, and no number leaves the range."""

MIN_TOTAL = 1e-30
"""Smallest sum of exponentials without a shift: above it underflow does not matter."""


class ErrorCurve(NamedTuple):
    """Errors of one head by the number of clusters that count exactly.

    Attributes
    ----------
    error, bound : ndarray, (w, l)
        Relative output error on the held-out rows, and its upper bound. The first row is without a
        window, the second with the window, if there is one.
    share : ndarray, (l,)
        Share of all keys in the exact clusters, in the mean over rows.
    floor : float
        Lower limit of a bound from all rows.
    rows : int
        Number of computed rows.
    keys : KeyClusters or None
        The clusters; None if there is no key, or if they are not computed.
    """

    error: NDArray[np.float64]
    bound: NDArray[np.float64]
    share: NDArray[np.float64]
    floor: float = 0.0
    rows: int = 0
    keys: KeyClusters | None = None


class KeyClusters(NamedTuple):
    """Clusters of the keys of one head: one column each, some perhaps empty.

    Attributes
    ----------
    positions, of_key : ndarray of int, (S,)
        Unmasked keys, and their columns.
    bias : ndarray, (m,)
        Log of the mean weight of a cluster's keys times their root mean square distance.
    kvz, log_scale : ndarray, (m, e + 1), (m,)
        State after all keys.
    """

    positions: NDArray[np.intp]
    of_key: NDArray[np.intp]
    bias: Floats
    kvz: Floats
    log_scale: Floats


class Landmarks(NamedTuple):
    """Landmarks of one head in the dtype of its tokens.

    Attributes
    ----------
    b : ndarray, (m, d)
        Scaled.
    images, bias : ndarray, (d, m), (m,)
        The landmark of a key has the largest of ``key.images + bias``.
    probes, table : ndarray, (d, p), (m, p)
        The log weight of a key of landmark c is the log sum of ``exp(key.probes + table_c)``.
    metric : ndarray, (d, d)
        Metric for the distances of keys to their landmarks.
    """

    b: Floats
    images: Floats
    bias: Floats
    probes: Floats
    table: Floats
    metric: Floats

    @classmethod
    def of(
        cls, phi: LandmarkFeatures, lead: tuple[int, ...], index: tuple[int, ...], dtype: Any
    ) -> Landmarks:
        """Return the landmarks of one head of a map."""
        b, images, bias, probes, lognorm, table, metric = (
            np.broadcast_to(x, (*lead, *x.shape[x.ndim - axes :]))[index]
            for x, axes in (
                (phi.landmarks, 2),
                (phi._images, 2),
                (phi._bias, 1),
                (phi.probes, 2),
                (phi.log_normalizers, 1),
                (phi._table, 2),
                (phi.metric, 2),
            )
        )
        arrays = (phi.scale * b, images.T, bias, phi.scale * probes.T, table.T - lognorm, metric)
        return cls(*(np.ascontiguousarray(x, dtype=dtype) for x in arrays))

    def assign(self, key: Floats) -> tuple[NDArray[np.intp], Floats]:
        """Return the landmark of each key, and the log weight of the key there."""
        index, log = np.empty(len(key), np.intp), np.empty(len(key), key.dtype)
        size, (m, p) = max(64, TILE // max(self.table.shape)), self.table.shape
        of_landmarks = np.empty((size, m), key.dtype)
        of_probes, rows = np.empty((2, size, p), key.dtype)
        ones = np.ones(p, key.dtype)
        for start in range(0, len(key), size):
            tile, n = slice(start, start + size), min(size, len(key) - start)
            scores = _short_products(key[tile], self.images, of_landmarks[:n])
            scores += self.bias
            index[tile] = found = np.argmax(scores, axis=-1)
            terms = _short_products(key[tile], self.probes, of_probes[:n])
            # "clip" spares a copy of what is taken; every index is in range.
            terms += self.table.take(found, axis=0, out=rows[:n], mode="clip")
            total = np.exp(terms, out=rows[:n]) @ ones
            if total.min() > MIN_TOTAL and total.max() < np.inf:
                log[tile] = np.log(total)
                continue
            # Where the largest is, is found in half the time.
            top = np.take_along_axis(terms, terms.argmax(axis=-1, keepdims=True), axis=-1)
            terms -= top
            log[tile] = np.log(np.exp(terms, out=terms) @ ones) + top[:, 0]
        return index, log


def _short_products(x: Floats, y: Floats, out: Floats) -> Floats:
    """Write ``x y`` into ``out``, few rows at a time: BLAS multiplies these without packing y."""
    size = max(1, SHORT_PRODUCT // y.size)
    whole = len(x) - len(x) % size
    if whole:
        batches = (whole // size, size, -1)
        np.matmul(x[:whole].reshape(batches), y, out=out[:whole].reshape(batches))
    np.matmul(x[whole:], y, out=out[whole:])
    return out


class Clusters(NamedTuple):
    """Keys of one head in the order of their clusters; clusters without a key are left out."""

    b: Floats
    column: NDArray[np.intp]
    """Landmark of each cluster, (C,)."""
    starts: NDArray[np.intp]
    sizes: NDArray[np.intp]
    of_key: NDArray[np.intp]
    key: Floats
    values_and_one: Floats
    weight: Floats
    """Weight of each key over the largest weight in its cluster."""
    log_scale: Floats
    """Log of that largest weight, (C,)."""
    sums: Floats
    """Weighted sums of values and ones, over that largest weight, (C, e + 1)."""
    bias: Floats
    """Log of the mean weight of a cluster's keys times their root mean square distance, (C,)."""
    place: NDArray[np.intp]
    """Position of each key of the head in this order."""
    key_bias: Floats | None
    """Bias of each key, (S, 1)."""

    @classmethod
    def of(cls, head: Head, landmarks: Landmarks, scale: float) -> Clusters:
        """Sort the keys of a head."""
        index, log = landmarks.assign(head.key)
        # Numbers of two bytes are sorted by counting.
        narrow = index.astype(np.uint16 if len(landmarks.b) <= 1 << 16 else np.intp)
        order, key_bias = np.argsort(narrow, kind="stable"), None
        if head.key_bias is not None:
            log += head.key_bias
            key_bias = head.key_bias[order, None]
        count = np.bincount(index)
        found = np.flatnonzero(count)
        sizes = count[found]
        starts = np.cumsum(sizes) - sizes
        of_key = np.repeat(np.arange(len(found)), sizes)
        log_scale = np.maximum.reduceat(log[order], starts)
        weight = np.exp(log[order] - log_scale[of_key])
        values_and_one = head.values_and_one.take(order, axis=0)
        sums = np.add.reduceat(weight[:, None] * values_and_one, starts)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        b, key = landmarks.b[found], head.key.take(order, axis=0)
        apart = key * key.dtype.type(scale) - b.take(of_key, axis=0)
        squares = np.add.reduceat(np.vecdot(apart @ landmarks.metric, apart), starts)
        bias = log_scale + np.log(sums[:, -1]) + np.log(np.maximum(squares, 0) / sizes) / 2
        bias -= np.log(sizes)
        return cls(
            b=b,
            column=found,
            starts=starts,
            sizes=sizes,
            of_key=of_key,
            key=key,
            values_and_one=values_and_one,
            weight=weight,
            log_scale=log_scale,
            sums=sums,
            bias=bias,
            place=place,
            key_bias=key_bias,
        )

    def of_landmarks(self, positions: NDArray[np.intp], m: int) -> KeyClusters:
        """Return the clusters with a column for each of m landmarks."""
        kvz = np.zeros((m, self.sums.shape[-1]), self.sums.dtype)
        log_scale, bias = np.full((2, m), -np.inf, self.sums.dtype)
        kvz[self.column], log_scale[self.column] = self.sums, self.log_scale
        bias[self.column] = self.bias
        of_key = self.column[self.of_key[self.place]]
        return KeyClusters(positions, of_key, bias, kvz, log_scale)

    def missing(self, query: Floats, own_logits: Floats) -> Floats:
        """Return, for each query, the share of weight on its own key that landmarks may miss.

        ``r / (1 + r)`` with r the weight of the own key over the sum that landmarks find.
        """
        found = np.empty_like(own_logits)
        log_size = self.log_scale + np.log(self.sums[:, -1])
        size = max(16, TILE // len(self.b))
        for tile in (slice(start, start + size) for start in range(0, len(query), size)):
            logs = query[tile] @ self.b.T + log_size
            top = logs.max(axis=-1)
            found[tile] = top + np.log(np.exp(logs - top[:, None]).sum(axis=-1))
        share = 1 / (1 + np.exp(np.minimum(found - own_logits, 80)))
        return np.where(np.isfinite(share), share, 0)

    def largest_logs(self, rows: Floats) -> Floats:
        """Return the largest log weight of any key, (h,), for rows ``(d, h)``."""
        size = max(16, TILE // rows.shape[-1])
        tiles = (slice(start, start + size) for start in range(0, len(self.key), size))
        return np.asarray(np.max([self._logs(rows, keys).max(axis=0) for keys in tiles], axis=0))

    def exact_sums(self, rows: Floats, shift: Floats, sums: Floats) -> None:
        """Sum exact weights times values and ones by cluster, in units of exp(shift).

        For rows ``(d, h)``, into sums (C, h, e + 1).
        """
        h, bounds = rows.shape[-1], [*self.starts.tolist(), len(self.key)]
        # Clusters of about so many keys are worked on together: each has few by itself.
        first = np.flatnonzero(np.diff(self.starts // max(16, TILE // max(1, h)), prepend=-1))
        for begin, end in pairwise([*first.tolist(), len(self.starts)]):
            start, stop = bounds[begin], bounds[end]
            width = max(16, 2 * TILE // (stop - start))
            for tile in (slice(i, i + width) for i in range(0, h, width)):
                weights = self._logs(rows[:, tile], slice(start, stop))
                weights -= shift[tile]
                # Numbers that are not normal take ten times as long; a few keys tell.
                if weights[::8].min() < LEAST_LOG:
                    weights.clip(LEAST_LOG, np.inf, out=weights)
                np.exp(weights, out=weights)
                for i in range(begin, end):
                    of_cluster = weights[bounds[i] - start : bounds[i + 1] - start]
                    values_and_one = self.values_and_one[bounds[i] : bounds[i + 1]]
                    np.matmul(of_cluster.T, values_and_one, out=sums[i, tile])

    def _logs(self, rows: Floats, keys: slice) -> Floats:
        logs = self.key[keys] @ rows
        if self.key_bias is not None:
            logs += self.key_bias[keys]
        return np.asarray(logs)

    def order_together(self, choosers: Floats) -> NDArray[np.intp]:
        """Return the order in which runs of queries ``(h, r, d)`` choose clusters, (h, C)."""
        scores = scores_together(choosers @ self.b.T + self.log_scale, self.bias, self.log_scale)
        return np.argsort(-scores, axis=-1)


def clusters_and_missing(
    keys: Head, landmarks: Landmarks, scale: float, query: Floats, own_logits: Floats
) -> tuple[Clusters, Floats]:
    """Sort the keys of a head; also return the share of weight that each query may miss."""
    with ignore_fp_warnings():
        clusters = Clusters.of(keys, landmarks, scale)
        return clusters, clusters.missing(query, own_logits)


class _Weights(NamedTuple):
    """Weights of the held-out rows, in units of exp(shift) of each row."""

    sums: Floats
    """Exact weights times values and ones, summed by cluster, (C, h, e + 1)."""
    by_landmark: Floats
    """Largest weight of each cluster through its landmark, (h, C)."""
    order: NDArray[np.intp]
    """Clusters in decreasing order of their expected error, (h, C)."""
    shift: Floats
    """Log of the largest weight, approximately, (h,)."""

    @classmethod
    def of(cls, head: Head, clusters: Clusters, scale: float, sums: Floats) -> _Weights:
        """Compute the weights of some rows, with the sums in place."""
        query = head.query
        logs = query @ clusters.b.T + clusters.log_scale
        rows = np.ascontiguousarray((query * query.dtype.type(scale)).T)
        # The largest by landmarks is near enough, mostly, and spares a pass over all weights.
        shift = logs.max(axis=-1)
        clusters.exact_sums(rows, shift, sums)
        seen = sums[..., -1].sum(axis=0)
        if not (seen.min(initial=1.0) > SEEN[0] and seen.max(initial=1.0) < SEEN[1]):
            shift = clusters.largest_logs(rows)
            clusters.exact_sums(rows, shift, sums)
        logs -= shift[:, None]
        if head.choosers is None:
            order = np.argsort(clusters.log_scale - clusters.bias - logs, axis=-1)
        else:
            order = clusters.order_together(head.choosers)
        return cls(sums, np.exp(logs, out=logs), order, shift)

    def with_rows(self, more: _Weights, sums: Floats) -> _Weights:
        """Append more rows, whose sums are already in place."""
        return _Weights(sums, *map(np.concatenate, zip(self[1:], more[1:], strict=True)))


def error_curve(
    head: Head,
    landmarks: Landmarks,
    *,
    scale: float,
    levels: tuple[int, ...],
    exact_window: int | None,
    probability: float,
    rows_wanted: Callable[[ErrorCurve], int] | None = None,
    clusters: Clusters | None = None,
) -> ErrorCurve:
    """Compute the error of one head on its held-out rows for each number of exact clusters.

    Errors are without and with the window. ``rows_wanted`` sees the curve of the first rows and
    returns how many rows to compute in all, 0 for no more.
    Time O(h S (d + e) + S (m + p) d), memory O(h S + h C e).
    """
    if not len(head.key):
        shape = (1 if exact_window is None else 2, len(levels))
        return ErrorCurve(np.zeros(shape), np.zeros(shape), np.zeros(shape[1]))
    # Weights out of range make an error that is not finite, and is not taken.
    with ignore_fp_warnings():
        clusters = Clusters.of(head, landmarks, scale) if clusters is None else clusters
        keys = clusters.of_landmarks(head.positions, len(landmarks.b))
        sums = np.empty((len(clusters.b), len(head.rows), clusters.sums.shape[-1]), head.key.dtype)
        if rows_wanted is None:
            weights = _Weights.of(head, clusters, scale, sums)
        else:
            # Those that judge first, from all parts of the sequence, go before the others.
            step = max(1, len(head.rows) // FIRST_ROWS)
            is_first = np.arange(len(head.rows)) % step == step // 2
            head, count = head.in_order(np.argsort(~is_first, kind="stable")), np.sum(is_first)
            part = head.some_rows(slice(count))
            weights = _Weights.of(part, clusters, scale, sums[:, :count])
            curve = _error_curve(part, weights, clusters, scale, levels, exact_window, probability)
            curve = curve._replace(floor=curve.floor * (count / len(head.rows)) ** 0.5)
            wanted = rows_wanted(curve)
            if not wanted:
                return curve._replace(keys=keys)
            if wanted < len(head.rows) and not head.all_rows:
                # Evenly spaced in all that are left: each stratum is as likely to be there.
                more_rows = np.linspace(count, len(head.rows) - 1, max(0, wanted - count))
                head = head.some_rows(
                    np.append(np.arange(count), np.unique(more_rows.round().astype(int)))
                )
                sums = sums[:, : len(head.rows)]
            rest = head.some_rows(slice(count, None))
            more = _Weights.of(rest, clusters, scale, sums[:, count:])
            weights = weights.with_rows(more, sums)
        curve = _error_curve(head, weights, clusters, scale, levels, exact_window, probability)
        return curve._replace(keys=keys)


def _error_curve(
    head: Head,
    weights: _Weights,
    clusters: Clusters,
    scale: float,
    levels: tuple[int, ...],
    exact_window: int | None,
    probability: float,
) -> ErrorCurve:
    shape = (1 if exact_window is None else 2, len(levels))
    exact = weights.sums.sum(axis=0)
    parts = np.empty((*shape, *exact.shape), exact.dtype)
    parts[:] = weights.by_landmark @ clusters.sums
    share = _add_clusters(parts[0], weights, clusters, levels)
    if exact_window is not None:
        parts[1] = parts[0]
        near = _Near.of(head, weights, clusters, scale, exact_window)
        near.add(parts[1], levels)
    if head.beside is not None:
        for sums in (exact, parts):
            _add_beside(sums, weights.shift, *head.beside)
    exact, parts = (x[..., :-1] / x[..., -1:] for x in (exact, parts))
    wide = exact.astype(np.float64)
    apart = parts - wide
    squares, units = np.vecdot(apart, apart), np.vecdot(wide, wide)
    unseen = head.unseen(wide) if head.beside is None else 0.0
    error, bound = head.error_and_bound(squares, units, probability, unseen)
    floor = _floor(head, unseen, units, probability)
    return ErrorCurve(error, bound, share, floor, len(head.rows))


def _floor(head: Head, unseen: Any, units: Floats, probability: float) -> float:
    """Return the bound for rows without any error."""
    _, bound = head.error_and_bound(np.zeros_like(units), units, probability, unseen)
    return float(bound)


def _add_beside(sums: Floats, shift: Floats, beside: Floats, log: Floats) -> None:
    """Add other sums, in other units, to sums in units of exp(shift)."""
    top = np.maximum(shift, log)
    sums *= np.exp(shift - top)[:, None]
    sums += beside * np.exp(log - top)[:, None]


def _add_clusters(
    parts: Floats, weights: _Weights, clusters: Clusters, levels: tuple[int, ...]
) -> NDArray[np.float64]:
    """Replace the landmark parts of the best clusters by exact parts; return their share."""
    most = min(max(levels), len(clusters.b))
    if not most:
        return np.zeros(len(levels))
    best, rows = np.ascontiguousarray(weights.order[:, :most].T), np.arange(len(weights.order))
    gained = weights.sums.reshape(-1, parts.shape[-1]).take(best * len(rows) + rows, axis=0)
    gained -= weights.by_landmark[rows, best][..., None] * clusters.sums.take(best, axis=0)
    total, counted = np.zeros_like(parts[0]), 0
    for part, level in zip(parts, levels, strict=True):
        total += gained[counted:level].sum(axis=0)
        part += total
        counted = level
    sizes = np.cumsum(clusters.sizes[best].mean(axis=1)) / len(clusters.key)
    reached = np.append(0.0, sizes)
    share: NDArray[np.float64] = reached[np.minimum(levels, most)]
    return share


class _Near(NamedTuple):
    """Keys in the windows of the rows, w of each."""

    gained: Floats
    """Exact weights less those at the landmarks, (h, w)."""
    rank: NDArray[np.intp]
    """Rank of a key's cluster in the order of choice, (h, w)."""
    values_and_one: Floats

    @classmethod
    def of(
        cls, head: Head, weights: _Weights, clusters: Clusters, scale: float, exact_window: int
    ) -> _Near:
        near = (head.rows // exact_window - 1)[:, None] * exact_window + np.arange(3 * exact_window)
        found = np.searchsorted(head.positions, near)
        found = np.minimum(found, len(head.positions) - 1)
        is_key = head.positions[found] == near
        query = head.query * head.query.dtype.type(scale)
        logs = (head.key.take(found, axis=0) @ query[..., None])[..., 0]
        if head.key_bias is not None:
            logs += head.key_bias[found]
        keys, rows = clusters.place[found], np.arange(len(near))[:, None]
        cluster = clusters.of_key[keys]
        gained = np.exp(logs - weights.shift[:, None])
        gained -= weights.by_landmark[rows, cluster] * clusters.weight[keys]
        gained = np.where(is_key, gained, 0)
        rank = np.empty_like(weights.order)
        np.put_along_axis(rank, weights.order, np.arange(rank.shape[-1])[None, :], axis=-1)
        return cls(gained, rank[rows, cluster], head.values_and_one.take(found, axis=0))

    def add(self, parts: Floats, levels: tuple[int, ...]) -> None:
        """Replace landmark weights by exact weights for keys whose clusters are not exact."""
        counted = (self.rank[:, None, :] >= np.array(levels)[:, None]) * self.gained[:, None, :]
        parts += np.swapaxes(counted @ self.values_and_one, 0, 1)
