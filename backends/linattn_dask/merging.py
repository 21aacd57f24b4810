"""Merging two states that a caller has."""

from __future__ import annotations

from dask.array.utils import meta_from_array

from linattn.typing import State
from linattn_dask.blocks import Call, merge_two
from linattn_dask.layout import Part, common_chunks, lead_axes, state_parts, tasks


def merge(first: State, second: State) -> State:
    """Merge two states, the earlier one first."""
    given = [Part(state.kvz, ("features", "width")) for state in (first, second)]
    # Chunks of the leading axes of states are those of the larger one.
    lead = common_chunks(sorted(given, key=lambda part: part.array.size)[-1:], ())
    parts: dict[str, Part] = {}
    for name, state in (("first", first), ("second", second)):
        fields = state_parts(state, lead)
        if state.log_decay is not None:
            fields["log_decay"] = Part(state.log_decay.rechunk(fields["kvz"].array.chunks[:-2]), ())
        parts |= {f"{name} {field}": part for field, part in fields.items()}
    lead = common_chunks([parts["first kvz"], parts["second kvz"]], ())
    m, width = first.kvz.shape[-2:]
    axes = {**lead_axes(lead), "features": (m,), "packed": (width + 1,)}
    meta = meta_from_array(first.kvz._meta, ndim=len(axes), dtype=first.kvz.dtype)
    packed = tasks(merge_two, Call(tuple(parts), width - 1), axes, parts, meta)
    return State(packed[..., :width], packed[..., width], first.length + second.length)
