"""Attention of Dask arrays: a graph of a few tasks for each block, nothing computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from linattn.typing import Array, Declined, Problem, State
from linattn_dask.blocks import causal_block, read_block
from linattn_dask.layout import Layout, Part
from linattn_dask.states import (
    AXES,
    block_states,
    first_state,
    lazy_state,
    merge,
    reduce_states,
    states_before,
)

__all__ = ["attention"]

Result: TypeAlias = tuple[Array, State | None, Array | None]


def attention(problem: Problem) -> Result | Declined:
    """Attend to keys lazily, block by block of the caller's chunks."""
    walk = WALKS.get(problem.mode)
    if walk is None:
        return Declined(f"mode {problem.mode}")
    return walk(Layout(problem))


def _full(layout: Layout) -> Result:
    problem = layout.problem
    state = first_state(layout)
    if problem.key.shape[-2]:
        keys = reduce_states(layout, block_states(layout))
        state = keys if problem.state is None else merge(layout, state, keys)
    parts = layout.parts("query", "feature_map") | {"state": Part(state, AXES)}
    parts |= layout.starts(layout.query_chunks, "rows")
    output, norm = _outputs(layout, read_block, "rows", layout.query_chunks, parts)
    return output, lazy_state(layout, state), norm


def _causal(layout: Layout) -> Result:
    if layout.query_chunks != layout.key_chunks:
        raise layout.differing_rows()
    before, last = states_before(layout, block_states(layout), first_state(layout))
    names = ("key", "value", "key_mask", "key_bias", "log_decay", "feature_map")
    parts = layout.parts(*names)
    parts["query"] = layout.part("query", ("keys", "dim"))
    parts["state"] = Part(before, ("keys", *AXES[1:]))
    parts |= layout.starts(layout.key_chunks, "keys")
    output, norm = _outputs(layout, causal_block, "keys", layout.key_chunks, parts)
    return output, lazy_state(layout, last), norm


def _outputs(
    layout: Layout, function: Any, axis: str, chunks: tuple[int, ...], parts: dict[str, Part]
) -> tuple[Array, Array | None]:
    """Make outputs of blocks, and their log normalizers where they are asked for."""
    problem = layout.problem
    e, want_log = problem.value.shape[-1], problem.want_log
    dtype = problem.dtype if want_log else problem.query.dtype
    axes = {axis: chunks, "outputs": (e + want_log,)}
    output = layout.blockwise(function, axes, layout.lead, parts, dtype=dtype, want_log=want_log)
    if not want_log:
        return output, None
    return output[..., :e].astype(problem.query.dtype, copy=False), output[..., e]


WALKS: dict[str, Callable[[Layout], Result]] = {"full": _full, "causal": _causal}
"""By the mode of the problem."""
