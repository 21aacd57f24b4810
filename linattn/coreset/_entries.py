"""Weighted keys of a coreset: how they are read, and merged into fewer.

Shape letters: ``H`` heads (all leading axes as one), ``n`` entries, ``m`` entries kept, ``r`` rows,
``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays
from linattn._numerics import finite_shift
from linattn.typing import Array, Partial

JITTER = 1e-6
"""Added to the covariance of the queries, times their mean variance over the axes."""


class Entries(NamedTuple):
    """Weighted keys: ``exp(q.key + log)`` is what a query gives to ``values_and_one``."""

    key: Array
    """(H, n, d)"""
    log: Array
    """(H, n), -inf for an entry that stands for nothing"""
    values_and_one: Array
    """(H, n, e + 1): values, and 1"""


class Moments(NamedTuple):
    """Mean and scatter (sum of outer products about the mean) of the queries of whole blocks."""

    count: Array
    """(H, 1, 1)"""
    mean: Array
    """(H, 1, d)"""
    scatter: Array
    """(H, d, d)"""


def read(query: Array, old: Entries, new: Entries, xp: ModuleType, lazy: bool) -> Partial:
    """Softmax over all old entries and, causally, the new: the last row sees all of the new.

    Each row has a scale of its own, and later values meet no weight at all, not even 0: nothing
    of a later token reaches a row.
    """
    rows, seen = query.shape[1], new.key.shape[1]
    index = xp.arange(seen, device=array_api_compat.device(query))
    live = new.log > -xp.inf
    visible = index[None, :] <= index[seen - rows :, None]
    near = xp.matmul(query, xp.matrix_transpose(new.key))
    none = xp.full_like(near[:, :1, :1], -float("inf"))
    near = xp.where(visible & live[:, None, :], near + new.log[:, None, :], none)
    top = xp.max(near, axis=-1, keepdims=True)
    number = xp.cumulative_sum(xp.astype(live, query.dtype), axis=-1)[:, seen - rows :, None]
    far = None
    if old.key.shape[1]:
        # The log masses as one more coordinate, which every query has as 1.
        query1 = xp.concat([query, xp.ones_like(query[..., :1])], axis=-1)
        key1 = xp.concat([old.key, old.log[..., None]], axis=-1)
        far = xp.matmul(query1, xp.matrix_transpose(key1))
        top = xp.maximum(top, xp.max(far, axis=-1, keepdims=True))
        number += xp.astype(xp.max(old.log, axis=-1) > -xp.inf, query.dtype)[:, None, None]
    # A row that sees no key is 0; one whose logits all overflow to -inf is NaN.
    shift = xp.where(number == 0, xp.zeros_like(top), top)
    num_den = _visible_product(xp.exp(_lowered(near, shift)), new.values_and_one, visible, xp, lazy)
    if far is not None:
        num_den += xp.matmul(xp.exp(_lowered(far, shift)), old.values_and_one)
    return Partial(num_den, top)


def _lowered(x: Array, shift: Array) -> Array:
    """Subtract a shift in place, unless a gradient tape holds what was there."""
    if getattr(x, "requires_grad", False):
        return x - shift
    # At these sizes a fresh array costs more than what is done to it.
    x -= shift
    return x


def _visible_product(
    weights: Array, values_and_one: Array, visible: Array, xp: ModuleType, lazy: bool
) -> Array:
    """``weights @ values_and_one``, where a weight of 0 of an invisible key silences even a NaN."""
    finite = xp.isfinite(values_and_one)
    if not lazy and bool(xp.all(finite)):
        return xp.matmul(weights, values_and_one)
    not_finite = (
        xp.matmul(
            xp.astype(visible, values_and_one.dtype), xp.astype(~finite, values_and_one.dtype)
        )
        > 0
    )
    num_den = xp.matmul(weights, xp.where(finite, values_and_one, xp.zeros_like(values_and_one)))
    return xp.where(not_finite, xp.full_like(num_den, float("nan")), num_den)


def add_queries(moments: Moments, query: Array, xp: ModuleType) -> Moments:
    """Moments after one more block; queries whose square is not finite do not count."""
    good = xp.isfinite(xp.vecdot(query, query))[..., None]
    query = xp.where(good, query, xp.zeros_like(query[:, :1, :1]))
    good = xp.astype(good, query.dtype)
    row = xp.matrix_transpose(good)
    count = xp.matmul(row, good)
    mean = xp.matmul(row, query) / xp.maximum(count, xp.ones_like(count))
    centred = (query - mean) * good
    total = moments.count + count
    share = count / xp.maximum(total, xp.ones_like(total))
    change = mean - moments.mean
    scatter = moments.scatter + xp.matmul(xp.matrix_transpose(centred), centred)
    scatter = scatter + (moments.count * share * xp.matrix_transpose(change)) * change
    return Moments(total, moments.mean + share * change, scatter)


def _half_covariance(moments: Moments, xp: ModuleType) -> Array:
    """Half the covariance of the queries, ``(H, d, d)``, never singular."""
    heads, _, d = moments.mean.shape
    half = moments.scatter / (2 * xp.maximum(moments.count, xp.ones_like(moments.count)))
    eye = xp.eye(d, dtype=half.dtype, device=array_api_compat.device(half))
    trace = xp.matmul(xp.reshape(half, (heads, 1, d * d)), xp.reshape(eye, (d * d, 1)))
    mean_variance = xp.where(trace > 0, trace / d, xp.ones_like(trace))
    return half + (JITTER * mean_variance) * eye


def _rows(x: Array, index: Array, xp: ModuleType) -> Array:
    """Rows ``(H, n, w)`` of ``(H, m, w)`` at an index ``(H, n)``."""
    heads, m, width = x.shape
    start = xp.arange(heads, dtype=index.dtype, device=array_api_compat.device(x)) * m
    flat = xp.reshape(index + start[:, None], (-1,))
    taken = xp.take(xp.reshape(x, (heads * m, width)), flat, axis=0)
    return xp.reshape(taken, (heads, index.shape[1], width))


def _nearest(x1: Array, b: Array, metric: Array, xp: ModuleType) -> Array:
    """Index of the nearest centroid of each key by ``(x - b).metric (x - b)``, ``(H, n)``."""
    image = xp.matmul(b, metric)
    height = xp.vecdot(b, image)[..., None] / 2
    image1 = xp.concat([image, -height], axis=-1)
    return xp.argmax(xp.matmul(x1, xp.matrix_transpose(image1)), axis=-1)


def _membership(assigned: Array, m: int, like: Array, xp: ModuleType) -> Array:
    """1 where entry j is in cluster c, else 0: ``(H, m, n)``."""
    # Compared in the floating dtype, which is narrower than an index and exact up to 2^24.
    index = xp.arange(m, dtype=like.dtype, device=array_api_compat.device(like))
    members = xp.astype(assigned, like.dtype)[:, None, :] == index[:, None]
    return xp.astype(members, like.dtype)


def _sums(
    log: Array, x1: Array, assigned: Array, members: Array, xp: ModuleType, lazy: bool
) -> tuple[Array, Array]:
    """Sum ``exp(log_j) x1_j`` over each cluster; the sums are ``sums * exp(top)``: (sums, top)."""
    top = finite_shift(xp.max(log, axis=-1, keepdims=True), xp)
    floor = top + float(np.log(xp.finfo(log.dtype).smallest_normal)) / 2
    if not lazy and bool(xp.all((log > floor) | (log == -xp.inf))):
        return xp.matmul(members, xp.exp(log - top)[..., None] * x1), top[..., None]
    # One scale would lose whole clusters to underflow.
    none = xp.full_like(top, -float("inf"))[..., None]
    top = xp.max(xp.where(members > 0, log[:, None, :], none), axis=-1, keepdims=True)
    top = finite_shift(top, xp)
    weights = xp.exp(log[..., None] - _rows(top, assigned, xp))
    return xp.matmul(members, weights * x1), top


def reduce(
    entries: Entries, moments: Moments, noise: Array, m: int, xp: ModuleType, lazy: bool
) -> Entries:
    """Replace ``n > m`` entries by m weighted centroids."""
    d = entries.key.shape[-1]
    half = _half_covariance(moments, xp)
    live = xp.astype(entries.log > -xp.inf, entries.key.dtype)[:, None, :]
    number = xp.sum(live, axis=-1, keepdims=True)
    centre = xp.matmul(live, entries.key) / xp.maximum(number, xp.ones_like(number))
    x = entries.key - centre
    log_w = (entries.log + xp.vecdot(x, moments.mean + xp.matmul(x, half)))[..., None] / 2

    order = xp.argsort(-(log_w[..., 0] + noise), axis=-1)
    table = xp.concat([x, xp.ones_like(log_w), log_w], axis=-1)
    x1, ordered = table[..., :-1], _rows(table, order, xp)
    b1, b_log = ordered[:, :m, :-1], ordered[:, :m, -1:]
    other1, other_log = ordered[:, m:, :-1], ordered[:, m:, -1:]
    # First step: each landmark is its own, so only the others are compared. Their weights
    # relative to their landmark's are bounded by the noise. A landmark that stands for nothing
    # does no harm: there is one only where all that stand for something are landmarks too.
    assigned = _nearest(other1, b1[..., :d], half, xp)
    weights = xp.exp(other_log - _rows(finite_shift(b_log, xp), assigned, xp))
    sums = b1 + xp.matmul(_membership(assigned, m, x, xp), weights * other1)
    b = sums[..., :d] / sums[..., d:]

    assigned = _nearest(x1, b, half, xp)
    members = _membership(assigned, m, x, xp)
    sums, _ = _sums(log_w[..., 0], x1, assigned, members, xp, lazy)
    total = sums[..., d:]
    # Where an empty cluster is does not matter: its mass is 0.
    b = sums[..., :d] / (total + xp.astype(total == 0, x.dtype))

    mu = moments.mean + xp.matmul(b, half)
    mu1 = xp.concat([mu, -xp.vecdot(mu, b)[..., None]], axis=-1)
    log = entries.log + xp.vecdot(_rows(mu1, assigned, xp), x1)
    sums, top = _sums(log, entries.values_and_one, assigned, members, xp, lazy)
    total = sums[..., -1:]
    values_and_one = sums / (total + xp.astype(total == 0, x.dtype))
    return Entries(b + centre, (top + xp.log(total))[..., 0], values_and_one)


def gumbel_noise(seed: int, block: int, like: Array) -> Array:
    """Gumbel noise of one block, drawn on the host: the same for every library and every cut."""
    xp = _arrays.namespace(like)
    sequence = np.random.SeedSequence(seed, spawn_key=(block,))
    noise = -np.log(np.random.default_rng(sequence).standard_exponential(tuple(like.shape)))
    return _arrays.device_array(noise, xp, like.dtype, array_api_compat.device(like))


def joined(first: Entries, second: Entries, xp: ModuleType) -> Entries:
    return Entries(*(xp.concat(list(pair), axis=1) for pair in zip(first, second, strict=True)))
