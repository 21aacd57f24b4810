"""Calls that are not done block by block: short ones by the core's graph, others an error."""

from __future__ import annotations

from typing import Any

from linattn.typing import Array, Declined, Problem

MAX_LEN = 1024
"""Rows of a sequence whose operations, one by one, make a graph of some thousand tasks at most."""

NAMES = {
    "clusters": "exact_clusters",
    "stops": "key_stop, prefix_length, causal_block or is_causal='lower_right', and features that "
    "depend on the position",
    "two-sided": "log_decay without is_causal",
    "exact": "local_window_size, a bias of offsets or key_stop",
    "window": "exact_clusters, stops of keys or log_decay without is_causal, beside a window",
}
"""What a caller has asked for, by the mode of the problem."""

GRADIENTS = {
    "clusters": "exact_clusters",
    "stops": "key_stop, prefix_length, causal_block or is_causal='lower_right'",
    "two-sided": "log_decay without is_causal",
    "exact": "softmax attention",
    "window": "an exact window",
}
"""The same of gradients."""


def declined(problem: Problem) -> Declined:
    """Leave a problem of attention to the core if it is short."""
    return short(NAMES.get(problem.mode, problem.mode), problem)


def declined_gradients(problem: Problem) -> Declined:
    """Leave gradients to the core if sequences are short."""
    return short(f"gradients of {GRADIENTS.get(problem.mode, problem.mode)}", problem)


def short(what: str, problem: Any) -> Declined:
    """Leave a problem to the core if it is short."""
    arrays: dict[str, Array] = {name: getattr(problem, name) for name in ("query", "key")}
    for name, array in arrays.items():
        chunks = array.chunks[-2]
        if len(chunks) > 1 or sum(chunks) > MAX_LEN:
            shown = chunks if len(chunks) <= 6 else f"({', '.join(map(str, chunks[:5]))}, ...)"
            raise ValueError(
                f"{name} must be one chunk of at most {MAX_LEN} rows for {what} on Dask arrays, "
                f"got chunks {shown} along axis -2; compute() the arrays first, or call it on "
                f"chunks of whole sequences by dask.array.map_blocks"
            )
    return Declined("not done block by block")
