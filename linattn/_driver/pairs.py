"""Sources of a block of queries: states of keys, and exact pairs of queries and keys.

A walk gives each block of queries its sources, :func:`join` reads one after the other on a common
scale, and the walk writes the rows once.

Query i stands at the position ``query_start + i`` and key j at j. A query sees the keys before its
stop, and of those the keys within its window; the bias of a pair depends on its offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import array_api_compat
import numpy as np

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import in_map_coordinates, raw_tokens, values_and_one_block
from linattn._generic.exact import exact_pairs, in_band
from linattn.typing import Array, Exact, Partial, Problem, RelativeBias, State, Tokens


class Pairs(NamedTuple):
    """A source: keys that a block of queries weighs exactly."""

    spec: Exact
    key: Tokens
    values_and_one: Array
    visible: Array | None = None
    """``(n, s)``: which pairs count; None for all."""
    bias: Array | None = None
    """``(..., n, s)``: added to the logits."""

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Add these keys to what queries have seen so far."""
        block = self.spec, query, self.key, self.values_and_one
        if so_far is not None and self.visible is None and self.bias is None:
            return functions.exact_more(*block, so_far)  # type: ignore[no-any-return]
        pairs = self.visible, self.bias, problem.policy.lazy
        more = exact_pairs(*block, *pairs, functions.exact_block)
        return more if so_far is None else _generic.combine(so_far, more)


def pairs_of(problem: Problem, spec: Exact, rows: slice, keys: slice) -> Pairs:
    """Pairs of some queries and some keys of softmax attention."""
    weights = visible_pairs(problem, rows, keys), offset_bias(problem, rows, keys)
    return Pairs(spec, *keys_and_values(problem, keys), *weights)


def keys_and_values(problem: Problem, keys: slice) -> tuple[Tokens, Array]:
    """Keys of softmax attention and their ``[v, 1]``."""
    key = biased_keys(problem, raw_tokens(problem, "key", keys, 0))
    return key, values_and_one_block(problem, keys)


# Which pairs count ------------------------------------------------------------------------------


def is_banded(problem: Problem) -> bool:
    """Whether softmax attention depends on the offset of the key from the query."""
    return problem.sees.left is not None or problem.weights.relative_bias is not None


def band(problem: Problem) -> tuple[int, int]:
    """How many keys a query sees to its left and to its right."""
    most = max(problem.query.shape[-2], problem.key.shape[-2])
    left, right = problem.sees.left, problem.sees.right
    return most if left is None else left, most if right is None else right


def offset(problem: Problem, rows: slice, keys: slice) -> int:
    """Position of the first key minus the position of the first query."""
    return int(keys.start - rows.start - problem.sees.query_start)


def keys_of_rows(problem: Problem, rows: slice) -> slice:
    """Keys that any of some consecutive queries sees."""
    (left, right), first, stop = band(problem), rows.start, rows.stop
    start = problem.sees.query_start
    last = max(min(stop + start + right, _stop(problem, stop - 1)), 0)
    return slice(min(max(first + start - left, 0), last), last)


def _stop(problem: Problem, row: int) -> int:
    """Where the keys end that a query sees."""
    stops = problem.sees.key_stop
    return int(problem.key.shape[-2] if stops is None else stops[row])


def seen_by_all(problem: Problem, rows: slice) -> slice:
    """Keys that all of some consecutive queries see."""
    (left, right), keys = band(problem), keys_of_rows(problem, rows)
    start = problem.sees.query_start
    stop = min(rows.start + start + right + 1, _stop(problem, rows.start))
    first = max(rows.stop - 1 + start - left, keys.start)
    return slice(first, stop) if first < stop else slice(keys.start, keys.start)


def rows_of_keys(problem: Problem, keys: slice) -> slice:
    """Return the queries from the first to the last one that see any of some consecutive keys."""
    (left, right), length, start = band(problem), problem.query.shape[-2], problem.sees.query_start
    if keys.start < problem.exact.sinks:
        left = length + keys.stop + abs(start)
        right = left if problem.sees.ahead else 0
    first = max(keys.start - right - start, 0)
    if problem.sees.key_stop is not None:
        first = max(first, int(np.searchsorted(problem.sees.key_stop, keys.start, side="right")))
    return slice(first, min(keys.stop + left - start, length))


def visible_pairs(problem: Problem, rows: slice, keys: slice) -> Array:
    """Which of some keys some queries see, ``(n, s)``; None for all."""
    whole = seen_by_all(problem, rows)
    if whole.start <= keys.start and keys.stop <= whole.stop:
        return None
    xp, device = problem.xp, array_api_compat.device(problem.key)
    (left, right), first = band(problem), offset(problem, rows, keys)
    n, s = rows.stop - rows.start, keys.stop - keys.start
    seen = in_band(problem.key, n, s, (-left - first, right - first))
    if keys.start < problem.exact.sinks:
        most = rows.stop + keys.stop + abs(problem.sees.query_start)
        before = in_band(problem.key, n, s, (-most, most if problem.sees.ahead else -first))
        is_sink = xp.arange(keys.start, keys.stop, device=device) < problem.exact.sinks
        seen = seen | (before & is_sink)
    if problem.sees.key_stop is None:
        return seen
    stops = problem.sees.key_stop[rows]
    return seen & xp.asarray(np.arange(keys.start, keys.stop) < stops[:, None], device=device)


def no_keys_seen(problem: Problem, query: Tokens) -> Partial:
    """Partial of queries that see no key, with all leading axes of the output."""
    shape = (*problem.lead, query.x.shape[-2], problem.value.shape[-1] + 1)
    device = array_api_compat.device(query.x)
    num_den = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    return Partial(num_den, num_den[..., -1:] - problem.xp.inf)


# What they weigh --------------------------------------------------------------------------------


def biased_queries(problem: Problem, spec: Exact, tokens: Tokens) -> tuple[Exact, Tokens]:
    """Spec and queries of exact pairs: where keys have a bias, 1 as one more coordinate.

    Exact block functions take log weights of 0 and -inf only, and a product adds the bias anyway.
    """
    if problem.weights.key_bias is None:
        return spec, tokens
    x = problem.xp.concat([tokens.x * spec.scale, problem.xp.ones_like(tokens.x[..., :1])], axis=-1)
    return Exact(1.0), tokens._replace(x=x)


def biased_keys(problem: Problem, tokens: Tokens, *, padded: bool = False) -> Tokens:
    """Keys with their bias as one more coordinate, the partner of :func:`biased_queries`.

    ``padded``: padding is masked too, even if the problem has no mask.
    """
    xp, log = problem.xp, tokens.log_weight
    if problem.weights.key_bias is None:
        return tokens
    zero = xp.zeros_like(log)
    # A bias has no leading axis that its keys lack, but may have fewer.
    bias = xp.broadcast_to(xp.where(log == -xp.inf, zero, log), tuple(tokens.x[..., :1].shape))
    masked = padded or problem.weights.key_mask is not None
    weight = xp.where(log == -xp.inf, log, zero) if masked else None
    return Tokens(xp.concat([tokens.x, bias], axis=-1), weight, tokens.start)


def offset_bias(problem: Problem, rows: slice, keys: slice) -> Array:
    """Bias of some pairs by their offset; None without one."""
    if problem.weights.relative_bias is None:
        return None
    n, s = rows.stop - rows.start, keys.stop - keys.start
    return bias_block(problem.weights.relative_bias, offset(problem, rows, keys), n, s)


def bias_block(bias: RelativeBias, first: int, n: int, s: int) -> Array:
    """Bias of n queries in a row to s keys in a row, ``(..., n, s)``, or ``(..., 1, 1)`` if one.

    ``first``: position of the first key minus the position of the first query.
    """
    table = bias.table
    xp, reach = _arrays.namespace(table), bias.reach
    low, high = first - (n - 1), first + s - 1
    if high < -reach:
        return table[..., None, :1]
    if low > reach:
        return table[..., None, -1:]
    strip = _strip(table, reach, low, high, xp)
    # Row i is the strip moved by i: rows that are one element longer than they are taken to be.
    size = n + s
    rows = xp.broadcast_to(strip[..., None, :], (*strip.shape[:-1], n, size))
    rows = xp.reshape(rows, (*strip.shape[:-1], n * size))[..., : n * (size - 1)]
    return xp.reshape(rows, (*strip.shape[:-1], n, size - 1))[..., n - 1 :]


def _strip(table: Array, reach: int, low: int, high: int, xp: Any) -> Array:
    """Biases of offsets from low to high, and one more element."""
    front, back = max(-reach - low, 0), max(high - reach, 0)
    inside = table[..., max(low, -reach) + reach + 1 : min(high, reach) + reach + 2]

    def ends(end: Array, count: int) -> Array:
        return xp.broadcast_to(end, (*table.shape[:-1], count))

    parts = [ends(table[..., :1], front), inside, ends(table[..., -1:], back + 1)]
    return xp.concat(parts, axis=-1)


# Sources ------------------------------------------------------------------------------------------


class Source(Protocol):
    """Keys, or states of them, that a block of queries reads."""

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Any, so_far: Partial | None
    ) -> Partial:
        """Return ``so_far``, or nothing if it is None, plus the sums over these keys."""
        ...


class Read(NamedTuple):
    """A source: states, and the log weight ``(..., n, 1)`` of each for every row, None for 0."""

    states: State
    log: Array | None = None

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Read the states by the map."""
        tokens = in_map_coordinates(problem, "query", query)
        part = functions.read_block(problem.query_spec, tokens, self.states, problem.want_log)
        if self.log is not None:
            part = Partial(part.num_den, part.log + self.log)
        return part if so_far is None else _generic.combine(so_far, part)


def join(
    problem: Problem, functions: BlockFunctions, query: Any, sources: Iterable[Source]
) -> Partial | None:
    """Read all sources of a block of queries; None if there are none."""
    part = None
    for source in sources:
        part = source.read(problem, functions, query, part)
    return part
