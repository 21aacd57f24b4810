"""Attention within clusters of queries and keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT

__all__ = ["routing"]

Float64 = NDArray[np.float64]


@_arrays.as_autocast("query", "key", "value")
def routing(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_clusters: int,
    cluster_size: int | None = None,
    num_steps: int = 10,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention within k clusters of w queries and w keys each.

    Queries and keys are normalized to mean 0 and variance 1 over the coordinates, and each of k
    centroids takes the w queries and the w keys with the largest products with it:

    .. math::
        o_i = \operatorname{mean}_{c : i \in Q_c} \sum_{j \in K_c}
        \mathrm{softmax}_{j \in K_c}(s \, q_i \cdot k_j) \, v_j

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`. Logits are those of the inputs as they came.
    num_clusters : int
        k, at most L.
    cluster_size : int, optional
        w, at most L. Default ``L / k``, rounded up, as in the paper.
    num_steps : int, optional
        Centroids are the means of the normalized queries and keys next to them, by product, in so
        many steps. Default 10. The paper moves them a little with each batch of training.
    is_causal : bool, optional
        Whether query i sees no key after i. As published, later tokens still have a say in who is
        a member, and so in which of the earlier ones it sees. Default False.
    rng : int, numpy.random.Generator or None, optional
        Draws the first centroids, k of the 2 L queries and keys.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query; 0 for a query that no centroid takes, or
        that sees no key in any of its clusters. Causal means are over clusters where it sees one.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`.

    Notes
    -----
    Multiplications for a head: ``k w^2 (d + e) + 2 L k d (1 + t)`` with t steps.

    Fails where queries and keys lie apart, since centroids are then near the ones or the others,
    and for the queries that no centroid takes.

    References
    ----------
    Roy et al., "Efficient Content-Based Sparse Attention with Routing Transformers" (2021),
    equation (8) and algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import routing
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> routing(query, key, value, num_clusters=8, rng=0).shape
    (8, 64, 16)
    """
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    causal = _checks.check_flag("is_causal", is_causal)
    xp, length = inputs.xp, inputs.lengths[1]
    k = _checks.check_positive_int("num_clusters", num_clusters, most=length)
    size = -(-length // k) if cluster_size is None else cluster_size
    w = _checks.check_positive_int("cluster_size", size, most=length)
    steps = _checks.check_positive_int("num_steps", num_steps)
    first = as_generator(rng).permutation(2 * length)[:k]
    members = []
    for head in _shared.heads(inputs.query, inputs.key):
        q, key_rows = (_normalized(x) for x in head)
        centroids = _centroids(np.concatenate([q, key_rows]), first, steps)
        members.append([_largest(centroids @ x.T, w) for x in (q, key_rows)])
    queries, keys = np.moveaxis(np.array(members), 1, 0)  # each (H, k, w)

    num_heads, (d, e) = len(members), (inputs.query.shape[-1], inputs.value.shape[-1])
    of_head = length * np.arange(num_heads)[:, None, None]

    def rows(x: Array, index: NDArray[np.int64], dim: int) -> Array:
        places = inputs.array((index + of_head).ravel())
        taken = xp.take(xp.reshape(x, (num_heads * length, dim)), places, axis=0)
        return xp.reshape(taken, (num_heads, k, w, dim))

    q = rows(inputs.query, queries, d)
    logits = xp.matmul(q, xp.matrix_transpose(rows(inputs.key, keys, d)))
    seen = np.ones((num_heads, k, w, w), dtype=bool)
    if causal:
        seen = keys[..., None, :] <= queries[..., None]
        logits = xp.where(inputs.array(seen), logits, xp.full_like(logits, -xp.inf))
    outputs = xp.matmul(_shared.softmax(logits, xp), rows(inputs.value, keys, e))
    slots = _slots(queries, np.any(seen, axis=-1), length)
    return inputs.output(query, _mean_of_slots(inputs, outputs, slots))


def _normalized(x: Float64) -> Float64:
    centred = x - x.mean(axis=-1, keepdims=True)
    size = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    return np.asarray(centred / np.where(size == 0, 1.0, size))


def _centroids(x: Float64, first: NDArray[np.int64], steps: int) -> Float64:
    """Means of the tokens next to each centroid, by product; one without tokens stays."""
    centroids = x[first]
    for _ in range(steps):
        members = _shared.one_hot(np.argmax(x @ centroids.T, axis=-1), len(first))
        count = members.sum(axis=0)[:, None]
        means = _normalized(members.T @ x / np.maximum(count, 1))
        centroids = np.where(count > 0, means, centroids)
    return centroids


def _largest(scores: Float64, num: int) -> NDArray[np.int64]:
    """Positions of the largest scores of each row, in the order of the sequence."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :num]
    return np.asarray(np.sort(order, axis=-1))


def _slots(queries: NDArray[np.int64], sees: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """Rows of the clusters' outputs that belong to each query, ``(H, L, most)``; -1 for none.

    A cluster in which a query sees no key has none for it.
    """
    num_heads = len(queries)
    flat, seeing = (x.reshape(num_heads, -1) for x in (queries, sees))
    most = max(
        int(np.bincount(i[s], minlength=length).max()) for i, s in zip(flat, seeing, strict=True)
    )
    slots = np.full((num_heads, length, max(most, 1)), -1)
    filled = np.zeros((num_heads, length), dtype=int)
    for head, members in enumerate(flat):
        for slot in np.flatnonzero(seeing[head]):
            i = members[slot]
            slots[head, i, filled[head, i]] = slot + head * flat.shape[-1]
            filled[head, i] += 1
    return slots


def _mean_of_slots(inputs: _shared.Inputs, outputs: Array, slots: NDArray[np.int64]) -> Array:
    """Mean of the rows that belong to each query, 0 where there are none."""
    xp, e = inputs.xp, outputs.shape[-1]
    share = (slots >= 0) / np.maximum(np.sum(slots >= 0, axis=-1, keepdims=True), 1)
    flat = xp.reshape(outputs, (-1, e))
    taken = xp.take(flat, inputs.array(np.maximum(slots, 0).ravel()), axis=0)
    rows = xp.reshape(taken, (*slots.shape, e)) * inputs.array(share)[..., None]
    lead = tuple(inputs.query.shape[:-2])
    return xp.reshape(xp.sum(rows, axis=-2), (*lead, slots.shape[1], e))
