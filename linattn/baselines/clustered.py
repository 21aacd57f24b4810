"""Queries in clusters, each of which attends once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT

__all__ = ["clustered", "improved_clustered"]


@_arrays.as_autocast("query", "key", "value")
def clustered(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_clusters: int,
    num_bits: int = 63,
    num_steps: int = 10,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention of the mean query of each of C clusters.

    .. math::
        o_i = \mathrm{softmax}(s \, \bar q_{c(i)} k^T) \, v, \qquad
        \bar q_c = \mathrm{mean} \{ q_i : c(i) = c \}

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    num_clusters : int
        C, at most L.
    num_bits, num_steps : int, optional
        Queries become the signs of so many random projections, and clusters are those of Lloyd's
        algorithm by Hamming distance, in so many steps. Default 63 and 10, as in the paper.
    is_causal : bool, optional
        Published for full attention: True is rejected, since a mean holds later queries.
    rng : int, numpy.random.Generator or None, optional
        Draws the projections, alike for all leading axes, and the first centroids.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention.

    Notes
    -----
    Multiplications for a head: ``C S (d + e) + L d B`` with B bits; Hamming distances,
    ``t L C`` of B bits, are no multiplications.

    Fails where queries of one direction differ in length: their weights differ in sharpness.

    References
    ----------
    Vyas et al., "Fast Transformers with Clustered Attention" (2020), equations (3) to (5),
    clusters of section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import clustered
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> clustered(query, key, value, num_clusters=8, rng=0).shape
    (8, 64, 16)
    """
    _shared.full_only("clustered", is_causal, "clusters hold later queries")
    inputs = _shared.prepare(query, key, value, scale)
    labels = _clusters(inputs.query, num_clusters, num_bits, num_steps, rng)
    centroids = _mean_queries(inputs, labels, num_clusters)
    outputs = _shared.attend(inputs._replace(query=centroids), inputs.key, inputs.value)
    return inputs.output(query, _to_queries(inputs, outputs, labels))


@_arrays.as_autocast("query", "key", "value")
def improved_clustered(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_clusters: int,
    num_keys: int = 32,
    num_bits: int = 63,
    num_steps: int = 10,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Clustered attention, with the weights of each cluster's k largest keys exact.

    With A the weights of the mean queries and T_c the k keys with the largest A_c,

    .. math::
        o_i = \sum_{j \in T_c} A_{cj} \cdot
        \sum_{j \in T_c} \mathrm{softmax}_{j \in T_c}(s \, q_i \cdot k_j) \, v_j
        + \sum_{j \notin T_c} A_{cj} v_j, \qquad c = c(i)

    Parameters
    ----------
    query, key, value, num_clusters, num_bits, num_steps, is_causal, rng, scale
        As in :func:`clustered`.
    num_keys : int, optional
        k, at most S. Default 32, as in the paper.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`clustered`.

    Notes
    -----
    Multiplications for a head: ``C S (d + e) + L d B + L k (d + e)``. Of keys whose weights are
    equal the first ones are taken.

    Never further from the true weights than :func:`clustered`, by their largest sum of differences
    in a row. Fails where the mean query does not see the keys that its members need.

    References
    ----------
    Vyas et al., "Fast Transformers with Clustered Attention" (2020), equations (6) to (8).

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import improved_clustered
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = improved_clustered(query, key, value, num_clusters=8, num_keys=64, rng=0)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    _shared.full_only("improved_clustered", is_causal, "clusters hold later queries")
    inputs = _shared.prepare(query, key, value, scale)
    xp, S = inputs.xp, inputs.lengths[1]
    k = _checks.check_positive_int("num_keys", num_keys, most=S)
    labels = _clusters(inputs.query, num_clusters, num_bits, num_steps, rng)
    by_cluster = inputs._replace(query=_mean_queries(inputs, labels, num_clusters))
    weights = _shared.softmax(_shared.logits_of(by_cluster), xp)
    order = np.argsort(-_arrays.to_numpy(weights), axis=-1, kind="stable")[..., :k]
    is_top = np.zeros(weights.shape, dtype=bool)
    np.put_along_axis(is_top, order, True, axis=-1)
    top = xp.where(inputs.array(is_top), weights, xp.zeros_like(weights))
    rest = xp.matmul(weights - top, inputs.value)
    share = xp.sum(top, axis=-1, keepdims=True)
    index = np.take_along_axis(order, labels[..., None], axis=-2)
    exact = _shared.attend_to(inputs, index)
    share, rest = (_to_queries(inputs, part, labels) for part in (share, rest))
    return inputs.output(query, share * exact + rest)


def _clusters(
    query: Array, num_clusters: int, num_bits: int, num_steps: int, rng: Seed
) -> NDArray[np.int64]:
    """Cluster of each query, ``(..., L)``: Lloyd's algorithm on signs of projections."""
    L, d = query.shape[-2:]
    C = _checks.check_positive_int("num_clusters", num_clusters, most=L)
    bits = _checks.check_positive_int("num_bits", num_bits)
    steps = _checks.check_positive_int("num_steps", num_steps)
    generator = as_generator(rng)
    projection = generator.standard_normal((d, bits))
    first = np.sort(generator.permutation(L)[:C])
    labels = []
    for (x,) in _shared.heads(query):
        signs = np.where(x @ projection > 0, 1.0, -1.0)
        centroids = signs[first]
        for _ in range(steps):
            nearest = np.argmax(signs @ centroids.T, axis=-1)
            sums = _shared.one_hot(nearest, C).T @ signs
            # A centroid without queries, and a bit without majority, stay as they are.
            centroids = np.where(sums == 0, centroids, np.sign(sums))
        labels.append(np.argmax(signs @ centroids.T, axis=-1))
    return np.reshape(labels, query.shape[:-1])


def _mean_queries(inputs: _shared.Inputs, labels: NDArray[np.int64], num: int) -> Array:
    """Mean query of each cluster, ``(..., C, d)``; 0 for one without queries."""
    members = _shared.one_hot(labels, num)
    means = members / np.maximum(members.sum(axis=-2, keepdims=True), 1)
    return inputs.xp.matmul(inputs.xp.matrix_transpose(inputs.array(means)), inputs.query)


def _to_queries(inputs: _shared.Inputs, rows: Array, labels: NDArray[np.int64]) -> Array:
    """Give each query the row ``(..., C, n)`` of its cluster."""
    xp, lead, (C, n) = inputs.xp, tuple(rows.shape[:-2]), rows.shape[-2:]
    flat = labels.reshape(math.prod(lead), -1) + C * np.arange(math.prod(lead))[:, None]
    taken = xp.take(xp.reshape(rows, (-1, n)), inputs.array(flat.ravel()), axis=0)
    return xp.reshape(taken, (*lead, labels.shape[-1], n))
