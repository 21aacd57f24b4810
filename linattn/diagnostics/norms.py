"""Before attention runs: how large the attended queries and keys are, which random maps pay for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _numerics
from linattn.diagnostics._shared import (
    Floats,
    check_tokens,
    evenly_spaced,
    softmax,
    weighted_percentiles,
)
from linattn.diagnostics.variance import PERCENTILES
from linattn.typing import Array
from linattn.typing.records import one_line

__all__ = ["AttendedNorms", "attended_norms"]


class AttendedNorms(NamedTuple):
    """Distribution of ``v = s |q + k|^2`` over pairs, weighted by attention.

    Attributes
    ----------
    percentiles : ndarray, (..., 5)
        Of v, of each head, at :data:`PERCENTILES`; NaN for a head that sees no key.
    logit_range : ndarray, (..., 2)
        Smallest and largest logit that is seen.
    num_features : ndarray, (...)
        Independent positive features with a relative standard deviation of 1/2 at the median pair,
        ``4 (e^v - 1)``: what FAVOR+ would take.

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = linattn.datasets.pretrained_qkv()
    >>> norms = linattn.diagnostics.attended_norms(query, key)
    >>> norms.percentiles.shape, norms.num_features.shape
    ((2, 12, 5), (2, 12))
    """

    percentiles: Floats
    logit_range: Floats
    num_features: Floats

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@_arrays.on_array_device
def attended_norms(
    query: Array,
    key: Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    key_mask: Array | None = None,
    num_samples: int = 128,
) -> AttendedNorms:
    r"""Size of attended pairs: the relative variance of one positive feature is ``e^v - 1``.

    .. math::
        v_{ij} = s\, |q_i + k_j|^2
        \quad \text{with weights} \quad
        p_{ij} = \mathrm{softmax}_j(s\, q_i \cdot k_j)

    Parameters
    ----------
    query, key : array, (..., L, d) and (..., S, d)
        Queries and keys, unscaled.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend.
    num_samples : int, optional
        Most queries, and most keys, that are used: evenly spaced ones, of the keys among those
        that are seen. Default 128.

    Returns
    -------
    AttendedNorms

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention` for the arrays; no token at all; NaN or inf.

    Notes
    -----
    For maps that take more than positive features, and for which heads they are not worth it,
    see :func:`relative_variance`. Time O(n^2 d) and memory O(n^2) a head, n = num_samples.

    References
    ----------
    Choromanski et al., "Rethinking Attention with Performers" (2021), Lemma 2: the variance of
    one positive feature.

    Examples
    --------
    >>> import linattn
    >>> query, key, _ = linattn.datasets.pretrained_qkv()
    >>> linattn.diagnostics.attended_norms(query, key).percentiles.shape
    (2, 12, 5)
    """
    num_samples = _checks.check_positive_int("num_samples", num_samples)
    x, y, mask = check_tokens(query, key, is_causal, key_mask)
    if 0 in x.shape or 0 in y.shape:
        raise ValueError(f"query and key must have a token, got shapes {x.shape} and {y.shape}")
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    queries = evenly_spaced(x.shape[-2], num_samples)
    keys = _sampled_keys(mask, num_samples)[..., None, :]
    visible = (keys >= 0) & (keys <= queries[:, None] if is_causal else True)
    lead = np.broadcast_shapes(y.shape[:-2], mask.shape[:-1])
    x, y = x[..., queries, :], np.broadcast_to(y, (*lead, *y.shape[-2:]))
    index = np.broadcast_to(np.swapaxes(keys, -1, -2), (*lead, keys.shape[-1], 1))
    y = np.take_along_axis(y, index, axis=-2)
    with _numerics.ignore_fp_warnings():
        logits = scale * (x @ np.swapaxes(y, -1, -2))
        square = np.sum(x * x, axis=-1)[..., :, None] + np.sum(y * y, axis=-1)[..., None, :]
        v = scale * square + 2 * logits
        weights = softmax(np.where(visible, logits, -np.inf))
        percentiles = weighted_percentiles(v, weights, PERCENTILES)
        low = np.min(np.where(visible, logits, np.inf), axis=(-2, -1))
        high = np.max(np.where(visible, logits, -np.inf), axis=(-2, -1))
        median = percentiles[..., PERCENTILES.index(50)]
        return AttendedNorms(percentiles, np.stack([low, high], axis=-1), 4 * np.expm1(median))


def _sampled_keys(mask: NDArray[np.bool_], num_samples: int) -> NDArray[np.intp]:
    """Positions of evenly spaced keys of those that are not masked, ``(..., n)``; -1 for none."""
    heads = mask.shape[:-1]
    count = min(num_samples, max(1, int(np.sum(mask, axis=-1).max(initial=0))))
    keys = np.full((*heads, count), -1, dtype=np.intp)
    for head in np.ndindex(heads):
        visible = np.flatnonzero(mask[head])
        visible = visible[evenly_spaced(len(visible), count)]
        keys[head][: len(visible)] = visible
    return keys
