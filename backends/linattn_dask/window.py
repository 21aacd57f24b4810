"""An exact window: each block with the rows beside it, and the states of all that is far."""

from __future__ import annotations

import dask.array as da
import numpy as np

from linattn.typing import Array, State
from linattn_dask.blocks import end_of_block, far_block, window_block
from linattn_dask.layout import Layout, Part
from linattn_dask.states import (
    AXES,
    all_states,
    first_state,
    lazy_state,
    merge,
    state_axes,
    states_before,
)

__all__ = ["window_attention"]

BESIDE = ("keys", "beside")


def window_attention(layout: Layout) -> tuple[Array, State, Array | None]:
    """Attend to near keys exactly: blocks of the window begin at the first token."""
    problem = layout.problem
    layout.check_rows()
    _check_window(layout)
    rows = layout.parts("key", "value", "key_mask", "key_bias")
    states = {"feature_map": layout.part("feature_map"), **rows}
    previous = _beside(layout, rows, before=True)
    far_states = _far_states(layout, states | {"before": previous})
    before, _ = states_before(layout, far_states, first_state(layout))
    parts = states | {"before": previous, "query": layout.part("query", ("keys", "dim"))}
    if not problem.is_causal:
        following = _beside(layout, rows, before=False)
        parts["after"] = following
        far_states = _far_states(layout, states | {"after": following})
        nothing = first_state(layout, with_given=False)
        after, _ = states_before(layout, far_states, nothing, from_the_end=True)
        before = merge(layout, before, after)
    parts["state"] = Part(before, ("keys", *AXES[1:]))
    output, norm = layout.outputs(
        window_block,
        "keys",
        layout.key_chunks,
        parts,
        window=layout.window,
        is_causal=problem.is_causal,
    )
    return output, lazy_state(layout, all_states(layout)), norm


def _check_window(layout: Layout) -> None:
    window, chunks = layout.window, layout.key_chunks
    if (np.cumsum(chunks)[:-1] % window).any() or (len(chunks) > 1 and 0 in chunks):
        message = (
            f"query, key and value must be in chunks of whole blocks of exact_window, {window} "
            f"rows, got chunks {chunks[:6]}; use rechunk({{-2: n * {window}}})"
        )
        raise ValueError(message)


def _beside(layout: Layout, rows: dict[str, Part], *, before: bool) -> Part:
    """Return rows that each block sees of the one before or after it, all arrays side by side."""
    window, chunks = layout.window, layout.key_chunks
    lengths = tuple(min(window, rows) for rows in chunks)
    width = sum(part.array.shape[-1] for part in rows.values()) + 1
    dtype = layout.problem.key.dtype

    def side(lengths: tuple[int, ...], parts: dict[str, Part], last: bool | None) -> Array:
        axes = {"keys": lengths, "beside": (width,)}
        lead = layout.key_lead
        return layout.blockwise(
            end_of_block, axes, lead, parts, dtype=dtype, window=window, last=last
        )

    nothing = side((1,), layout.without_rows(*rows), None)
    if len(chunks) == 1:
        return Part(nothing, BESIDE)
    ends = side(lengths, rows, before)
    length = sum(lengths)
    moved = [nothing, ends[..., : length - lengths[-1], :]]
    if not before:
        moved = [ends[..., lengths[0] :, :], nothing]
    return Part(da.concatenate(moved, axis=ends.ndim - 2), BESIDE)


def _far_states(layout: Layout, parts: dict[str, Part]) -> Array:
    """States of blocks that are moved by a window, as they are far of the block after them."""
    axes = {"keys": (1,) * len(layout.key_chunks), **state_axes(layout)}
    return layout.blockwise(far_block, axes, layout.key_lead, parts, window=layout.window)
