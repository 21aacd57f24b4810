"""Exact softmax attention from files, a block of queries and a block of keys at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import EluFeatures
from linattn.stream._inputs import Inputs, release_pages
from linattn.typing import Array, State

__all__ = ["ExactInputs", "ExactMap", "attend_exactly"]

KEYS = 16384
"""Keys of a block."""


class ExactMap(EluFeatures):
    """In the place of a feature map, where attention is exact: no state has anything in it."""

    def fingerprint(self) -> str:
        """Tell checkpoints of exact attention from others."""
        return "exact softmax attention"


class ExactInputs(Inputs):
    """The arguments of a call, whose blocks are attended to exactly."""

    def attention(self, queries: slice, keys: slice, state: State | None) -> tuple[Array, State]:
        """Attend with some queries to all keys that they see; the state stays what it was."""
        if state is None or queries.start == queries.stop:
            return super().attention(queries, keys, state)
        query = self.rows("query", queries)
        query = query.astype(np.result_type(query.dtype, np.float32), copy=False)
        return attend_exactly(self, query, np.arange(queries.start, queries.stop)), state

    def add(self, state: State, rows: slice) -> State:
        """Return the state: keys are read with the queries."""
        return state


def attend_exactly(
    inputs: Inputs, query: NDArray[Any], positions: NDArray[np.intp], block_size: int = KEYS
) -> NDArray[Any]:
    """Return exact rows of queries at these positions, in the dtype of the queries."""
    length = inputs.key.shape[-2]
    if inputs.is_causal:
        length = min(length, int(positions[-1]) + 1)
    exact = None
    # A block without keys, where there are none, gives rows of 0.
    for start in range(0, max(1, length), block_size):
        keys = slice(start, min(start + block_size, length))
        stops = np.clip(positions + 1 - start, 0, keys.stop - start)
        part = linattn.softmax_attention(
            query,
            *(inputs.rows(name, keys).astype(query.dtype) for name in ("key", "value")),
            key_stop=stops if inputs.is_causal else None,
            return_log_normalizer=True,
            **inputs.weights_of(keys),
        )
        exact = part if exact is None else linattn.merge_outputs([exact, part])
        release_pages(inputs.query, inputs.key, inputs.value)
    assert exact is not None
    return np.asarray(exact[0])
