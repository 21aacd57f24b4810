"""Attention of Dask arrays: a graph of a few tasks for each block, nothing computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from linattn.typing import Array, Declined, Problem, State
from linattn_dask.blocks import causal_block, read_block
from linattn_dask.exact import softmax_attention
from linattn_dask.fitted import chunked_as_before, fitted
from linattn_dask.layout import Layout, Part, depends_on_position
from linattn_dask.short import declined, short
from linattn_dask.states import (
    AXES,
    all_states,
    block_states,
    first_state,
    lazy_state,
    states_before,
)
from linattn_dask.stops import aligned
from linattn_dask.window import window_attention

Result: TypeAlias = tuple[Array, State | None, Array | None]


def attention(problem: Problem) -> Result | Declined:
    """Attend to keys lazily, block by block of the caller's chunks."""
    mode = problem.mode
    if problem.exact.sinks:
        return short("sinks", problem)
    if mode == "window" and not problem.key.shape[-2]:
        mode = "full"
    of_offsets = problem.sees.local_window is not None or problem.weights.relative_bias is not None
    decays_to_both_sides = problem.weights.log_decay is not None and not problem.sees.is_causal
    unsupported = {
        "exact": of_offsets or problem.sees.key_stop is not None,
        "window": decays_to_both_sides
        or problem.exact.clusters is not None
        or problem.sees.key_stop is not None
        or problem.sees.query_start != 0
        or problem.query.shape[-2] != problem.key.shape[-2],
    }
    by_stops = mode == "stops" and not depends_on_position(problem)
    if not by_stops and (mode not in WALKS or unsupported.get(mode, False)):
        return declined(problem)
    fit = fitted(problem)
    output, state, norm = _stops(fit) if by_stops else WALKS[mode](Layout(fit))
    return chunked_as_before(output, problem), state, chunked_as_before(norm, problem, 0)


def _full(layout: Layout) -> Result:
    state = all_states(layout)
    parts = layout.parts("query", "feature_map") | {"state": Part(state, AXES)}
    parts |= layout.starts(layout.query_chunks, "rows")
    output, norm = layout.outputs(read_block, "rows", layout.query_chunks, parts)
    return output, lazy_state(layout, state), norm


def _causal(layout: Layout, key_stop: Part | None = None) -> Result:
    if key_stop is None:
        layout.check_rows()
    before, last = states_before(layout, block_states(layout.reading_again()), first_state(layout))
    names = ("key", "value", "key_mask", "key_bias", "log_decay", "feature_map")
    parts = layout.parts(*names)
    parts["query"] = layout.part("query", ("keys", "dim"))
    parts["state"] = Part(before, ("keys", *AXES[1:]))
    parts |= layout.starts(layout.key_chunks, "keys")
    if key_stop is not None:
        parts["key_stop"] = key_stop
    output, norm = layout.outputs(causal_block, "keys", layout.query_chunks, parts)
    return output, lazy_state(layout, last), norm


def _stops(problem: Problem) -> Result:
    along = aligned(problem)
    return _causal(along.layout, along.key_stop)


WALKS: dict[str, Callable[[Layout], Result]] = {
    "full": _full,
    "causal": _causal,
    "exact": softmax_attention,
    "window": window_attention,
}
"""By the mode of the problem."""
