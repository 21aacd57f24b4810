"""A projection of FAVOR+ drawn for one sequence: rows where its queries and keys are.

Letters: ``C`` sampled tokens, ``m`` rows, ``d`` dim.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _dispatch, _numerics
from linattn.feature_maps._base import dots
from linattn.feature_maps._dask_rows import compute_rows
from linattn.feature_maps._landmark_fit import MIN_SAMPLED, Inputs, draw_heads, log_sum, strata

Floats = NDArray[Any]


def draw_projection(given: Inputs, m: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw m rows omega around sums of a query and a key that it attends to; their log weights."""
    size = max(16 * m, MIN_SAMPLED)
    key_strata, query_strata, query_order = generator.random((3, size))
    gumbel = generator.gumbel(size=(m, size))
    normal = generator.standard_normal((m, given.key.shape[-1]))
    given = compute_rows(given, size, generator)
    root = sqrt(given.scale)
    with _numerics.ignore_fp_warnings(), _dispatch.limited_threads():
        lead, heads = draw_heads(given, key_strata, query_strata)
        landmarks = []
        for query, key, log_weight in heads.values():
            drawn = np.resize(query[strata(len(query), query_order[:m])], (m, query.shape[-1]))
            logits = given.scale * dots(drawn, key) + gumbel[:, : len(key)] + log_weight
            landmarks.append(root * (drawn + key[np.argmax(logits, axis=-1)]))
        mu = np.reshape(landmarks, (*lead, *normal.shape))
        omega = mu + normal
        exponents = dots(omega, mu) - np.sum(mu * mu, axis=-1)[..., None, :] / 2
        log_weights = log(m) - log_sum(exponents, -1)[..., 0]
    return omega, log_weights
