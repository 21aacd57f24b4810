"""An exact window: each block with the rows beside it, and the states of all that is far."""

from __future__ import annotations

from typing import Any

from linattn.typing import Array, State
from linattn_dask.block_windows import (
    EdgeShape,
    edge_of_block,
    edge_of_state,
    merge_edges,
    scan_edges,
    window_block,
)
from linattn_dask.layout import Layout, Part
from linattn_dask.states import (
    AXES,
    all_states,
    first_state,
    grouped_scan,
    lazy_state,
    ones,
    prefix_scan,
    state_axes,
)

ROWS = ("key", "value", "key_mask", "key_bias", "log_decay")


def window_attention(layout: Layout) -> tuple[Array, State, Array | None]:
    """Attend to near keys exactly: blocks of the window begin at the first token."""
    problem = layout.problem
    layout.check_rows()
    shape = _edge_shape(layout)
    of_blocks = ("keys", *AXES[1:])
    parts = layout.parts(*ROWS, "feature_map", "relative_bias")
    parts["query"] = layout.part("query", ("keys", "dim"))
    parts["before"] = Part(_edges(layout, shape), of_blocks)
    if not problem.sees.is_causal:
        parts["after"] = Part(_edges(layout, shape, from_the_end=True), of_blocks)
    options = {"shape": shape, "is_causal": problem.sees.is_causal}
    output, norm = layout.outputs(window_block, "keys", layout.key_chunks, parts, **options)
    last = all_states(layout.reading_again("states"))
    return output, lazy_state(layout, last), norm


def _edge_shape(layout: Layout) -> EdgeShape:
    rows = {n: part for n, part in layout.parts(*ROWS).items() if "keys" in part.axes}
    (features,), (packed,) = state_axes(layout).values()
    widths = tuple(part.array.shape[-1] for part in rows.values())
    return EdgeShape(tuple(rows), widths, layout.window, features, packed)


def _edges(layout: Layout, shape: EdgeShape, *, from_the_end: bool = False) -> Array:
    """Edges of all that is before each block, or after it, ``(..., blocks, 1, numbers)``."""
    last_axes = {"features": (1,), "packed": (shape.num_numbers,)}
    weights = {n: p for n, p in layout.parts("log_decay").items() if n not in shape.names}
    reads = layout.reading_again("after" if from_the_end else "before")
    edges = reads.blockwise(
        edge_of_block,
        {"keys": ones(layout.key_chunks), **last_axes},
        layout.key_lead,
        reads.parts(*ROWS, "feature_map"),
        shape=shape,
        from_the_end=from_the_end,
    )
    beside = layout.parts("feature_map") | weights

    def merge(*edges: Array, of_blocks: bool = False, from_the_end: bool = False) -> Array:
        axes = {"block": ones(edges[-1].chunks[-3]), **last_axes}
        lead = edges[0].chunks[:-3] if of_blocks else layout.state_lead
        parts = {str(i): Part(edge, AXES) for i, edge in enumerate(edges)}
        options: Any = {"shape": shape, "from_the_end": from_the_end}
        return layout.blockwise(merge_edges, axes, lead, parts | beside, **options)

    def scan(edges: Array, first: Array) -> Array:
        axes = {"block": edges.chunks[-3], **last_axes}
        parts = {"states": Part(edges, AXES), "first": Part(first, AXES), **beside}
        options: Any = {"shape": shape, "from_the_end": from_the_end}
        return layout.blockwise(scan_edges, axes, layout.state_lead, parts, **options)

    state = first_state(layout, with_given=not from_the_end)
    parts = {"state": Part(state, AXES)}
    first = layout.blockwise(
        edge_of_state, {"block": (1,), **last_axes}, state.chunks[:-3], parts, shape=shape
    )
    if layout.problem.sees.is_causal:
        return prefix_scan(merge, edges, first)[0]
    return grouped_scan(merge, scan, edges, first, from_the_end=from_the_end)[0]
