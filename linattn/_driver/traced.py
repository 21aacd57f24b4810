"""Attention that JAX traces: loops over chunks, compiled alike at every length.

The driver calls `solve` for arrays of JAX inside a trace. What `covers` leaves out is unrolled:
clusters; of heads whose stops differ each has a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

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
from linattn._driver.causal_blocks import staged_block
from linattn._driver.lines import Line, flip, weighed_rows
from linattn._driver.pairs import band, biased_queries, keys_and_values, no_keys_seen
from linattn._driver.runner import initial_state, update
from linattn._driver.sinks import without_sinks
from linattn._driver.specs import is_placed, read_spec, select_rows, with_position
from linattn._driver.stops import SideRuns, sequences_of, side_runs
from linattn._driver.window import Reader, Side, Window
from linattn._generic.decay import decay_since
from linattn._generic.exact import exact_pairs
from linattn._generic.loops import (
    CHUNK,
    Integers,
    Layout,
    Run,
    cut,
    flat,
    padded,
    scan,
    whole_run,
)
from linattn._generic.states import combine, divide, log_normalizer
from linattn.typing import Array, ExactKeys, Partial, Problem, State, Tokens, Visible, Weights

ROWS, KEYS = 256, 256
"""Queries, and keys, that are paired together."""

MAX_NARROW = 1024
"""Most keys beside a window of these queries that are paired at once."""


def covers(problem: Problem) -> bool:
    """Whether JAX compiles a problem that `solve` computes; a short one may be a block alone."""
    arrays, sees, exact = (problem.query, problem.key, problem.value), problem.sees, problem.exact
    length = problem.query.shape[-2], problem.key.shape[-2]
    if not (problem.policy.lazy and any(map(_arrays.is_staged, arrays))):
        return False
    if min(length) == 0 or 0 in problem.lead or exact.clusters is not None:
        return False
    if max(length) <= CHUNK and problem.mode in ("full", "exact"):
        return False
    return sees.key_stop is None or sees.key_stop.ndim == 1


def solve(
    problem: Problem, functions: BlockFunctions, return_state: bool
) -> tuple[Array, State | None, Array | None]:
    """Return the output, the state after all keys where asked for, and the log normalizer."""
    sinks = problem.exact.sinks
    part, state = LOOPS[problem.mode](without_sinks(problem) if sinks else problem, functions)
    if sinks:
        spec = problem.query_spec if problem.exact.spec is None else problem.exact.spec
        _, front, stop = _ends(problem)
        seen = front, np.minimum(front + sinks, stop)
        part = combine(part, _exact(problem.replace(query_spec=spec), functions, seen)[0])
    if sinks and return_state:
        sees = Visible(right=0, cu_seqlens=problem.sees.cu_seqlens)
        whole = problem.replace(query=problem.key, sees=sees, exact=ExactKeys())
        state = _linear(whole, functions)[1]
    output, log = _divided(problem, part)
    return output, state, log


def solve_in_parts(problem: Problem, length: int) -> tuple[Array, State, Array | None, list[State]]:
    """Return the results of causal attention, and the state after each ``length`` tokens."""
    first, stop = initial_state(problem), problem.query.shape[-2]
    runs = [whole_run(i, min(i + length, stop)) for i in range(0, stop, length)]
    layout, places = Layout.of(runs, len(runs))
    # Only the first begins anew.
    layout = layout._replace(starts=layout.starts + length * layout.sums)
    sums = tuple(problem.xp.broadcast_to(x, (len(runs), *x.shape)) for x in first[:2])
    placed = _placed(problem, layout)
    rows, sums = _causal(placed, sums, first.length, layout)
    part = _partial(rows, placed.query.shape[-2])
    index = np.concatenate(places)
    output, log = _divided(problem, Partial(*(rows_at(x, index) for x in part[:2])))
    states = [
        State(kvz, scale, first.length + int(run.keys[-1]) + 1)
        for kvz, scale, run in zip(*sums, runs, strict=True)
    ]
    return output, states[-1], log, states[: stop // length]


def _divided(problem: Problem, part: Partial) -> tuple[Array, Array | None]:
    """Return the output, and the log normalizer if it is wanted."""
    output = divide(part) if problem.normalize else numerators(problem, part)
    output = problem.xp.astype(output, problem.query.dtype, copy=False)
    return output, log_normalizer(part, problem)[..., 0] if problem.want_log else None


# Chunks of tokens -------------------------------------------------------------------------------


def _placed(problem: Problem, layout: Layout) -> Problem:
    """Return the problem with queries and keys at their places, masked where there are none."""
    xp, weights, decay = problem.xp, problem.weights, problem.weights.log_decay
    filled, index = xp.asarray(layout.keys[:, None] >= 0), np.maximum(layout.keys, 0)

    def placed(x: Array) -> Array:
        return None if x is None else rows_at(x, index)

    mask = placed(weights.key_mask)
    if decay is not None:
        decay = placed(decay_of_rows(problem, slice(0, problem.key.shape[-2])))
        decay = xp.where(filled, decay, xp.zeros_like(decay))
    return problem.replace(
        query=rows_at(problem.query, np.maximum(layout.queries, 0)),
        key=placed(problem.key),
        value=placed(problem.value),
        sees=problem.sees._replace(key_stop=None, cu_seqlens=None),
        weights=weights._replace(
            key_mask=filled if mask is None else mask & filled,
            key_bias=placed(weights.key_bias),
            log_decay=decay,
        ),
    )


def _tokens(problem: Problem, size: int) -> tuple[Array, ...]:
    """Query, key, value, mask, bias and decay in whole chunks; padding is masked."""
    length, weights = problem.key.shape[-2], problem.weights
    mask, decay = weights.key_mask, weights.log_decay
    if mask is None and length % size:
        mask = problem.xp.ones((length, 1), dtype=problem.xp.bool)
    if decay is not None:
        decay = decay_of_rows(problem, slice(0, length))
    tokens = problem.query, problem.key, problem.value, mask, weights.key_bias, decay
    return tuple(padded(x, -length % size) for x in tokens)


def _scan(problem: Problem, first: Any, step: Any, layout: Layout | None = None) -> Any:
    """Scan the tokens of a problem: all rows, and the last sums."""
    size = min(CHUNK, problem.key.shape[-2]) if layout is None else layout.size
    sums, rows = scan(step, first, _tokens(problem, size), layout, size)
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
    return Partial(*(flat(x)[..., :length, :] for x in rows))


def _state(sums: Any, length: Any) -> State:
    kvz, log_scale = sums
    return State(kvz, log_scale, length)


# Loops of linear attention ----------------------------------------------------------------------

Loop = Callable[[Problem, BlockFunctions], tuple[Partial, State | None]]


def _linear(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Causal and full attention."""
    if problem.sees.cu_seqlens is not None:
        return _lines(problem, functions)
    first = initial_state(problem)
    before, sums = first.length, tuple(first[:2])
    if problem.mode == "full":
        rows, sums = _added_and_read(problem, functions, sums, before)
    else:
        rows, sums = _causal(problem, sums, before)
    length = problem.key.shape[-2]
    return _partial(rows, problem.query.shape[-2]), _state(sums, before + length)


def _added_and_read(
    problem: Problem, functions: BlockFunctions, sums: Any, before: Any, layout: Any = None
) -> Any:
    """Add all keys, then read: rows of all queries, and the sums."""
    keys, query = problem.replace(query=problem.key), problem.query
    _, sums = _scan(keys, sums, _add(keys, functions, before), layout)
    queries = problem.replace(key=query, value=query, weights=Weights())
    read = _read(problem, functions, before, sums if layout is None else None)
    rows, _ = _scan(queries, () if layout is None else sums, read, layout)
    return rows, sums


def _lines(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Scan the keys of all sides and sequences, one run after the other."""
    borders, length, state = problem.sees.cu_seqlens, problem.query.shape[-2], problem.state
    count = 1 if borders is None else len(borders) - 1
    lead = count, *problem.state_lead
    if borders is not None:
        state = _with_axes(state, lead)
    first = initial_state(problem.replace(state_lead=lead, state=state))
    nothing = initial_state(problem.replace(state=None))
    pairs = zip(first[:2], nothing[:2], strict=True)
    before, sums = first.length, tuple(problem.xp.concat([x, y[None]]) for x, y in pairs)
    sides = side_runs(problem)
    layout, places = Layout.of([run for side in sides for run in side.runs], count + 1)
    if is_placed(problem):
        problem = _at_positions(problem, before)
    placed = _placed(problem.replace(want_log=True), layout)
    if problem.mode == "full":
        rows, sums = _added_and_read(placed, functions, sums, before, layout)
    else:
        rows, sums = _causal(placed, sums, before, layout)
    whole, parts = _partial(rows, placed.query.shape[-2]), []
    for side in sides:
        part = _read_in_runs(whole, side.runs, [places.pop(0) for _ in side.runs], length)
        parts.append(_with_weight(part, problem, side))
    last = (x[0] if borders is None else x[:count] for x in sums)
    return reduce(combine, parts), _state(last, before + problem.longest)


def _read_in_runs(whole: Partial, runs: list[Run], places: list[Integers], length: int) -> Partial:
    """Return what each query has read in the run that has it, nothing if none has."""
    num_den, log = whole[:2]
    xp, index = _arrays.namespace(num_den), np.full(length, num_den.shape[-2])
    for run, place in zip(runs, places, strict=True):
        index[run.queries] = place
    if (index == num_den.shape[-2]).any():
        # One more row. XLA would fold a choice by a constant when it compiles, for seconds.
        num_den = padded(num_den, 1)
        log = xp.concat([log, xp.full_like(log[..., :1, :], -xp.inf)], axis=-2)
    return Partial(rows_at(num_den, index), rows_at(log, index))


def _with_weight(part: Partial, problem: Problem, side: SideRuns) -> Partial:
    """Add the weight of far keys of a side, and the decay from them to the query."""
    bias, decay = problem.weights.relative_bias, problem.weights.log_decay
    if bias is not None:
        part = weighed_rows(part, bias.table[..., side.end, None, None])
    gap = None if decay is None else np.concatenate(side.gaps)
    if gap is None or not gap.any():
        return part
    return part._replace(log=part.log + problem.xp.astype(_elapsed(problem, gap), problem.dtype))


def _clock(problem: Problem) -> tuple[Array, Array]:
    """Return the mean log decay, and sums of the rest up to each token, ``(..., S, 1)``.

    Differences of these sums round little. None without a decay.
    """
    if problem.weights.log_decay is None:
        return None, None
    decay = decay_of_rows(problem, slice(0, problem.key.shape[-2]))
    mean = problem.xp.mean(decay, axis=-2, keepdims=True)
    return mean, decay_since(decay - mean)


def _elapsed(problem: Problem, gap: Integers) -> Array:
    """Log decay of the last tokens up to each query, of as many as the gap has."""
    (mean, clock), last = _clock(problem), np.arange(len(gap))
    before = rows_at(clock, np.maximum(last - gap, 0))
    before = problem.xp.where(problem.xp.asarray(last < gap)[:, None], 0, before)
    return mean * problem.xp.asarray(gap)[:, None] + clock - before


def _at_positions(problem: Problem, before: Any) -> Problem:
    """Give tokens their position as one more coordinate, of which the map makes features."""
    xp, sequences = problem.xp, sequences_of(problem)
    key = np.concatenate([np.arange(stops.num_keys) for _, stops in sequences])
    query = np.concatenate([np.arange(stops.length) + stops.start for _, stops in sequences])

    def widened(x: Array, place: Integers) -> Array:
        place = xp.astype(xp.asarray(place)[:, None] + before, problem.dtype)
        place = xp.broadcast_to(place, (*x.shape[:-1], 1))
        return xp.concat([xp.astype(x, problem.dtype), place], axis=-1)

    return problem.replace(
        query=widened(problem.query, query),
        key=widened(problem.key, key),
        query_spec=with_position(problem.query_spec, problem.query_change),
        key_spec=with_position(problem.key_spec, problem.key_change),
        query_change=None,
        key_change=None,
    )


def _with_axes(state: State | None, lead: tuple[int, ...]) -> State | None:
    """Return states whose first axis is of sequences with all leading axes beside it."""
    missing = 0 if state is None else len(lead) + 2 - state.kvz.ndim
    if state is None or missing <= 0:
        return state
    ones = (1,) * missing
    kvz, log = (x.reshape((x.shape[0], *ones, *x.shape[1:])) for x in state[:2])
    return _state((kvz, log), state.length)


def _causal(problem: Problem, sums: Any, before: Any, layout: Layout | None = None) -> Any:
    """Scan causal blocks."""

    def step(sums: Any, start: Any, chunk: Any) -> Any:
        part, rows = _part(problem, chunk), _all(chunk)
        place, state = before + start, _state(sums, before + start)
        tokens = token_block(part, "query", rows, place), key_block(part, rows, place)
        found, after = staged_block(part, *tokens, values_and_one_block(part, rows), state)
        return tuple(after[:2]), _pair(found)

    return _scan(problem, sums, step, layout)


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


def _windowed(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Exact weights in a window, far keys by the map."""
    sees, lengths = problem.sees, (problem.query.shape[-2], problem.key.shape[-2])
    at_end = sees.query_start >= 0 and lengths[0] + sees.query_start == lengths[1]
    if sees.cu_seqlens is None and sees.key_stop is None and at_end:
        return _in_blocks(problem, functions)
    read, state = _lines(problem, functions)
    near, _ = _exact(problem.replace(query_spec=problem.exact.spec), functions)
    return combine(read, near), state


def _in_blocks(problem: Problem, functions: BlockFunctions) -> tuple[Partial, State]:
    """Read a state for each block of a window: each chunk has whole blocks."""
    jax, sees, length = sys.modules["jax"], problem.sees, problem.key.shape[-2]
    w, first = min(problem.exact.window or 1, length), initial_state(problem)
    exact = problem.exact._replace(window=w)
    problem, front = problem.replace(exact=exact, state=None), sees.query_start
    query = flip(padded(flip(problem.query), front)) if front else problem.query
    g = max(1, CHUNK // w)
    size, before = g * w, first.length
    query, *keys = _tokens(problem.replace(query=query), size)
    total = keys[0].shape[-2]
    if keys[2] is None:
        keys[2] = problem.xp.ones((total, 1), dtype=problem.xp.bool)
    starts = problem.xp.arange(total // size) * size
    # Keys of the block after each chunk, and the state of all keys from the one after it on.
    later = jax.tree.map(lambda x: cut(padded(x, size)[..., w:, :][..., :total, :], size), keys)
    following = [None if x is None else cut(padded(x, size), size)[1:, ..., :w, :] for x in keys]
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
    chunks = jax.tree.map(lambda x: cut(x, size), (query, keys))
    chunks = starts, *chunks, following, afters
    (sums, last), rows = jax.lax.scan(jax.checkpoint(step), (tuple(first[:2]), empty), chunks)
    rest = _part(problem, (last[0], *last))
    state, place = _state(sums, before), before + total - w
    state = Line(rest, functions, place).add(slice(0, w), state)
    part = _partial(rows, length)
    return Partial(*(x[..., front:, :] for x in part[:2])), _state(state[:2], before + length)


# Exact attention --------------------------------------------------------------------------------


def _exact(problem: Problem, functions: BlockFunctions, seen: Any = None) -> tuple[Partial, None]:
    """Pair blocks of queries with the blocks of keys that any of them sees, and with no other.

    ``seen``: what `_seen` returns, by default of the problem.
    """
    jax, xp, size = sys.modules["jax"], problem.xp, problem.key.shape[-2]
    (key, values), length = keys_and_values(problem, slice(0, size)), problem.query.shape[-2]
    missing = np.zeros(-length % ROWS, np.int64)
    is_window = seen is None and (problem.sees.left, problem.exact.window) != (None, None)
    seen = _seen(problem) if seen is None else seen
    low, stop = (np.append(x, missing).reshape(-1, ROWS) for x in seen)
    mean, clock = _clock(problem)
    last = np.where(low < stop, stop, 0).max(axis=1)
    first = np.minimum(np.where(low < stop, low, size).min(axis=1), last)
    width = max(1, int((last - first).max()))
    is_narrow = is_window and width <= MAX_NARROW
    steps = 1 if is_narrow else -(-width // KEYS)
    block = -(-width // steps)
    width = steps * block
    first = np.minimum(first, max(size - width, 0))
    sees_all = width == size and not low.any() and (stop.ravel()[:length] == size).all()
    table = problem.weights.relative_bias
    # A value of which some rows must see nothing; with a bias of pairs, which may hide some of them
    # too, `exact_pairs` takes care.
    hides = not sees_all and table is None
    finite = xp.where(xp.isfinite(values), values, 0) if hides else values
    tokens = [padded(x, width - size if size < width else 0) for x in (*key[:2], finite, clock)]

    def pairs_of(query: tuple[Any, Tokens], rows: Any, number: Any, keys: Any) -> Partial:
        (start, low, stop, first, time), (x, log_weight, values, clock) = rows, keys
        place = first + number * block + xp.arange(block)
        visible = None if sees_all else (place >= low[:, None]) & (place < stop[:, None])
        offset = place - (start + xp.arange(ROWS)[:, None] + problem.sees.query_start)
        bias = _bias(problem, offset, None if time is None else (mean, time, clock))
        key, block_of = Tokens(x, log_weight, 0), functions.exact_block
        if table is None:
            return Partial(*_pair(block_of(*query, key, values, visible, bias)))
        part = exact_pairs(*query, key, values, visible, bias, True, block_of)
        return Partial(*_pair(part))

    def step(_: Any, chunk: Any) -> Any:
        rows, end, query = chunk
        part = problem.replace(query=query)
        tokens_of = raw_tokens(part, "query", slice(0, ROWS), 0)
        taken = biased_queries(part, problem.query_spec, tokens_of)
        keys = tokens
        if width < size:
            taken_of = jax.lax.dynamic_slice_in_dim
            keys = jax.tree.map(lambda x: taken_of(x, rows[3], width, axis=x.ndim - 2), tokens)

        if is_narrow:
            return (), _pair(pairs_of(taken, rows, 0, keys))

        def add(sums: Any, of_block: Any) -> Any:
            number, keys = of_block

            def more() -> Any:
                return _pair(combine(Partial(*sums), pairs_of(taken, rows, number, keys)))

            return jax.lax.cond(rows[3] + number * block < end, more, lambda: sums), ()

        nothing = _pair(no_keys_seen(problem, taken[1]))
        blocks = jax.tree.map(lambda x: cut(x, block), keys)
        return (), jax.lax.scan(jax.checkpoint(add), nothing, (xp.arange(steps), blocks))[0]

    query = cut(padded(problem.query, -length % ROWS), ROWS)
    rows = (xp.asarray(x) for x in (np.arange(len(first)) * ROWS, low, stop, first))
    time = None if clock is None else cut(padded(clock, -length % ROWS), ROWS)
    chunks = (*rows, time), xp.asarray(last), query
    part = _partial(jax.lax.scan(jax.checkpoint(step), (), chunks)[1], length)
    if hides:
        counts = key.log_weight is None or key.log_weight > -xp.inf
        part = part._replace(num_den=part.num_den + _infinities(values, counts, *seen))
    return part, None


def _bias(problem: Problem, offset: Array, decay: Any) -> Array:
    """Log weight of pairs by their offset, or by the decay between them; None without either."""
    xp, table = problem.xp, problem.weights.relative_bias
    if table is not None:
        index = xp.clip(offset, -table.reach - 1, table.reach + 1) + table.reach + 1
        return table.table[..., index]
    if decay is None:
        return None
    mean, time, clock = decay
    between = time - xp.matrix_transpose(clock) - mean * offset
    return xp.astype(-abs(between), problem.dtype)


def _infinities(values: Array, counts: Array, low: Integers, stop: Integers) -> Array:
    """Sum of the infinite values that each query sees, 0 for none, NaN where NaN is seen too."""
    jax, xp = sys.modules["jax"], _arrays.namespace(values)

    def count(sums: Array, holds: Array) -> tuple[Array, Array]:
        return sums + holds, sums

    def reached(infinity: Any) -> Array:
        holds = (xp.isnan(values) | (values == infinity)) & counts
        moved = xp.moveaxis(padded(holds, 1), -2, 0)
        _, before = jax.lax.scan(count, xp.zeros(moved.shape[1:], dtype=xp.int32), moved)
        first, last = (before[xp.asarray(x)] for x in (np.minimum(low, stop), stop))
        return xp.moveaxis(xp.where(last > first, infinity, 0), 0, -2)

    def infinities() -> Array:
        return xp.astype(reached(xp.inf) + reached(-xp.inf), values.dtype)

    nothing = jax.eval_shape(infinities)
    nothing = xp.zeros(nothing.shape, dtype=nothing.dtype)
    return jax.lax.cond(xp.all(xp.isfinite(values)), lambda: nothing, infinities)


def _ends(problem: Problem) -> tuple[Integers, Integers, Integers]:
    """Return the place of each query, and the first and the stop of the keys that it may see."""
    sees, size = problem.sees, problem.key.shape[-2]
    place = np.arange(problem.query.shape[-2]) + sees.query_start
    front, stop = np.zeros_like(place), np.full_like(place, size)
    if sees.cu_seqlens is not None:
        lengths = np.diff(sees.cu_seqlens)
        front, stop = (np.repeat(x, lengths) for x in (sees.cu_seqlens[:-1], sees.cu_seqlens[1:]))
    if sees.key_stop is not None:
        stop = np.minimum(stop, sees.key_stop)
    return place, front, stop if sees.ahead else np.clip(place + 1, 0, stop)


def _seen(problem: Problem) -> tuple[Integers, Integers]:
    """Return the first key that each query pairs with, and the stop of those that it pairs with."""
    (left, right), window = band(problem), problem.exact.window
    place, front, stop = _ends(problem)
    low, stop = np.maximum(place - left, front), np.minimum(np.maximum(place + right + 1, 0), stop)
    if window is not None:
        block = (place - front) // window
        low = np.maximum(front + (block - 1) * window, front)
        stop = np.minimum(stop, front + np.maximum(block + 2, 0) * window)
    return low, stop


LOOPS: dict[str, Loop] = {
    "full": _linear,
    "causal": _linear,
    "stops": _lines,
    "two-sided": _lines,
    "window": _windowed,
    "exact": _exact,
}
"""The loop of each `Problem.mode`."""
