"""Many short runs of keys and queries side by side on an axis of runs: one causal block for all.

Each run is a line of its own, which begins with nothing. `window` reads them where queries see a
few keys beyond their windows.
"""

from __future__ import annotations

import array_api_compat
import numpy as np

from linattn import _generic
from linattn._driver.blocks import (
    in_map_coordinates,
    raw_tokens,
    rows_at,
    split,
    values_and_one_block,
)
from linattn._driver.causal_blocks import causal_block
from linattn._driver.lines import Line, weighed_rows
from linattn._generic.loops import Integers, Run
from linattn.typing import Array, Partial

MOST = np.iinfo(np.int64).max
"""Number of no token."""


def read_short_runs(line: Line, runs: list[Run]) -> list[Partial]:
    """Read every run; its rows in their order in the problem.

    ``line``: of a problem whose specs take blocks. O(r n m (d + e)) time for r runs, the longest of
    n keys and queries.
    """
    problem, xp = line.problem, line.problem.xp
    size = max(len(run.keys) + len(run.queries) for run in runs)
    firsts = (np.concatenate([run[side] for run in runs]).min(initial=MOST) for side in (0, 1))
    # Where no token stands is another one of the runs', so that few tokens are taken.
    keys, queries = (np.full((len(runs), size), first % MOST) for first in firsts)
    is_key = np.zeros((len(runs), size), bool)
    places = []
    for i, run in enumerate(runs):
        # Each key and each query has a place of its own: a query after the keys that it reads.
        place = run.stops + np.arange(len(run.queries))
        at = np.delete(np.arange(len(run.keys) + len(run.queries)), place)
        keys[i, at], queries[i, place], is_key[i, at] = run.keys, run.queries, True
        places.append(place[np.argsort(run.queries)])

    near = slice(int(keys.min()), int(keys.max()) + 1)
    rows = slice(int(queries.min()), int(queries.max()) + 1)

    def gathered(x: Array, index: Integers) -> Array:
        return split(rows_at(x, index.ravel()), size)

    key, values = raw_tokens(problem, "key", near, line.start), values_and_one_block(problem, near)
    key = key.each(lambda x: gathered(x, keys - near.start))
    mask = xp.asarray(is_key[..., None], device=array_api_compat.device(problem.key))
    weight = xp.zeros_like(key.x[..., :1]) if key.log_weight is None else key.log_weight
    weight = xp.where(mask, weight, xp.full_like(weight, -float("inf")))
    key = key._replace(x=xp.where(mask, key.x, xp.zeros_like(key.x)), log_weight=weight)
    values = gathered(values, keys - near.start)
    values = xp.where(mask, values, xp.zeros_like(values))
    query = raw_tokens(problem, "query", rows, line.start)
    query = query.each(lambda x: gathered(x, queries - rows.start))
    lead, state_lead = (*problem.lead, len(runs)), (*problem.state_lead, len(runs))
    problem = problem.replace(lead=lead, state_lead=state_lead)
    query = in_map_coordinates(problem, "query", query)
    key = in_map_coordinates(problem, "key", key)
    nothing = _generic.empty_state(state_lead, problem.num_features, values.shape[-1] - 1, values)
    part, _ = causal_block(problem, line.functions, query, key, values, nothing)
    if line.bias is not None:
        part = weighed_rows(part, line.bias[..., None, :])
    log = xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
    each = part.num_den, log
    return [
        Partial(*(rows_at(x[..., i, :, :], place) for x in each)) for i, place in enumerate(places)
    ]
