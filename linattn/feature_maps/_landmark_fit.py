"""How landmarks are found: samples of tokens, normalizers of probe queries, weighted clusters.

What is small (samples, landmarks, probes) is NumPy on the host, so that every array library gets
the same answer. What is long, all keys, is walked block by block in its own library.
Letters: ``C`` sampled tokens, ``m`` landmarks, ``p`` probes, ``d`` dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _generic
from linattn.typing import Array

__all__ = [
    "Sample",
    "choose",
    "detached",
    "draw_sample",
    "host_arrays",
    "is_concrete",
    "lloyd",
    "log_normalizers",
    "log_sum",
    "power_of_two",
    "query_metric",
    "sample_size",
    "spread",
]

Floats = NDArray[np.float64]

# Numbers worked on at once, of all heads: half a MB of float32, for the cache. (2 MB: fitting
# 2 heads of 2,048 tokens takes 9.1 ms for 6.7.)
BLOCK_ELEMENTS = 1 << 17

# Rounds in which the first landmarks are drawn: with 64 landmarks, 2, 4 and 8 rounds give the
# shipped sample a median error of .164, .156 and .157.
ROUNDS = 4


class Sample(NamedTuple):
    """Tokens taken from a sequence; slots that a head has no token for hold 0.

    Attributes
    ----------
    x : ndarray, (..., C, d)
        The tokens, in the accumulation dtype.
    valid : ndarray of bool, (..., C)
        Slots that hold a token; the leading axes are those of the mask, 1 or those of x.
    """

    x: NDArray[Any]
    valid: NDArray[np.bool_]


def host_arrays(xp: ModuleType, **named: Any) -> tuple[ModuleType, list[Any]]:
    """Refuse traced arrays, compute those of Dask, and cut the rest from any gradient tape.

    Raises
    ------
    TypeError
        An array has no values to inspect.
    """
    arrays = [array for array in named.values() if array is not None]
    if all(array_api_compat.is_dask_array(array) for array in arrays):
        host = [None if a is None else _arrays.to_numpy(a) for a in named.values()]
        return array_api_compat.array_namespace(next(a for a in host if a is not None)), host
    for name, array in named.items():
        if array is None or not _arrays.is_lazy(array):
            continue
        if not is_concrete(array):
            message = (
                f"{name} must have values to fit to, got a traced {type(array).__name__}; fit "
                f"outside of the traced function and use the map inside"
            )
            raise TypeError(message)
    return xp, [None if array is None else detached(array) for array in named.values()]


def is_concrete(array: Array) -> bool:
    """Whether an array has its values at hand: a traced one has not, and Dask's is a recipe."""
    if array_api_compat.is_dask_array(array):
        return False
    try:
        _arrays.to_numpy(array[..., :0])
    except Exception:
        return False
    return True


def detached(array: Array) -> Array:
    """Cut an array from any gradient tape."""
    return array.detach() if array_api_compat.is_torch_array(array) else array


def sample_size(m: int) -> int:
    """Tokens that a sample holds at most; shorter sequences are taken whole."""
    return max(16 * m, 1024)


def draw_sample(x: Array, mask: Array | None, noise: Floats, xp: ModuleType) -> Sample:
    """Take all visible tokens, or one from each of ``len(noise)`` equal strata of them.

    Position ``(i + noise_i) n / C`` of n visible tokens: O(C) memory beyond what a mask needs.
    """
    visible = None if mask is None else _arrays.to_numpy(mask)[..., 0]
    lead = () if visible is None else visible.shape[:-1]
    rows = [_ranks(x, visible, index, noise) for index in np.ndindex(lead)]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    width = max(1, int(counts.max(initial=0)))
    positions = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        positions[i, : len(row)] = row
    valid = (np.arange(width) < counts[:, None]).reshape(*lead, width)
    if len(rows) == 1:
        taken = _take(x, positions[0], xp)
    else:
        taken = np.empty((*x.shape[:-2], width, x.shape[-1]), _host_dtype(x, xp))
        for i, index in enumerate(np.ndindex(lead)):
            pairs = zip(index, lead, strict=True)
            # Strict libraries want an index for each axis, or an ellipsis.
            own = (slice(None) if n == 1 else slice(j, j + 1) for j, n in pairs)
            heads: tuple[Any, ...] = (*own, ...)
            taken[heads] = _take(x[heads], positions[i], xp)
    if not valid.all():
        taken = np.where(valid[..., None], taken, taken.dtype.type(0))
    return Sample(taken, valid)


def _host_dtype(x: Array, xp: ModuleType) -> Any:
    return np.float64 if x.dtype == xp.float64 else np.float32


def _ranks(
    x: Array, visible: NDArray[np.bool_] | None, index: tuple[int, ...], noise: Floats
) -> NDArray[np.int64]:
    among = None if visible is None else np.flatnonzero(visible[index])
    n = int(x.shape[-2]) if among is None else len(among)
    if n <= len(noise):
        return np.arange(n) if among is None else among
    strata = (np.arange(len(noise)) + noise) * (n / len(noise))
    ranks = np.minimum(strata.astype(np.int64), n - 1)
    return ranks if among is None else among[ranks]


def _take(x: Array, positions: NDArray[np.int64], xp: ModuleType) -> NDArray[Any]:
    where = xp.asarray(positions, device=array_api_compat.device(x))
    taken = _arrays.to_numpy(xp.take(x, where, axis=-2))
    return taken.astype(_host_dtype(x, xp), copy=False)


def choose(sample: Sample, num: int, noise: Floats) -> Sample:
    """Take one token from each of ``num`` equal strata of a sample, or all where there are fewer.

    A head without any token gets one at the origin: uniform attention.
    """
    lead = sample.valid.shape[:-1]
    count = np.sum(sample.valid, axis=-1, keepdims=True)
    num = min(num, sample.valid.shape[-1])
    # Tokens stand in the first slots of a head; one with fewer than num has one in each of these.
    chosen = np.floor((np.arange(num) + noise[:num]) * (count / num)).astype(np.int64)
    chosen = np.where(count > num, np.minimum(chosen, count - 1), np.arange(num))
    valid = np.take_along_axis(sample.valid, chosen, axis=-1)
    # A slot without a token holds 0: the origin.
    valid[..., 0] = True
    chosen = np.broadcast_to(chosen, (*sample.x.shape[:-2], chosen.shape[-1])) if lead else chosen
    if not lead:
        return Sample(sample.x[..., chosen, :], valid)
    return Sample(np.take_along_axis(sample.x, chosen[..., None], axis=-2), valid)


def query_metric(sample: Sample) -> Floats:
    """Covariance of queries, ``(..., d, d)``, of mean variance 1, and 1e-6 of the identity.

    ``(k - k') . (metric (k - k'))`` is, up to a factor, the variance over queries of the difference
    of two keys' logits. Clusters do not depend on the factor, and without it no scale of queries
    leaves the range of float32.
    """
    x = sample.x.astype(np.float64)
    d = x.shape[-1]
    count = np.maximum(np.sum(sample.valid, axis=-1), 1)[..., None, None]
    x -= np.sum(x, axis=-2, keepdims=True) / count
    if not sample.valid.all():
        x *= sample.valid[..., None]
    covariance = np.swapaxes(x, -1, -2) @ x
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / d
    return np.asarray(covariance / np.where(mean > 0, mean, 1.0) + 1e-6 * np.eye(d))


def log_normalizers(
    probes: Floats, key: Array, mask: Array | None, dtype: Any, xp: ModuleType
) -> Floats:
    """``log sum_j exp(probe.k_j)`` over all visible keys, ``(..., p)``; -inf where there is none.

    Online softmax over blocks of keys: O(S p d) time, memory that does not grow with S.
    """
    rows = _arrays.device_array(probes, xp, dtype, array_api_compat.device(key))
    lead = np.broadcast_shapes(probes.shape[:-2], tuple(key.shape[:-2]))
    size = max(16, BLOCK_ELEMENTS // max(1, int(np.prod(lead)) * probes.shape[-2]))
    top = total = None
    length = int(key.shape[-2])
    for start in range(0, length, size):
        block = slice(start, min(start + size, length))
        x = xp.astype(key[..., block, :], dtype, copy=False)
        logits = xp.matmul(rows, xp.matrix_transpose(x))
        if mask is not None:
            seen = xp.matrix_transpose(mask[..., block, :])
            # What a masked key holds shows in its own logits only.
            logits = xp.where(seen, logits, xp.zeros_like(seen, dtype=dtype) - xp.inf)
        block_top = xp.max(logits, axis=-1, keepdims=True)
        after = block_top if top is None else xp.maximum(top, block_top)
        shift = _generic.finite_shift(after, xp)
        logits -= shift
        more = xp.sum(xp.exp(logits), axis=-1, keepdims=True)
        total = more if total is None else total * xp.exp(top - shift) + more
        top = after
    log = xp.log(total) + _generic.finite_shift(top, xp)
    return _arrays.to_numpy(log)[..., 0].astype(np.float64)


def log_sum(x: Floats, axis: int) -> Floats:
    """Log of the sum of exponentials along an axis, which stays."""
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    return np.asarray(np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top)


def nearness(x: NDArray[Any], b: Floats, used: NDArray[np.bool_], metric: Floats) -> NDArray[Any]:
    """``x.(M b_c) - b_c.(M b_c) / 2``, largest at the nearest; -inf for what is not used.

    With ``x.(M x)`` it makes the squared distance: ``|x - b_c|^2 = x.(M x) - 2 nearness``.
    """
    images = b @ metric
    bias = np.where(used, -0.5 * np.sum(images * b, axis=-1), -np.inf)
    scores = x @ np.swapaxes(images, -1, -2).astype(x.dtype)
    scores += bias[:, None, :].astype(x.dtype)
    return np.asarray(scores)


def spread(
    x: NDArray[Any],
    weights: NDArray[Any],
    valid: NDArray[np.bool_],
    metric: Floats,
    gumbel: Floats,
    num: int,
) -> NDArray[np.int64]:
    """Draw tokens without replacement in rounds, heavy ones that are far from those drawn.

    In the first round the odds are the weights; later they are weights times the squared distance
    to the nearest token drawn in earlier rounds (Gumbel top-k, the noise is kept). Letters as in
    :func:`lloyd`; ``num < C``. Time O(H C num d).

    Returns
    -------
    ndarray of int, (H, num)
        In the order of the sequence. Tokens of weight 0 come after all others, slots without a
        token after those.

    References
    ----------
    Odds: Arthur, Vassilvitskii, "k-means++" (2007); rounds: Bahmani et al., "Scalable K-Means++"
    (2012).
    """
    own = np.einsum("...i,...i->...", x, x @ metric.astype(x.dtype))
    log_weights = np.log(weights.astype(np.float64))
    log_odds, nearest = log_weights, np.full(weights.shape, -np.inf, x.dtype)
    taken = np.zeros(weights.shape, dtype=bool)
    drawn: list[NDArray[np.int64]] = []
    for i in range(ROUNDS):
        count = num * (i + 1) // ROUNDS - num * i // ROUNDS
        if count == 0:
            continue
        odds = np.maximum(log_odds + gumbel, -1e200)
        odds = np.where(taken, -np.inf, np.where(valid, odds, -1e300))
        new = np.argsort(-odds, axis=-1, kind="stable")[:, :count]
        np.put_along_axis(taken, new, True, axis=-1)
        drawn.append(new)
        if i + 1 < ROUNDS:
            b = np.take_along_axis(x, new[..., None], axis=-2).astype(np.float64)
            used = np.take_along_axis(valid, new, axis=-1)
            nearest = np.maximum(nearest, nearness(x, b, used, metric).max(axis=-1))
            log_odds = log_weights + np.log(np.maximum(own - 2 * nearest, 0))
    return np.sort(np.concatenate(drawn, axis=-1), axis=-1)


def power_of_two(x: NDArray[Any]) -> Floats:
    """Largest powers of 2 up to positive numbers, 1 for 0: dividing by them rounds nothing."""
    x = np.asarray(x, dtype=np.float64)
    return np.asarray(np.ldexp(np.where(x > 0, 1.0, 2.0), np.frexp(x)[1] - 1))


def lloyd(
    x: NDArray[Any],
    weights: NDArray[Any],
    start: Floats,
    used: NDArray[np.bool_],
    metric: Floats,
    steps: int,
) -> Floats:
    """Weighted Lloyd steps in a metric: assign each token to its nearest centroid, average.

    Parameters
    ----------
    x : ndarray, (H, C, d)
        Tokens of H heads; distances are computed in their dtype.
    weights : ndarray, (H, C)
        0 for slots that hold no token.
    start : ndarray, (H, m, d)
        First centroids.
    used : ndarray of bool, (H, m)
        Centroids that take tokens.
    metric : ndarray, (H, d, d)
        Symmetric positive.
    steps : int
        Lloyd steps.

    Returns
    -------
    ndarray, (H, m, d)
        A centroid whose tokens weigh nothing stays where it was.

    Notes
    -----
    One matrix product a step, and one weighted count a coordinate. Time O(steps H C m d).
    """
    H, _, d = x.shape
    m = start.shape[-2]
    total_of = weights.astype(np.float64).ravel()
    coordinates = np.moveaxis(x, -1, 0).reshape(d, -1) * total_of
    first = m * np.arange(H)[:, None]
    b = start
    for _ in range(steps):
        cells = (np.argmax(nearness(x, b, used, metric), axis=-1) + first).ravel()
        total = np.bincount(cells, weights=total_of, minlength=H * m)
        sums = [np.bincount(cells, weights=z, minlength=H * m) for z in coordinates]
        means = np.stack(sums, axis=-1) / np.where(total > 0, total, 1.0)[:, None]
        b = np.where((total > 0).reshape(H, m, 1), means.reshape(H, m, d), b)
    return b
