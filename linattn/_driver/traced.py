"""Attention that JAX traces: loops over chunks, compiled alike at every length.

The driver calls `solve` for arrays of JAX inside a trace. What `covers` leaves out is unrolled:
stops beside an exact window or for a map that depends on positions, and windows of packed
sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from linattn import _arrays
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    decay_of_rows,
    key_block,
    numerators,
    raw_tokens,
    rows_at,
    token_block,
    values_and_one_block,
)
from linattn._driver.causal_blocks import causal_block
from linattn._driver.lines import Line, flip
from linattn._driver.pairs import band, biased_queries, keys_and_values, no_keys_seen
from linattn._driver.runner import initial_state, update
from linattn._driver.sinks import Sinks, without_sinks
from linattn._driver.specs import is_placed, read_spec, select_rows
from linattn._driver.stops import Integers
from linattn._driver.window import Reader, Side, Window
from linattn._generic.exact import exact_pairs
from linattn._generic.states import combine, divide, log_normalizer
from linattn.typing import Array, Partial, Problem, State, Tokens, Weights

CHUNK = 128
"""Tokens of a chunk."""

ROWS, KEYS = 256, 256
"""Queries, and keys, that are paired together."""

MAX_PADDED = 1.25
"""Tokens of packed sequences in whole chunks, over their number, before chunks become shorter."""


def covers(problem: Problem) -> bool:
    """Whether JAX compiles a problem that `solve` computes, of more than one chunk."""
    arrays, sees, exact = (problem.query, problem.key, problem.value), problem.sees, problem.exact
    length = problem.query.shape[-2], problem.key.shape[-2]
    if not (problem.policy.lazy and any(map(_arrays.is_staged, arrays))):
        return False
    if max(length) <= CHUNK or min(length) == 0 or 0 in problem.lead or exact.clusters is not None:
        return False
    if sees.cu_seqlens is not None:
        return problem.mode in ("exact", "causal", "full") and not exact.sinks
    if sees.key_stop is not None and sees.key_stop.ndim > 1:
        return False
    if problem.mode == "window":
        at_end = sees.query_start >= 0 and length[0] + sees.query_start == length[1]
        return sees.key_stop is None and at_end
    return problem.mode != "stops" or not is_placed(problem)


def solve(problem: Problem, functions: BlockFunctions) -> tuple[Array, State | None, Array | None]:
    """Return the output, the state after all keys, and the log normalizer or None."""
    if problem.exact.sinks:
        sinks, masked = Sinks.of(problem), without_sinks(problem)
        part, state = LOOPS[problem.mode](masked, functions)
        part = sinks.add(slice(0, problem.query.shape[-2]), part)
        if state is not None:
            state = sinks.added(state, initial_state(masked), CHUNK, functions)
    else:
        part, state = LOOPS[problem.mode](problem, functions)
    output = divide(part) if problem.normalize else numerators(problem, part)
    output = problem.xp.astype(output, problem.query.dtype, copy=False)
    return output, state, log_normalizer(part, problem)[..., 0] if problem.want_log else None


# Chunks of tokens -------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Places of queries and keys on one axis of chunks; a query sees what is not after it."""

    size: int
    """Tokens of a chunk."""
    keys: Integers
    queries: Integers
    sequences: Integers | None = None
    """Of each chunk, where sequences are packed."""
    starts: Integers | None = None
    """Tokens of its sequence before each chunk."""

    @classmethod
    def of_stops(cls, stops: Integers, num_keys: int) -> _Layout:
        """Put each query at or after the last key before its stop, and before all others."""
        readers = np.bincount(stops, minlength=num_keys + 1)
        keys = readers[0] + np.append(0, np.cumsum(np.maximum(readers[1:num_keys], 1)))
        within = np.arange(len(stops)) - np.searchsorted(stops, stops)
        return cls(CHUNK, keys, np.append(0, keys)[stops] + within)

    @classmethod
    def of_sequences(cls, borders: Integers) -> _Layout:
        """Begin each sequence with a chunk of its own."""
        lengths, size = np.diff(borders), CHUNK
        while size > 16 and (-(-lengths // size) * size).sum() > MAX_PADDED * lengths.sum():
            size //= 2
        counts = -(-lengths // size)
        before = (np.cumsum(counts) - counts) * size
        places = np.arange(lengths.sum()) + np.repeat(before - borders[:-1], lengths)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(size, places, places, np.repeat(np.arange(len(counts)), counts), number * size)

    def apply(self, problem: Problem) -> Problem:
        """Return the problem with queries and keys at their places, masked where there are none."""
        xp, total = problem.xp, int(max(self.keys[-1], self.queries[-1])) + 1
        total += -total % self.size
        weights, decay = problem.weights, problem.weights.log_decay
        index, filled = _inverse(self.keys, total)
        filled = xp.asarray(filled[:, None])

        def placed(x: Array) -> Array:
            return None if x is None else rows_at(x, index)

        mask = placed(weights.key_mask)
        if decay is not None:
            decay = placed(decay_of_rows(problem, slice(0, problem.key.shape[-2])))
            decay = xp.where(filled, decay, xp.zeros_like(decay))
        return problem.replace(
            query=rows_at(problem.query, _inverse(self.queries, total)[0]),
            key=placed(problem.key),
            value=placed(problem.value),
            sees=problem.sees._replace(key_stop=None, cu_seqlens=None),
            weights=weights._replace(
                key_mask=filled if mask is None else mask & filled,
                key_bias=placed(weights.key_bias),
                log_decay=decay,
            ),
        )

    def rows(self, part: Partial) -> Partial:
        """Return the rows of queries."""
        return Partial(*(rows_at(x, self.queries) for x in part[:2]))


def _inverse(places: Integers, total: int) -> tuple[Integers, Any]:
    """Return which row stands at each place, 0 for none, and whether one does."""
    rows, filled = np.zeros(total, np.int64), np.zeros(total, bool)
    rows[places], filled[places] = np.arange(len(places)), True
    return rows, filled


def _pad(x: Array, count: int) -> Array:
    """Put rows of zeros after the others; None stays None."""
    if x is None or not count:
        return x
    xp = _arrays.namespace(x)
    return xp.concat([x, xp.zeros((*x.shape[:-2], count, x.shape[-1]), dtype=x.dtype)], axis=-2)


def _cut(x: Array, size: int) -> Array:
    """Cut rows into chunks, on a first axis."""
    xp = _arrays.namespace(x)
    return xp.moveaxis(xp.reshape(x, (*x.shape[:-2], -1, size, x.shape[-1])), -3, 0)


def _joined(x: Array) -> Array:
    """Join chunks of rows again."""
    x = _arrays.namespace(x).moveaxis(x, 0, -3)
    return _arrays.namespace(x).reshape(x, (*x.shape[:-3], -1, x.shape[-1]))


def _tokens(problem: Problem, size: int) -> tuple[Array, ...]:
    """Query, key, value, mask, bias and decay in whole chunks; padding is masked."""
    length, weights = problem.key.shape[-2], problem.weights
    mask, decay = weights.key_mask, weights.log_decay
    if mask is None and length % size:
        mask = problem.xp.ones((length, 1), dtype=problem.xp.bool)
    if decay is not None:
        decay = decay_of_rows(problem, slice(0, length))
    tokens = problem.query, problem.key, problem.value, mask, weights.key_bias, decay
    return tuple(_pad(x, -length % size) for x in tokens)


def _scan(problem: Problem, first: Any, step: Any, layout: _Layout | None = None) -> Any:
    """Run ``step(sums, start, chunk)`` over chunks of tokens: all rows, and the last sums.

    ``first``: sums before them, of each packed sequence where there are some; so are the last.
    """
    jax, size = sys.modules["jax"], CHUNK if layout is None else layout.size
    tokens = jax.tree.map(lambda x: _cut(x, size), _tokens(problem, size))
    again = jax.checkpoint(lambda sums, chunk: step(sums, *chunk))
    if layout is None or layout.sequences is None:
        starts = problem.xp.arange(tokens[0].shape[0]) * size
        sums, rows = jax.lax.scan(again, first, (starts, tokens))
        return rows, sums

    def of_sequence(carry: Any, chunk: Any) -> Any:
        (sums, all_sums), (sequence, start, tokens) = carry, chunk
        begun = jax.tree.map(lambda x: x[sequence], first)
        sums = jax.tree.map(lambda x, y: jax.numpy.where(start == 0, x, y), begun, sums)
        sums, rows = again(sums, (start, tokens))
        # Not in what is computed again, which keeps its arguments.
        return (sums, jax.tree.map(lambda x, y: x.at[sequence].set(y), all_sums, sums)), rows

    numbers = problem.xp.asarray(layout.sequences), problem.xp.asarray(layout.starts)
    carry = jax.tree.map(lambda x: x[0], first), first
    (_, sums), rows = jax.lax.scan(of_sequence, carry, (*numbers, tokens))
    return rows, sums


def _part(problem: Problem, chunk: Any) -> Problem:
    """Return the problem of one chunk."""
    query, key, value, mask, bias, decay = chunk
    weights = problem.weights._replace(key_mask=mask, key_bias=bias, log_decay=decay)
    return problem.replace(query=query, key=key, value=value, weights=weights, state=None)


def _all(chunk: Any) -> slice:
    return slice(0, chunk[0].shape[-2])


def _pair(part: Partial) -> tuple[Array, Array]:
    """Return sums and logs with one row each."""
    xp = _arrays.namespace(part.num_den)
    return part.num_den, xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))


def _partial(rows: Any, length: int) -> Partial:
    return Partial(*(_joined(x)[..., :length, :] for x in rows))


def _state(sums: Any, length: Any) -> State:
    kvz, log_scale = sums
    return State(kvz, log_scale, length)


# Loops of linear attention ----------------------------------------------------------------------

Loop = Callable[[Problem, BlockFunctions], tuple[Partial, State | None]]


def _linear(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Causal and full attention, with stops and of packed sequences too."""
    layout, borders, stops = None, problem.sees.cu_seqlens, problem.sees.key_stop
    length = problem.key.shape[-2]
    lead, state, is_full = problem.state_lead, problem.state, problem.mode == "full"
    if borders is not None:
        layout = _Layout.of_sequences(borders)
        lead = len(borders) - 1, *lead
        state = _with_axes(state, lead)
    elif stops is not None:
        layout = _Layout.of_stops(stops, length)
    first = initial_state(problem.replace(state_lead=lead, state=state))
    placed, before = problem if layout is None else layout.apply(problem), first.length
    if is_full:
        keys = placed.replace(query=placed.key)
        _, sums = _scan(keys, tuple(first[:2]), _add(keys, functions, before), layout)
        query = placed.query
        queries = placed.replace(key=query, value=query, weights=Weights())
        read = _read(placed, functions, before, sums if layout is None else None)
        rows, _ = _scan(queries, () if layout is None else sums, read, layout)
    else:
        rows, sums = _scan(placed, tuple(first[:2]), _causal(placed, functions, before), layout)
    part = _partial(rows, placed.query.shape[-2])
    return part if layout is None else layout.rows(part), _state(sums, before + problem.longest)


def _with_axes(state: State | None, lead: tuple[int, ...]) -> State | None:
    """Return states whose first axis is of sequences with all leading axes beside it."""
    missing = 0 if state is None else len(lead) + 2 - state.kvz.ndim
    if state is None or missing <= 0:
        return state
    ones = (1,) * missing
    kvz, log = (x.reshape((x.shape[0], *ones, *x.shape[1:])) for x in state[:2])
    return _state((kvz, log), state.length)


def _causal(problem: Problem, functions: BlockFunctions, before: Any, origin: Any = None) -> Any:
    """Step of a causal scan; ``origin``: position of the first token, if no state has a length."""
    origin = before if origin is None else origin

    def step(sums: Any, start: Any, chunk: Any) -> Any:
        part, rows, place = _part(problem, chunk), _all(chunk), origin + start
        tokens = token_block(part, "query", rows, place), key_block(part, rows, place)
        state = _state(sums, before + start)
        found, after = causal_block(
            part, functions, *tokens, values_and_one_block(part, rows), state
        )
        return tuple(after[:2]), _pair(found)

    return step


def _add(problem: Problem, functions: BlockFunctions, before: Any) -> Any:
    def step(sums: Any, start: Any, chunk: Any) -> Any:
        state = _state(sums, before + start)
        after = update(_part(problem, chunk), state, _all(chunk).stop, functions)
        return tuple(after[:2]), ()

    return step


def _read(problem: Problem, functions: BlockFunctions, before: Any, sums: Any) -> Any:
    """Step that reads the state after all keys: these sums, or those that are carried along."""

    def step(carried: Any, start: Any, chunk: Any) -> Any:
        part = problem.replace(query=chunk[0], state=None)
        query = token_block(part, "query", _all(chunk), before + start)
        spec, seen = read_spec(problem, _state(carried if sums is None else sums, 0))
        rows = functions.read_block(spec, query, seen, problem.want_log)
        return carried, _pair(select_rows(problem, rows))

    return step


def _two_sided(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Add a causal scan and one from the end, in which a token does not see itself."""
    problem, length = problem.replace(want_log=True), problem.query.shape[-2]
    first, weights = initial_state(problem), problem.weights
    nothing, end = initial_state(problem.replace(state=None)), first.length + length
    rows, sums = _scan(problem, tuple(first[:2]), _causal(problem, functions, first.length))
    before, decay = _partial(rows, length), decay_of_rows(problem, slice(0, length))

    def turned(x: Array) -> Array:
        return None if x is None else flip(x)[..., :-1, :]

    turned_specs = Line(problem, functions, 0, reverse=True).in_order()
    later = turned_specs.replace(
        query=flip(problem.query)[..., 1:, :],
        key=turned(problem.key),
        value=turned(problem.value),
        sees=problem.sees._replace(query_start=1),
        weights=weights._replace(log_decay=decay).of_keys(turned),
        state=None,
    )
    rows, _ = _scan(later, tuple(nothing[:2]), _causal(later, functions, 0, -end))
    num_den, log = (flip(x) for x in _partial(rows, length - 1)[:2])
    log = log + problem.xp.astype(decay[..., :1, :], problem.dtype)
    after = Partial(_pad(num_den, 1), _pad(log, 1))
    return combine(before, after), _state(sums, end)


def _windowed(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Exact weights in a window, far keys by the map: each chunk has whole blocks of the window."""
    jax, sees, length = sys.modules["jax"], problem.sees, problem.key.shape[-2]
    w, first = min(problem.exact.window or 1, length), initial_state(problem)
    exact = problem.exact._replace(window=w)
    problem, front = problem.replace(exact=exact, state=None), sees.query_start
    query = flip(_pad(flip(problem.query), front)) if front else problem.query
    g = max(1, CHUNK // w)
    size, before = g * w, first.length
    query, *keys = _tokens(problem.replace(query=query), size)
    total = keys[0].shape[-2]
    if keys[2] is None:
        keys[2] = problem.xp.ones((total, 1), dtype=problem.xp.bool)
    starts = problem.xp.arange(total // size) * size
    # Keys of the block after each chunk, and the state of all keys from the one after it on.
    later = jax.tree.map(lambda x: _cut(_pad(x, size)[..., w:, :][..., :total, :], size), keys)
    following = [None if x is None else _cut(_pad(x, size), size)[1:, ..., :w, :] for x in keys]
    visible = sees._replace(query_start=w, right=None if sees.ahead else 0)

    def window_of(query: Array, tokens: Any, start: Any) -> Window:
        part = _part(problem, (query, *tokens)).replace(sees=visible)
        return Window.of(part, functions, start, size)

    def add(sums: Any, chunk: Any) -> Any:
        window = window_of(chunk[1][0], chunk[1], before + w + chunk[0])
        line = window.line(-1, reverse=True)
        return tuple(line.add(slice(0, size), _state(sums, 0))[:2]), sums

    afters: Any = ()
    if sees.ahead:
        nothing = initial_state(problem)
        again = jax.checkpoint(add)
        _, afters = jax.lax.scan(again, tuple(nothing[:2]), (starts, later), reverse=True)

    def step(carry: Any, chunk: Any) -> Any:
        (sums, previous), (start, query, tokens, following, after) = carry, chunk
        parts = [previous, tokens, following] if sees.ahead else [previous, tokens]
        pairs = zip(*parts, strict=True)
        keys = [None if x[0] is None else problem.xp.concat(x, axis=-2) for x in pairs]
        window, rows = window_of(query, keys, before + start - w), slice(0, size)
        left, sides = Reader(window.line(0), _state(sums, 0), 0), []
        if after:
            line = window.line(-1, reverse=True)
            sides = [Side(rows, window.stops, line, _state(after, 0), 0, left)]
        part = window.read_states(rows, left, sides, None)
        last = [None if x is None else x[..., -w:, :] for x in tokens]
        return (tuple(left.state[:2]), last), _pair(part)

    empty = [None if x is None else problem.xp.zeros_like(x[..., :w, :]) for x in keys]
    chunks = jax.tree.map(lambda x: _cut(x, size), (query, keys))
    chunks = starts, *chunks, following, afters
    (sums, last), rows = jax.lax.scan(jax.checkpoint(step), (tuple(first[:2]), empty), chunks)
    rest = _part(problem, (last[0], *last))
    state, place = _state(sums, before), before + total - w
    state = Line(rest, functions, place).add(slice(0, w), state)
    part = _partial(rows, length)
    return Partial(*(x[..., front:, :] for x in part[:2])), _state(state[:2], before + length)


# Exact attention --------------------------------------------------------------------------------


def _exact(problem: Problem, functions: BlockFunctions) -> tuple[Partial, None]:
    """Pair blocks of queries with the blocks of keys that any of them sees, and with no other."""
    jax, xp, size = sys.modules["jax"], problem.xp, problem.key.shape[-2]
    (key, values), length = keys_and_values(problem, slice(0, size)), problem.query.shape[-2]
    missing = np.zeros(-length % ROWS, np.int64)
    low, stop = (np.append(x, missing).reshape(-1, ROWS) for x in _seen(problem))
    last = np.where(low < stop, stop, 0).max(axis=1)
    first = np.minimum(np.where(low < stop, low, size).min(axis=1), last)
    width = max(1, int((last - first).max()))
    steps = -(-width // KEYS)
    block = -(-width // steps)
    width = steps * block
    first = np.minimum(first, max(size - width, 0))
    sees_all = width == size and not low.any() and (stop.ravel()[:length] == size).all()
    tokens = [_pad(x, width - size if size < width else 0) for x in (*key[:2], values)]
    all_finite = xp.all(xp.isfinite(values))

    def pairs_of(query: tuple[Any, Tokens], rows: Any, number: Any, keys: Any) -> Partial:
        start, low, stop, first = rows
        x, log_weight, values = keys
        place = first + number * block + xp.arange(block)
        visible = None if sees_all else (place >= low[:, None]) & (place < stop[:, None])
        table, bias = problem.weights.relative_bias, None
        if table is not None:
            queries = start + xp.arange(ROWS)[:, None] + problem.sees.query_start
            offset = xp.clip(place - queries, -table.reach - 1, table.reach + 1)
            bias = table.table[..., offset + table.reach + 1]
        key, block_of = Tokens(x, log_weight, 0), functions.exact_block

        def careful() -> Any:
            return _pair(exact_pairs(*query, key, values, visible, bias, True, block_of))

        def fast() -> Any:
            return _pair(block_of(*query, key, values, visible, bias))

        if visible is None and bias is None:
            return Partial(*fast())
        return Partial(*jax.lax.cond(all_finite, fast, careful))

    def step(_: Any, chunk: Any) -> Any:
        rows, end, query = chunk
        part = problem.replace(query=query)
        tokens_of = raw_tokens(part, "query", slice(0, ROWS), 0)
        taken = biased_queries(part, problem.query_spec, tokens_of)
        keys = tokens
        if width < size:
            cut = jax.lax.dynamic_slice_in_dim
            keys = jax.tree.map(lambda x: cut(x, rows[3], width, axis=x.ndim - 2), tokens)
        if steps == 1:
            return (), _pair(pairs_of(taken, rows, 0, keys))

        def add(sums: Any, of_block: Any) -> Any:
            number, keys = of_block

            def more() -> Any:
                return _pair(combine(Partial(*sums), pairs_of(taken, rows, number, keys)))

            return jax.lax.cond(rows[3] + number * block < end, more, lambda: sums), ()

        nothing = _pair(no_keys_seen(problem, taken[1]))
        blocks = jax.tree.map(lambda x: _cut(x, block), keys)
        return (), jax.lax.scan(jax.checkpoint(add), nothing, (xp.arange(steps), blocks))[0]

    query = _cut(_pad(problem.query, -length % ROWS), ROWS)
    rows = np.arange(len(first)) * ROWS, low, stop, first
    chunks = tuple(map(xp.asarray, rows)), xp.asarray(last), query
    return _partial(jax.lax.scan(jax.checkpoint(step), (), chunks)[1], length), None


def _seen(problem: Problem) -> tuple[Integers, Integers]:
    """Return the first key that each query sees, and the stop of those that it sees."""
    (left, right), sees, size = band(problem), problem.sees, problem.key.shape[-2]
    place = np.arange(problem.query.shape[-2]) + sees.query_start
    low, stop = np.maximum(place - left, 0), np.clip(place + right + 1, 0, size)
    if sees.key_stop is not None:
        stop = np.minimum(stop, sees.key_stop)
    if sees.cu_seqlens is not None:
        lengths = np.diff(sees.cu_seqlens)
        low = np.maximum(low, np.repeat(sees.cu_seqlens[:-1], lengths))
        stop = np.minimum(stop, np.repeat(sees.cu_seqlens[1:], lengths))
    return low, stop


LOOPS: dict[str, Loop] = {
    "full": _linear,
    "causal": _linear,
    "stops": _linear,
    "two-sided": _two_sided,
    "window": _windowed,
    "exact": _exact,
}
"""The loop of each `Problem.mode`."""
