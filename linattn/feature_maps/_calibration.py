"""Calibration of normalized exponential features, on the host.

Queries x and keys y carry ``sqrt(scale)`` each, so that logits are ``x.y``. Letters: ``n`` queries,
``s`` keys, ``d`` dim, ``m`` features; leading axes are heads. The map is

    log phi_c(x) = b_c.x + beta_c,   z_c(y) = a_c.y + alpha_c,
    log psi_c(y) = z_c - eta LSE(z) + t.y
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn.feature_maps._clusters import LLOYD_STEPS, move_centroids
from linattn.feature_maps._samples import Sample

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Weight of the divergence between rows of weights, beside the error of the output.
DIVERGENCE = 0.1
# Queries of a sequence by which keys are weighed.
MAX_QUERIES = 256


class Parameters(NamedTuple):
    """b (..., m, d), beta (..., m), a (..., m, d), alpha (..., m), eta (..., 1), t (..., d)."""

    b: Floats
    beta: Floats
    a: Floats
    alpha: Floats
    eta: Floats
    t: Floats


class Pattern(NamedTuple):
    """How a map will be used: through which window, under which mask."""

    window: int | None
    is_causal: bool


def _swap(x: Floats) -> Floats:
    return np.swapaxes(x, -1, -2)


def pivots(y: Floats, metric: Floats, m: int) -> Floats:
    """Choose m keys by a pivoted Cholesky factorization; returns them, ``(..., m, d)``.

    The matrix is ``exp(-|y_j - y_l|^2 / 2)`` in the metric. Where queries are Gaussian with this
    covariance it is the Gram matrix of the functions ``x -> exp(x.y_j)``, each of norm 1, under
    the distribution of the queries: the next pivot is the key whose column of attention those
    before it explain least. O(n m (m + d)) time, O(n m) memory a head; the matrix itself is never
    formed.
    """
    heads, (n, d) = y.shape[:-2], y.shape[-2:]
    y = y.reshape(-1, n, d)
    # Distances from a factor of the metric: of keys alike they are exactly 0.
    u = y @ np.linalg.cholesky(metric).reshape(-1, d, d)
    head = np.arange(len(y))
    factor = np.zeros((len(y), m, n))
    left = np.ones((len(y), n))
    chosen = np.zeros((len(y), m), dtype=np.int64)
    for i in range(m):
        pivot = np.argmax(left, axis=-1)
        chosen[:, i] = pivot
        distance = np.sum((u - u[head, pivot][:, None, :]) ** 2, axis=-1)
        before = factor[:, :i]
        column = np.exp(-distance / 2) - (before[head, :, pivot][:, None, :] @ before)[:, 0]
        column /= np.sqrt(np.maximum(left[head, pivot], 1e-300))[:, None]
        factor[:, i] = column
        left -= column * column
        left[head[:, None], chosen[:, : i + 1]] = -np.inf
    return np.take_along_axis(y, chosen[..., None], axis=-2).reshape(*heads, m, d)


def importance(sample: Sample, pattern: Pattern) -> Floats:
    """Weigh keys by the attention that they get through the map, ``(..., s)`` like the keys.

    ``sqrt(mean_i A_ij^2)`` over queries i, A the exact weights, 0 where a pair is in the window;
    summed over the query heads that share a key. At most 256 queries, evenly spaced, are asked.
    O(n s d) time for those n, O(n s) memory a head.
    """
    x, y = sample.x, sample.y
    n, s = x.shape[-2], y.shape[-2]
    asked = np.arange(0, n, -(-n // MAX_QUERIES))
    seen, far = (pairs[asked] for pairs in _pairs(n, s, pattern))
    weights, _ = _softmax(x[..., asked, :] @ _swap(y), seen if pattern.is_causal else None)
    roots = np.sqrt(np.mean(np.where(far, weights, 0) ** 2, axis=-2))
    return _sum_to(roots, y.shape[:-1])


def cluster_means(y: Floats, weights: Floats, metric: Floats, b: Floats) -> Floats:
    """Move centroids to the weighted means of the keys nearest to them: one step of Lloyd's.

    A centroid without keys, or with weightless ones, stays. O(n m d) time, O(n m) memory a head.
    """
    scores = y @ metric @ _swap(b) - np.sum(b @ metric * b, axis=-1)[..., None, :] / 2
    members = np.argmax(scores, axis=-1)[..., None] == np.arange(b.shape[-2])
    shares = _swap(members * weights[..., None])
    return move_centroids(b, np.sum(shares, axis=-1, keepdims=True), shares @ y)


def closed_form(x: Floats, y: Floats, weights: Floats, m: int, bandwidth: float) -> Parameters:
    """Keys shared out by a softmax of squared distances over 2 h to centroids: exact at mean x."""
    c = np.mean(x, axis=-2)
    centred = x - c[..., None, :]
    metric = _swap(centred) @ centred / x.shape[-2] + 1e-6 * np.eye(x.shape[-1])
    b = pivots(y, metric, m)
    for _ in range(LLOYD_STEPS):
        b = cluster_means(y, weights, metric, b)
    changed = b @ metric
    alpha = -np.sum(changed * b, axis=-1) / (2 * bandwidth)
    beta = -np.sum(b * c[..., None, :], axis=-1)
    return Parameters(b, beta, changed / bandwidth, alpha, np.ones((*c.shape[:-1], 1)), c)


def _pairs(n: int, s: int, pattern: Pattern) -> tuple[Bools, Bools]:
    """Which pairs are seen, and which of them through the map."""
    i, j = np.arange(n)[:, None], np.arange(s)[None, :]
    seen = j <= i if pattern.is_causal else np.ones((n, s), dtype=bool)
    if pattern.window is None:
        return seen, seen
    return seen, seen & (np.abs(i // pattern.window - j // pattern.window) > 1)


def _softmax(log: Floats, seen: Bools | None) -> tuple[Floats, Floats]:
    """Rows of weights, in the place of their logs, and the logs of their sums."""
    if seen is not None:
        np.copyto(log, -np.inf, where=~seen)
    top = np.max(log, axis=-1, keepdims=True)
    log -= top
    weights = np.exp(log, out=log)
    total = np.sum(weights, axis=-1, keepdims=True)
    weights /= total
    return weights, top + np.log(total)


def loss_and_gradient(
    parameters: Parameters, sample: Sample, pattern: Pattern
) -> tuple[Floats, Parameters]:
    """Loss of each head on one sequence, and the gradient of their sum.

    The loss is ``|out - exact| / |exact|`` in the Frobenius norm, plus 0.1 times the mean over rows
    of ``KL(exact weights || approximate weights)``. In the dtype of all arrays. O(n s (m + d + e))
    time, O(n s) memory a head.
    """
    b, beta, a, alpha, eta, t = parameters
    x, y, v = sample
    assert v is not None
    n, s = x.shape[-2], y.shape[-2]
    tiny = np.finfo(x.dtype).tiny ** 0.8
    visible, far = _pairs(n, s, pattern)
    seen = visible if pattern.is_causal else None

    log_phi = x @ _swap(b) + beta[..., None, :]
    z = y @ _swap(a) + alpha[..., None, :]
    share, total = _softmax(z.copy(), None)
    log_psi = z - eta[..., None, :] * total + y @ t[..., :, None]
    top_phi, top_psi = (np.max(u, axis=-1, keepdims=True) for u in (log_phi, log_psi))
    phi, psi = np.exp(log_phi - top_phi), np.exp(log_psi - top_psi)
    # A quotient by the kernel must stay finite; what is smaller has no weight in its row.
    kernel = np.maximum(phi @ _swap(psi), tiny)

    logits = x @ _swap(y)
    approximate = np.log(kernel)
    approximate += top_phi
    approximate += _swap(top_psi)
    np.copyto(approximate, logits, where=~far)
    excess = logits - approximate
    exact_weights, exact_log = _softmax(logits, seen)
    weights, log = _softmax(approximate, seen)
    exact, out = exact_weights @ v, weights @ v

    difference = out - exact
    error, size = (
        np.maximum(np.sqrt(np.sum(u * u, axis=(-2, -1))), tiny**0.5) for u in (difference, exact)
    )
    divergence = np.einsum("...ij,...ij->...", exact_weights, excess)
    divergence += np.sum(log - exact_log, axis=(-2, -1))
    loss = error / size + DIVERGENCE / n * divergence

    # From here on backwards; d_u is the derivative by u.
    d_out = difference / (error * size)[..., None, None]
    d_log = d_out @ _swap(v)
    d_log -= np.sum(d_out * out, axis=-1, keepdims=True)
    d_log = d_log * weights
    weights -= exact_weights
    weights *= DIVERGENCE / n
    d_log += weights
    d_log *= far
    d_kernel = np.divide(d_log, kernel, out=d_log)
    d_phi = phi * (d_kernel @ psi)
    d_psi = psi * (_swap(d_kernel) @ phi)
    d_psi_row = np.sum(d_psi, axis=-1, keepdims=True)
    d_z = d_psi - eta[..., None, :] * share * d_psi_row
    gradient = Parameters(
        b=_swap(d_phi) @ x,
        beta=np.sum(d_phi, axis=-2),
        a=_swap(d_z) @ y,
        alpha=np.sum(d_z, axis=-2),
        eta=-np.sum(d_psi_row * total, axis=-2),
        t=np.sum(d_psi_row * y, axis=-2),
    )
    return loss, Parameters(*(map(_sum_to, gradient, (p.shape for p in parameters))))


def _sum_to(x: Floats, shape: tuple[int, ...]) -> Floats:
    """Sum over the axes along which an array of this shape was broadcast."""
    full = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(i for i, (k, wanted) in enumerate(zip(x.shape, full, strict=True)) if k != wanted)
    return np.asarray(np.sum(x, axis=axes, keepdims=True).reshape(shape))


def _float32(x: Any) -> Any:
    return np.asarray(x, dtype=np.float32)


def learn(
    parameters: Parameters,
    sequences: Sequence[Sample],
    pattern: Pattern,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    rng: np.random.Generator,
    callback: Callable[[int, float], None] | None,
) -> Parameters:
    """Adam on batches of sequences, drawn without replacement until all were seen.

    Gradients are taken in float32, for speed. Moments decay by 0.9 and 0.999. The callback is given
    each step and the mean loss of its batch.
    """
    current = [np.array(p) for p in parameters]
    narrow = [Sample(*(_float32(a) for a in sample)) for sample in sequences]
    first, second = ([np.zeros_like(p) for p in current] for _ in range(2))
    order: list[int] = []
    for step in range(1, steps + 1):
        total = [np.zeros_like(p) for p in current]
        losses = []
        now = Parameters(*map(_float32, current))
        for _ in range(min(batch_size, len(narrow))):
            order = order or list(rng.permutation(len(narrow)))
            loss, gradient = loss_and_gradient(now, narrow[order.pop()], pattern)
            losses.append(float(np.mean(loss)))
            for sum_of, g in zip(total, gradient, strict=True):
                sum_of += g
        for p, g, mean, square in zip(current, total, first, second, strict=True):
            g /= len(losses)
            mean += 0.1 * (g - mean)
            square += 0.001 * (g * g - square)
            rate = learning_rate / (1 - 0.9**step)
            p -= rate * mean / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        if callback is not None:
            callback(step, float(np.mean(losses)))
    return Parameters(*current)
