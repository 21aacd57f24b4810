"""Attention by landmarks, exact for near keys and chosen clusters: quadratic, float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Float64 = npt.NDArray[np.float64]

__all__ = ["clustered_attention"]


@np.errstate(all="ignore")
def clustered_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    feature_map: Any,
    *,
    exact_clusters: int = 0,
    exact_window: int | None = None,
    key_mask: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
) -> Float64:
    """Attention by landmarks in quadratic time, with all weights of a query side by side.

    The weight of key j for query i is ``exp(s q_i.k_j)`` where j is near i or in one of the
    clusters that i has chosen, else ``g_j exp(s q_i.b_a)`` with a its landmark, as in
    `linattn.feature_maps.LandmarkFeatures`. Query i chooses the clusters with the largest
    ``s q_i.b_c + log(mean of g_j) + log(root mean square of |k_j - b_c|)``, means over the keys of
    the cluster, distances in the metric.

    Parameters
    ----------
    query : array_like, (..., L, d)
        Any real dtype; computed in float64.
    key, value : array_like, (..., S, d) and (..., S, e)
        The leading axes of query, key, value and map broadcast.
    feature_map : LandmarkFeatures
        Only its parameters are read: landmarks, probes, log_normalizers, metric, used and scale.
    exact_clusters : int
        c: a query chooses the c best clusters, and all that are as good as the last of them.
    exact_window : int, optional
        w: keys of a query's block of w tokens and of those beside it are exact.
    key_mask : array_like of bool, optional
        (S,), or what broadcasts to ``key.shape[:-1]``; True = attend.
    bias : array_like, (..., L, S), optional
        Log weight of each pair; the choice of clusters ignores it.

    Returns
    -------
    ndarray, (..., L, e), float64
        0 in rows that see no key.

    Notes
    -----
    Time O(L S d + S m (d^2 + p)) a head.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 4))
    >>> phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=8, rng=0)
    >>> given = query, key, value, phi
    >>> output = linattn.reference.clustered_attention(*given, exact_clusters=2)
    >>> bool(np.allclose(output, linattn.linear_attention(*given, exact_clusters=2)))
    True
    """
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (query, key, value))
    mask = np.ones(k.shape[:-1], dtype=bool) if key_mask is None else np.asarray(key_mask)
    mask = np.broadcast_to(mask, k.shape[:-1])
    parameters = {
        name: np.asarray(getattr(feature_map, name))
        for name in ("landmarks", "probes", "log_normalizers", "metric", "used")
    }
    axes = {"landmarks": 2, "probes": 2, "log_normalizers": 1, "metric": 2, "used": 1}
    leads = [a.shape[: a.ndim - axes[name]] for name, a in parameters.items()]
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v)), *leads)
    q, k, v = (np.broadcast_to(a, lead + a.shape[-2:]) for a in (q, k, v))
    mask = np.broadcast_to(mask, (*lead, k.shape[-2]))
    pairs = np.broadcast_to(0.0 if bias is None else bias, (*lead, q.shape[-2], k.shape[-2]))
    of_heads = {
        name: np.broadcast_to(a, lead + a.shape[a.ndim - axes[name] :])
        for name, a in parameters.items()
    }
    out = np.zeros((*lead, q.shape[-2], v.shape[-1]))
    for head in np.ndindex(lead):
        seen = np.flatnonzero(mask[head])
        of_head = {name: a[head] for name, a in of_heads.items()}
        logits = _logits(q[head], k[head][seen], of_head, feature_map.scale, exact_clusters)
        if exact_window is not None:
            apart = np.arange(len(q[head]))[:, None] // exact_window - seen // exact_window
            exact = feature_map.scale * q[head] @ k[head][seen].T
            logits = np.where(abs(apart) <= 1, exact, logits)
        logits = logits + pairs[head][:, seen]
        if len(seen):
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out[head] = weights @ v[head][seen] / weights.sum(axis=-1, keepdims=True)
    return out


def _logits(q: Float64, k: Float64, of_head: dict[str, Any], scale: float, count: int) -> Float64:
    """Log weight of every key for every query of one head, but for the window."""
    b, metric = of_head["landmarks"], of_head["metric"]
    valid = np.isfinite(of_head["log_normalizers"])
    probes, lognorm = of_head["probes"][valid], of_head["log_normalizers"][valid]
    assigned, log_g, distances = np.zeros(len(k), dtype=int), np.zeros(len(k)), np.zeros(len(k))
    for j, x in enumerate(k):
        squares = [(x - c) @ metric @ (x - c) for c in b]
        assigned[j] = np.argmin(np.where(of_head["used"], squares, np.inf))
        distances[j] = squares[assigned[j]]
        log_A = scale * probes @ x - lognorm
        log_Phi = scale * probes @ b[assigned[j]] - lognorm
        log_g[j] = np.logaddexp.reduce(log_A + log_Phi) - np.logaddexp.reduce(2 * log_Phi)
    by_landmark = scale * q @ b.T
    scores = np.full(by_landmark.shape, -np.inf)
    with np.errstate(divide="ignore"):
        for c in set(assigned):
            of = assigned == c
            log_mean = np.logaddexp.reduce(log_g[of]) - np.log(of.sum())
            scores[:, c] = by_landmark[:, c] + log_mean + np.log(distances[of].mean()) / 2
    last = np.sort(scores, axis=-1)[:, -min(count, len(b))] if count else np.full(len(q), np.inf)
    chosen = scores >= last[:, None]
    return np.where(chosen[:, assigned], scale * q @ k.T, by_landmark[:, assigned] + log_g)
