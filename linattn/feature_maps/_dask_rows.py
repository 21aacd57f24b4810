"""The rows of Dask arrays that a map is fitted to: a sample, and nothing else is computed.

Rows are taken in runs, so that few chunks are computed for them, and by their positions alone, so
that they are the same ones whatever the chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import array_api_compat
import numpy as np

from linattn import _arrays
from linattn.typing import Array

if TYPE_CHECKING:
    from linattn.feature_maps._landmark_fit import Inputs

NUM_RUNS, MIN_NUM_ROWS = 128, 8192


def compute_rows(given: Inputs, num_rows: int, generator: np.random.Generator) -> Inputs:
    """Compute rows of Dask arrays: of query and of key at least `num_rows`, or all unmasked ones.

    Arrays of other libraries are returned unchanged.
    """
    if not array_api_compat.is_dask_array(given.query):
        return given
    of_query = draw_runs(given.query, given.query_mask, num_rows, generator)
    of_key = draw_runs(given.key, given.key_mask, num_rows, generator)
    of = {name: of_query if name.startswith("query") else of_key for name in given._fields[3:]}
    taken = [
        None if x is None else take_runs(x, runs)
        for x, runs in zip(given[3:], of.values(), strict=True)
    ]
    found = given._replace(**dict(zip(of, compute_on_host(taken), strict=True)))
    xp = array_api_compat.array_namespace(found.query)
    return found._replace(xp=xp, dtype=_arrays.accumulation_dtype(xp, found.query.dtype, None))


def compute_sequence(arrays: list[Array], generator: np.random.Generator) -> list[Array]:
    """Compute rows of Dask arrays, in order: of the query, and the same ones of key and value.

    Key and value have rows beside those of the query where lengths are the same. Arrays of other
    libraries are returned unchanged.
    """
    if not array_api_compat.is_dask_array(arrays[0]):
        return arrays
    query, *of_keys = arrays
    of_query = of_key = draw_runs(query, None, 0, generator)
    if query.shape[-2] != of_keys[0].shape[-2]:
        of_key = draw_runs(of_keys[0], None, 0, generator)
    return compute([take_runs(query, of_query), *(take_runs(x, of_key) for x in of_keys)])


def draw_runs(
    x: Array, mask: Array | None, num_rows: int, generator: np.random.Generator
) -> list[slice]:
    """Draw a run of rows from each of equal strata of those that a head can see, or take all.

    All runs together have at least `num_rows` rows. A run that reaches the end of its stratum
    continues at its beginning, so that all rows have the same odds. Masked rows within a run are
    included, unless they are longer than a run.
    """
    run = -(-max(num_rows, MIN_NUM_ROWS) // NUM_RUNS)
    noise = generator.random(NUM_RUNS)
    length = int(x.shape[-2])
    if length <= run * NUM_RUNS:
        return [slice(None)]
    rows = np.arange(length)
    if mask is not None:
        xp = array_api_compat.array_namespace(mask)
        # Whatever the heads, one bool a token is all that comes.
        (visible,) = compute_on_host([xp.any(mask, axis=(*range(mask.ndim - 2), mask.ndim - 1))])
        rows = np.flatnonzero(visible)
    if not len(rows):
        return [slice(1)]
    ranks = np.arange(len(rows))
    if len(rows) > run * NUM_RUNS:
        edges = np.arange(NUM_RUNS + 1) * len(rows) // NUM_RUNS
        strata = np.diff(edges)
        offsets = (noise * strata).astype(np.intp)[:, None] + np.arange(run)
        ranks = (edges[:-1, None] + np.sort(offsets % strata[:, None], axis=-1)).ravel()
        rows = rows[ranks]
    ends_here = (np.diff(ranks, append=-1) != 1) | (np.diff(rows, append=-1) > run)
    ends_here[run - 1 :: run] = True
    last = np.flatnonzero(ends_here)
    first = np.concatenate([[0], last[:-1] + 1])
    return [slice(int(i), int(j) + 1) for i, j in zip(rows[first], rows[last], strict=True)]


def take_runs(x: Array, runs: list[slice]) -> Array:
    """Take runs of rows; by slices, because Dask's expressions take no arrays of indices."""
    return array_api_compat.array_namespace(x).concat([x[..., run, :] for run in runs], axis=-2)


def compute(arrays: Iterable[Any]) -> list[Any]:
    """Values of Dask arrays, in the library of their chunks; shared parts are computed once."""
    # It has been imported: there are arrays of it.
    return list(sys.modules["dask"].compute(*arrays))


def compute_on_host(arrays: Iterable[Any]) -> list[Any]:
    """Values of Dask arrays as NumPy's."""
    return [None if a is None else _arrays.to_numpy(a) for a in compute(arrays)]
