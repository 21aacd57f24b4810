"""All that a coreset remembers of a stream: how it begins, takes tokens and is stored.

Shape letters as in :mod:`linattn.coreset._entries`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import OutputRows, token_block, values_and_one_block
from linattn._driver.problem import exact_problem
from linattn._files import Arrays, Format
from linattn.coreset._entries import Entries, Moments
from linattn.typing import Array, Partial, Problem

ARRAYS = (
    "old_key",
    "old_log",
    "old_v1",
    "new_key",
    "new_log",
    "new_v1",
    "new_query",
    "count",
    "mean",
    "scatter",
)
"""Arrays of a file, with the leading axes of the stream, in the order of :func:`arrays_of`."""

FORMAT = Format(
    "coreset",
    1,
    {
        "num_entries": ("i", 0),
        "block_size": ("i", 0),
        "scale": ("f", 0),
        "seed": ("i", 0),
        "length": ("i", 0),
    }
    | dict.fromkeys(ARRAYS, ("f", None)),
)


class Stream(NamedTuple):
    """All that is remembered; no array of it is ever written to."""

    lead: tuple[int, ...]
    old: Entries
    """Older entries, at most m, then the keys of the previous block."""
    new: Entries
    """Keys of the current block."""
    query: Array
    """(H, r, d): queries of the current block, times the scale; NaN where they do not count."""
    moments: Moments
    length: int


def problem_of(query: Any, key: Any, value: Any, **options: Any) -> Problem:
    """Check the arguments of a call, and describe its tokens."""
    return exact_problem(query, key, value, is_causal=True, **options)


def output_of(problem: Problem) -> OutputRows:
    """Return where the outputs of a call go."""
    width, dtype = problem.value.shape[-1], problem.query.dtype
    return OutputRows(problem, width, dtype, BlockFunctions(problem.xp))


def with_leading_axes(partial: Partial, lead: tuple[int, ...]) -> Partial:
    """Give sums of rows the leading axes of the stream."""
    xp = _arrays.namespace(partial.num_den)
    return Partial(*(xp.reshape(x, (*lead, *x.shape[1:])) for x in partial[:2]))


def block_tokens(
    lead: tuple[int, ...], problem: Problem, rows: slice
) -> tuple[Array, Entries, Array]:
    """Return queries, keys and the queries as they count of rows of a block; one leading axis."""
    xp, heads = problem.xp, prod(lead)

    def flat(x: Array) -> Array:
        x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
        return xp.reshape(x, (heads, *x.shape[-2:]))

    query = flat(token_block(problem, "query", rows, 0).x) * problem.query_spec.scale
    tokens = token_block(problem, "key", rows, 0)
    key, values_and_one = flat(tokens.x), flat(values_and_one_block(problem, rows))
    if tokens.log_weight is None:
        return query, Entries(key, xp.zeros_like(key[..., 0]), values_and_one), query
    log = flat(tokens.log_weight)
    # NaN where the position is masked.
    return query, Entries(key, log[..., 0], values_and_one), query + 0 * log


def begin(problem: Problem) -> Stream:
    """Return the stream that has seen nothing."""
    xp, heads = problem.xp, prod(problem.lead)
    d, e = problem.key.shape[-1], problem.value.shape[-1]
    device = array_api_compat.device(problem.query)

    def zeros(*shape: int) -> Array:
        return xp.zeros((heads, *shape), dtype=problem.dtype, device=device)

    nothing = Entries(zeros(0, d), zeros(0), zeros(0, e + 1))
    moments = Moments(zeros(1, 1), zeros(1, d), zeros(d, d))
    return Stream(problem.lead, nothing, nothing, zeros(0, d), moments, 0)


def check_continues(stream: Stream, problem: Problem) -> None:
    """Check that new tokens are of the kind of those seen."""
    key = stream.old.key
    xp = _arrays.namespace(key)
    if xp is not problem.xp:
        raise TypeError(
            f"query, key and value must come from the array library of the stream, "
            f"{_arrays.library_name(xp)}, got {_arrays.library_name(problem.xp)}"
        )
    device = array_api_compat.device
    kinds = {
        "leading axes": (stream.lead, problem.lead),
        "dim": (key.shape[-1], problem.key.shape[-1]),
        "value dim": (stream.old.values_and_one.shape[-1] - 1, problem.value.shape[-1]),
        "accumulation dtype": (key.dtype, problem.dtype),
        "device": (device(key), device(problem.query)),
    }
    for name, (wanted, got) in kinds.items():
        # A traced array does not know its device.
        if got is not None and wanted != got:
            raise ValueError(
                f"query, key and value must have the {name} of the stream, {wanted}, got {got}"
            )


def arrays_of(stream: Stream) -> list[Array]:
    """Arrays of a stream, in the order of their names in a file."""
    return [*stream.old, *stream.new, stream.query, *stream.moments]


def stream_of(lead: tuple[int, ...], arrays: list[Array], length: int) -> Stream:
    """Stream of the arrays of :func:`arrays_of`."""
    old, new, query, moments = arrays[:3], arrays[3:6], arrays[6], arrays[7:]
    return Stream(lead, Entries(*old), Entries(*new), query, Moments(*moments), length)


def checked_stream(arrays: Arrays, length: int, m: int, block_size: int) -> Stream:
    """Check that the arrays of a file fit each other and its numbers."""
    found = [arrays[name] for name in ARRAYS]
    if found[0].ndim < 2 or found[2].ndim < 2:
        raise ValueError(f"old_key and old_v1 have shapes {found[0].shape} and {found[2].shape}")
    lead, d, width = found[0].shape[:-2], found[0].shape[-1], found[2].shape[-1]
    blocks, n = divmod(length, block_size)
    old = min(m, (blocks - 1) * block_size) + block_size if blocks else 0
    ends = ((old, d), (old,), (old, width), (n, d), (n,), (n, width), (n, d))
    for name, array, end in zip(ARRAYS, found, (*ends, (1, 1), (1, d), (d, d)), strict=True):
        wanted = (*lead, *end)
        if array.shape != wanted or array.dtype != found[0].dtype or d < 1 or width < 2:
            raise ValueError(
                f"{name} must be {found[0].dtype} of shape {wanted} after {length} tokens, got "
                f"{array.dtype} {array.shape}"
            )
    heads = prod(lead)
    found = [x.reshape((heads, *x.shape[len(lead) :])) for x in found]
    return stream_of(lead, found, length)
