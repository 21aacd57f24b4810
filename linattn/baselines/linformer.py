"""Keys and values projected along the length."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT

__all__ = ["linformer"]


@_arrays.as_autocast("query", "key", "value")
def linformer(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_landmarks: int | None = None,
    projection: Array | Literal["mean", "random"] = "mean",
    value_projection: Array | None = None,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention to k mixtures of all keys.

    .. math::
        o = \mathrm{softmax}(s \, q (E k)^T) \, F v

    with E and F of shape (k, S), which mix along the length.

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    num_landmarks : int, optional
        k, at most S; needed where the projection is not given.
    projection : array (..., k, S), "mean" or "random", optional
        E. "mean", the default, takes the means of k runs of tokens whose lengths differ by at most
        one; "random" draws independent normal numbers of variance 1 / k.
    value_projection : array, (..., k, S), optional
        F. Default E.
    is_causal : bool, optional
        Published for full attention: True is rejected, since a mixture holds later tokens.
    rng : int, numpy.random.Generator or None, optional
        Draws a random projection, alike for all leading axes.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention; a projection for another length: E is learned
        for one length and serves no other.

    Notes
    -----
    Multiplications for a head: ``S k (d + e) + L k (d + e)``; means need none for the first term.

    Fails untrained: E and F are learned in the paper. Means lose sharp weights, and random mixtures
    keep products of vectors in the mean, not their exponentials.

    References
    ----------
    Wang et al., "Linformer: Self-Attention with Linear Complexity" (2020), equation (7); mean
    pooling and random matrices in sections 4 and 5.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import linformer
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = linformer(query, key, value, num_landmarks=64)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    _shared.full_only("linformer", is_causal, "projected keys hold later tokens")
    inputs = _shared.prepare(query, key, value, scale)
    xp, S = inputs.xp, inputs.lengths[1]
    if isinstance(projection, str):
        if projection not in ("mean", "random"):
            raise ValueError(f"projection must be an array, 'mean' or 'random', got {projection!r}")
        if num_landmarks is None:
            raise TypeError(f"num_landmarks must be given with projection={projection!r}, got None")
        count = _checks.check_positive_int("num_landmarks", num_landmarks, most=S)
        if projection == "mean":
            means = _shared.segment_means(S, count)
        else:
            means = as_generator(rng).standard_normal((count, S)) / math.sqrt(count)
        E = inputs.array(np.asarray(means))
    else:
        rows = getattr(projection, "shape", ())[-2:-1]
        E = _shared.check_matrix("projection", projection, inputs.key, (*(rows or (1,)), S))
        if not E.shape[-2]:
            raise ValueError(f"projection must have at least one row, got shape {tuple(E.shape)}")
    F = E
    if value_projection is not None:
        shape = (E.shape[-2], S)
        F = _shared.check_matrix("value_projection", value_projection, inputs.key, shape)
    mixed = xp.matmul(E, inputs.key), xp.matmul(F, inputs.value)
    return inputs.output(query, _shared.attend(inputs, *mixed))
