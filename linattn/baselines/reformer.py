"""Attention among tokens of one hash bucket."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT

__all__ = ["reformer"]

Index = NDArray[np.int64]


@_arrays.as_autocast("query", "key", "value")
def reformer(
    query: ArrayT,
    key: Array | None,
    value: Array,
    *,
    num_buckets: int,
    num_rounds: int = 4,
    chunk_size: int | None = None,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention among tokens that a random rotation puts into one bucket.

    .. math::
        h(x) = \arg\max [x R; -x R], \qquad S_i = \bigcup_r \{ j : h_r(q_i) = h_r(k_j),
        \; j \text{ in the chunk of } i \text{ or the one before} \}

    where R has b / 2 columns of independent normal numbers, tokens are sorted by bucket and then by
    position, and chunks are runs of c tokens in that order.

    Parameters
    ----------
    query, value, scale
        As in :func:`local_window`.
    key : array (..., L, d), or None
        None, as published, shares queries and keys: ``k_j = q_j / |q_j|``, and a token sees
        itself only where it sees nothing else. With keys of their own, queries and keys are sorted
        each for themselves.
    num_buckets : int
        b, even.
    num_rounds : int, optional
        Rounds r of hashing, each with a rotation of its own. Default 4.
    chunk_size : int, optional
        c. Default ``2 L / b``, rounded up, as in the paper.
    is_causal : bool, optional
        Whether query i sees no key after i. As published, later tokens still have a say in where
        chunks end, and so in which of the earlier ones it sees. Default False.
    rng : int, numpy.random.Generator or None, optional
        Draws the rotations, alike for all leading axes.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query; 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; an odd number of buckets.

    Notes
    -----
    Multiplications for a head: ``r L (2 c (d + e) + d b / 2)`` at most. A key that several rounds
    find counts once, as the weights 1 / N_ij of the paper have it.

    Fails with queries and keys that are not shared: they lie in different directions, and then
    seldom in one bucket. Sharp weights need many rounds.

    References
    ----------
    Kitaev et al., "Reformer: The Efficient Transformer" (2020), equations (2) to (6).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import reformer
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> reformer(query, None, value, num_buckets=8, rng=0).shape
    (8, 64, 16)
    """
    is_shared = key is None
    b = _checks.check_positive_int("num_buckets", num_buckets, least=2)
    if b % 2:
        raise ValueError(
            f"num_buckets must be even, got {b}: buckets come in pairs of opposite signs"
        )
    rounds = _checks.check_positive_int("num_rounds", num_rounds)
    inputs = _shared.prepare(query, query if key is None else key, value, scale, aligned=True)
    if is_shared:
        norm = inputs.xp.sqrt(inputs.xp.sum(inputs.key**2, axis=-1, keepdims=True))
        unit = inputs.key / inputs.xp.where(norm == 0, inputs.xp.ones_like(norm), norm)
        inputs = inputs._replace(key=unit)
    length = inputs.lengths[1]
    size = -(-2 * length // b) if chunk_size is None else chunk_size
    c = min(_checks.check_positive_int("chunk_size", size), length)
    causal = _checks.check_flag("is_causal", is_causal)
    dim = inputs.query.shape[-1]
    rotations = as_generator(rng).standard_normal((rounds, dim, b // 2))
    found = []
    for q, k in _shared.heads(inputs.query, inputs.key):
        index = np.concatenate([_candidates(q, k, rotation, c) for rotation in rotations], axis=-1)
        if causal:
            index = np.where(index <= np.arange(length)[:, None], index, -1)
        found.append(_without_itself(_distinct(index)) if is_shared else _distinct(index))
    index = np.reshape(found, (*inputs.query.shape[:-2], length, -1))
    return inputs.output(query, _shared.attend_to(inputs, index))


def _candidates(
    q: NDArray[np.float64], k: NDArray[np.float64], rotation: NDArray[np.float64], size: int
) -> Index:
    """Keys of each query in one round, ``(L, 2 c)``; -1 for none."""
    length = len(q)
    (q_bucket, q_order), (k_bucket, k_order) = (_sorted_buckets(x @ rotation) for x in (q, k))
    places = np.arange(length)[:, None] // size * size + np.arange(-size, size)
    inside = (places >= 0) & (places < length)
    keys = np.where(inside, k_order[np.clip(places, 0, length - 1)], -1)
    index = np.empty_like(keys)
    index[q_order] = np.where(k_bucket[keys] == q_bucket[q_order][:, None], keys, -1)
    return index


def _sorted_buckets(projected: NDArray[np.float64]) -> tuple[Index, Index]:
    """Bucket of each token, and the tokens in the order of buckets, then of positions."""
    bucket = np.argmax(np.concatenate([projected, -projected], axis=-1), axis=-1)
    return bucket, np.argsort(bucket, kind="stable")


def _distinct(index: Index) -> Index:
    """Sort the keys of each query, with -1 for repetitions."""
    index = np.sort(index, axis=-1)
    repeated = np.zeros(index.shape, dtype=bool)
    repeated[:, 1:] = index[:, 1:] == index[:, :-1]
    return np.where(repeated, -1, index)


def _without_itself(index: Index) -> Index:
    """Take a token out of its own list, unless it is alone there."""
    itself = index == np.arange(len(index))[:, None]
    alone = np.sum(index >= 0, axis=-1, keepdims=True) <= 1
    return np.where(itself & ~alone, -1, index)
