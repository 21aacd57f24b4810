"""Softmax attention: blocks of queries by blocks of keys, merged by their log normalizers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import dask.array as da

from linattn.typing import Array
from linattn_dask.blocks import merge_pairs, softmax_block
from linattn_dask.layout import Layout, Part, merge_along


def softmax_attention(layout: Layout) -> tuple[Array, None, Array | None]:
    """Attend exactly: the tasks grow with the square of the number of blocks."""
    problem, e = layout.problem, layout.problem.value.shape[-1]
    merged = merged_pairs(layout)
    output = merged[..., 0, :e].astype(problem.query.dtype, copy=False)
    return output, None, merged[..., 0, e] if problem.want_log else None


def merged_pairs(layout: Layout) -> Array:
    """Return outputs and, in the last column, log normalizers, ``(..., rows, 1, e + 1)``."""
    return _causal(layout) if layout.problem.sees.is_causal else _merged(_pairs(layout))


def _pairs(layout: Layout, rows: Any = None, keys: Any = None, is_causal: bool = False) -> Array:
    """Attend with each block of queries to each of keys, ``(..., rows, blocks, e + 1)``."""
    parts = layout.parts("key", "value", "key_mask", "key_bias")
    if keys is not None:
        parts = {name: Part(part.array[..., keys, :], part.axes) for name, part in parts.items()}
    if is_causal:
        parts = {name: Part(p.array.rechunk({-2: -1}), p.axes) for name, p in parts.items()}
    query = layout.part("query").array
    if rows is not None:
        query = query[..., rows, :].rechunk({-2: -1})
    parts["query"] = Part(query, ("rows", "dim"))
    axes = {
        "rows": parts["query"].array.chunks[-2],
        "keys": (1,) * len(parts["key"].array.chunks[-2]),
        "outputs": (layout.problem.value.shape[-1] + 1,),
    }
    scale = float(layout.problem.query_spec.scale)
    return layout.blockwise(
        softmax_block, axes, layout.lead, parts, scale=scale, is_causal=is_causal
    )


def _merged(pairs: Array) -> Array:
    return merge_along(pairs, pairs.ndim - 2, merge_pairs)


def _causal(layout: Layout) -> Array:
    """Merge each block of queries with its own keys and all before: no task sees a later block."""
    layout.check_rows()
    outputs = []
    for stop, length in zip(accumulate(layout.key_chunks), layout.key_chunks, strict=True):
        rows = slice(stop - length, stop)
        pairs = _pairs(layout, rows, rows, is_causal=True)
        if rows.start:
            pairs = da.concatenate([_pairs(layout, rows, slice(rows.start)), pairs], axis=-2)
        outputs.append(_merged(pairs))
    # Dask leaves out what is empty.
    return da.concatenate(outputs, axis=-3).rechunk({-3: layout.query_chunks}, method="tasks")
