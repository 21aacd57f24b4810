"""Chunks that the work needs where the caller's are others: arrays are rechunked, results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from linattn.typing import Array, Problem
from linattn_dask.layout import map_lead

TOKENS = ("query", "key", "value")


def fitted(problem: Problem) -> Problem:
    """Problem with all heads of a map's parameters in one chunk, and windows in whole blocks."""
    heads = () if problem.feature_map is None else map_lead(problem)
    wanted: dict[int, Any] = {i: -1 for i, n in enumerate(reversed(heads), start=1) if n > 1}
    state = problem.state
    if state is not None:
        kvz, log_scale = (_rechunked(x, wanted, 2 - i) for i, x in enumerate(state[:2]))
        problem = problem.replace(state=state._replace(kvz=kvz, log_scale=log_scale))
    if problem.mode == "window" and problem.key.shape[-2]:
        wanted[0] = problem.exact.window
    return problem.replace(**{n: _rechunked(getattr(problem, n), wanted, 2) for n in TOKENS})


def _rechunked(array: Array, wanted: dict[int, Any], last_axes: int) -> Array:
    """Rechunk axes, counted back from the axis of tokens: -1 to one chunk, w to blocks of w."""
    chunks = {}
    for back, size in wanted.items():
        axis = array.ndim - last_axes - back
        if axis < 0:
            continue
        ends = np.cumsum(array.chunks[axis])
        whole = ends[-1:] if size == -1 else np.minimum(-(-ends // size) * size, ends[-1])
        chunks[axis] = tuple(np.diff(np.unique(whole), prepend=0).tolist())
    return array.rechunk(chunks, method="tasks") if chunks else array


def chunked_as_before(array: Array | None, problem: Problem, last_axes: int = 1) -> Array | None:
    """Chunk an output, with `last_axes` axes after the queries' axis, as the caller's arrays."""
    if array is None:
        return None
    chunks = list(array.chunks)
    rows = array.ndim - 1 - last_axes
    chunks[rows] = problem.query.chunks[-2]
    for tokens in (problem.value, problem.key, problem.query):
        if tokens is not problem.query and not tokens.shape[-2]:
            # Axes of no tokens have chunks that mean nothing.
            continue
        for axis, sizes in enumerate(tokens.chunks[:-2], start=rows - tokens.ndim + 2):
            if sum(sizes) > 1:
                chunks[axis] = sizes
    return array.rechunk(tuple(chunks), method="tasks")
